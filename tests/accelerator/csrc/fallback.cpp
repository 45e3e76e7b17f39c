// Every other operator: the CPU's kernel, run by the current stream's thread.
//
// 1. An operator that only writes its arguments is queued, and the host goes on.
// 2. So is one that returns new tensors, once its meta kernel has said which.
// 3. Any other is queued and waited for: those that draw random numbers, return values, or whose results' shapes
//    depend on values (`nonzero`).
// 4. Arguments in host memory, such as scalars, are read before the call returns, unless the host waits.
//
// Who frees or changes an argument of a queued kernel sees what a GPU would show: nothing is kept alive for it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <exception>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "counters.h"
#include "python_lock.h"
#include "runtime.h"
#include "sparse.h"
#include "streams.h"
#include "tensors.h"

namespace openreg {
namespace {

using at::Tensor;
using c10::IValue;
using Values = std::vector<IValue>;
using torch::jit::Stack;

constexpr int kNone = -1;

// ------------------------------------------------------------------ what an operator's schema says

struct Signature {
  std::vector<bool> is_written;  // by argument
  int generator = kNone;         // which argument draws random numbers
  std::vector<int> same_as;      // by result: the argument that it is or views
  bool has_written = false;      // an argument is written
  bool has_views = false;        // a result is a view of an argument
  bool returns_arguments = true; // every result is an argument, written
  bool returns_tensors = true;   // every result is one tensor
};

int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && info->beforeSets() == alias.beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return kNone;
}

Signature read_signature(const c10::FunctionSchema& schema) {
  Signature signature;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    signature.is_written.push_back(is_written);
    signature.has_written |= is_written;
    if (argument.type()->str().find("Generator") != std::string::npos) {
      signature.generator = static_cast<int>(i);
    }
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    const int same_as = alias == nullptr ? kNone : aliased_argument(schema, *alias);
    signature.same_as.push_back(same_as);
    signature.has_views |= alias != nullptr && !alias->isWrite();
    signature.returns_arguments &= same_as != kNone;
    signature.returns_tensors &= result.type()->kind() == c10::TypeKind::TensorType;
  }
  signature.returns_arguments &= !signature.has_views;
  return signature;
}

const Signature& signature_of(const c10::FunctionSchema& schema) {
  static auto& mutex = *new std::mutex();  // guards the next
  static auto& signatures = *new std::unordered_map<c10::OperatorName, Signature>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = signatures.find(schema.operator_name());
  if (found == signatures.end()) {
    found = signatures.emplace(schema.operator_name(), read_signature(schema)).first;
  }
  return found->second;
}

// Operators that have no meta kernel that serves: those that were found, and those whose results the CPU leaves empty.
class WithoutMeta {
 public:
  bool has(const c10::OperatorName& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_.count(name) > 0;
  }
  void add(const c10::OperatorName& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.insert(name);
  }

 private:
  std::mutex mutex_;
  std::unordered_set<c10::OperatorName> names_{{"aten::_embedding_bag", ""}, {"aten::_embedding_bag_forward_only", ""}};
};

WithoutMeta& without_meta() {
  static auto& names = *new WithoutMeta();
  return names;
}

// ------------------------------------------------------------------ arguments, on another device

enum class Target { kCpu, kMeta };
enum class HostTensors { kCopied, kShared };

// Turns arguments of the device into ones of the CPU or the meta device; the same tensor into the same.
class Translation {
 public:
  explicit Translation(Target target, HostTensors host_tensors = HostTensors::kCopied)
      : target_(target), host_tensors_(host_tensors) {}

  IValue translate(const IValue& value, bool is_written) {
    if (value.isTensor()) {
      return translate(value.toTensor(), is_written);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : value.toTensorVector()) {
        tensors.push_back(translate(each, is_written));
      }
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& each : value.toOptionalTensorVector()) {
        tensors.push_back(each ? std::optional<Tensor>(translate(*each, is_written)) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      return at::Device(target_ == Target::kMeta ? at::kMeta : at::kCPU);
    }
    return value;
  }

  Tensor translate(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) {
      return tensor;
    }
    auto& translated = translated_[tensor.unsafeGetTensorImpl()];
    if (!translated.defined()) {
      translated = target_ == Target::kMeta ? on_meta(tensor) : on_cpu(tensor, is_written);
    }
    return translated;
  }

  // Lets `translated` stand for `tensor`.
  void replace(const Tensor& tensor, Tensor translated) {
    translated_[tensor.unsafeGetTensorImpl()] = std::move(translated);
  }

  // The argument that `translated` stands for, if it is one.
  Tensor argument_of(const Tensor& translated, const Values& arguments) const {
    for (const auto& value : arguments) {
      if (value.isTensor() && value.toTensor().defined()) {
        auto found = translated_.find(value.toTensor().unsafeGetTensorImpl());
        if (found != translated_.end() && found->second.is_same(translated)) {
          return value.toTensor();
        }
      }
    }
    return Tensor();
  }

 private:
  static Tensor on_meta(const Tensor& tensor) {
    if (!is_on_device(tensor) && tensor.dim() == 0) {
      return tensor;  // a scalar, whose value type promotion does not need
    }
    const auto options = tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }

  Tensor on_cpu(const Tensor& tensor, bool is_written) const {
    if (is_on_device(tensor)) {
      return reachable(tensor);
    }
    // Nobody can change a number that stands in for a tensor, and as an operator's argument it would be a number again.
    const bool may_change = !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return host_tensors_ == HostTensors::kCopied && !is_written && may_change ? tensor.detach().clone() : tensor;
  }

  const Target target_;
  const HostTensors host_tensors_;
  std::unordered_map<c10::TensorImpl*, Tensor> translated_;
};

// ------------------------------------------------------------------ how much there is to compute

// Adds what a value's tensors of the device have to the bytes.
void add_bytes(const IValue& value, double& nbytes) {
  if (value.isTensor() && value.toTensor().defined()) {
    nbytes += static_cast<double>(value.toTensor().nbytes());
  } else if (value.isTensorList()) {
    for (const Tensor& each : value.toTensorVector()) {
      nbytes += static_cast<double>(each.nbytes());
    }
  }
}

double elements(const IValue& value) {
  return static_cast<double>(value.toTensor().numel());
}

// Operations of products of matrices and of attention, as utilisation is commonly counted: what a mask leaves out, too.
double operations_of(const std::string& name, const Values& arguments, const Values& results) {
  const bool is_sum = name == "aten::addmm" || name == "aten::baddbmm";
  if (is_sum || name == "aten::mm" || name == "aten::bmm") {
    const auto inner = arguments[is_sum ? 1 : 0].toTensor().size(-1);
    return 2.0 * elements(results.empty() ? arguments.back() : results[0]) * static_cast<double>(inner);
  }
  constexpr const char* kAttention = "aten::_scaled_dot_product_flash_attention_for_cpu";
  if (name == kAttention) {  // (query, key, ...), each (batch, heads, length, width)
    return 4.0 * elements(arguments[0]) * static_cast<double>(arguments[1].toTensor().size(-2));
  }
  if (name == std::string(kAttention) + "_backward") {  // the gradient comes first
    return 8.0 * elements(arguments[1]) * static_cast<double>(arguments[2].toTensor().size(-2));
  }
  return 0;
}

// `results`: new ones.  Out of the pace, nothing is counted.
Load load_of(const c10::OperatorHandle& op, const Values& arguments, const Values& results, bool is_needed = false) {
  Load load{Engine::kKernels, 0, 0, is_needed};
  if (is_paced()) {
    for (const auto* values : {&arguments, &results}) {
      for (const auto& value : *values) {
        add_bytes(value, load.nbytes);
      }
    }
    load.operations = operations_of(op.operator_name().name, arguments, results);
  }
  return load;
}

// ------------------------------------------------------------------ one call

bool has_host_tensor(const IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() && !is_on_device(value.toTensor());
  }
  if (value.isTensorList()) {
    for (const Tensor& each : value.toTensorVector()) {
      if (!is_on_device(each)) {
        return true;
      }
    }
  }
  return false;
}

bool is_empty_tensor(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 0;
}

Values call_operator(const c10::OperatorHandle& op, Values arguments) {
  Stack stack(std::move(arguments));
  op.callBoxed(stack);
  return stack;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Values arguments)
      : op_(op), signature_(signature_of(op.schema())), arguments_(std::move(arguments)), stream_(current_stream()) {}

  Values run() {
    if (may_be_queued_in_place()) {
      return queue_in_place();
    }
    const bool may_have_meta = signature_.returns_tensors && !signature_.same_as.empty() && !signature_.has_written &&
        signature_.generator == kNone && !signature_.has_views;
    if (may_have_meta && !without_meta().has(op_.operator_name())) {
      if (auto shapes = shapes_of_results()) {
        return queue_into_new(*shapes);
      }
      auto results = run_and_wait();  // raises what the arguments deserve
      without_meta().add(op_.operator_name());
      return results;
    }
    return run_and_wait();
  }

 private:
  // Outputs that are empty may have to be resized, which only the host can do; so the host waits for those.
  bool may_be_queued_in_place() const {
    if (!signature_.returns_arguments || !signature_.has_written || signature_.generator != kNone) {
      return false;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (signature_.is_written[i] && (has_host_tensor(arguments_[i]) || is_empty_tensor(arguments_[i]))) {
        return false;
      }
    }
    return true;
  }

  Values translated(Translation& translation) const {
    Values values;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      values.push_back(translation.translate(arguments_[i], signature_.is_written[i]));
    }
    return values;
  }

  void count_as(Counter counter) const {
    const auto& name = op_.operator_name();
    count_kernel(counter, name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  }

  Values queue_in_place() {
    Translation translation(Target::kCpu);
    Values values = translated(translation);
    std::vector<std::pair<Tensor, const void*>> outputs;
    for (size_t i = 0; i < values.size(); ++i) {
      if (signature_.is_written[i] && values[i].isTensor() && values[i].toTensor().defined()) {
        outputs.emplace_back(values[i].toTensor(), values[i].toTensor().const_data_ptr());
      }
    }
    count_as(Counter::kQueuedKernels);
    enqueue(stream_, Work::kKernel, [op = op_, values, outputs] {
      call_operator(op, values);
      for (const auto& [output, address] : outputs) {
        TORCH_CHECK(output.const_data_ptr() == address, "openreg: ", op.operator_name(), " resized its output");
      }
    }, load_of(op_, arguments_, {}));
    Values results;
    for (int argument : signature_.same_as) {
      results.push_back(arguments_[argument]);
    }
    return results;
  }

  // Tensors of the meta device like the results, if the operator can say.
  std::optional<Values> shapes_of_results() const {
    try {
      Translation translation(Target::kMeta);
      at::AutoDispatchBelowAutograd without_autograd;
      Values shapes = call_operator(op_, translated(translation));
      for (const auto& shape : shapes) {
        if (!shape.isTensor()) {
          return std::nullopt;
        }
        const Tensor& tensor = shape.toTensor();
        if (tensor.defined() && (!tensor.is_meta() || tensor.is_sparse())) {
          return std::nullopt;
        }
      }
      return shapes;
    } catch (const std::exception&) {
      forget_python_error();  // meta kernels may be Python's
      return std::nullopt;
    }
  }

  Values queue_into_new(const Values& shapes) {
    Translation translation(Target::kCpu);
    Values values = translated(translation);
    Values results;
    std::vector<Tensor> targets;
    for (const auto& shape : shapes) {
      results.push_back(shape.toTensor().defined() ? like(shape.toTensor()) : Tensor());
      targets.push_back(shape.toTensor().defined() ? reachable(results.back().toTensor()) : Tensor());
    }
    count_as(Counter::kQueuedKernels);
    enqueue(stream_, Work::kKernel, [op = op_, values, targets]() mutable {
      Values computed = call_operator(op, values);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined() && computed[i].toTensor().defined()) {
          targets[i].copy_(computed[i].toTensor());
        }
      }
    }, load_of(op_, arguments_, results));
    return results;
  }

  static Tensor like(const Tensor& tensor) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice).pinned_memory(false));
  }

  Values run_and_wait() {
    Translation translation(Target::kCpu, HostTensors::kShared);
    std::vector<size_t> growing = replace_empty_outputs(translation);
    Values values = translated(translation);
    count_as(Counter::kAwaitedKernels);
    Values computed = compute_on_stream(values);
    for (size_t i : growing) {
      grow(arguments_[i].toTensor(), values[i].toTensor());
    }
    Values results;
    for (size_t i = 0; i < computed.size(); ++i) {
      results.push_back(result(i, computed[i], values, translation));
    }
    return results;
  }

  // An output without elements may be resized by the kernel: let it do so to a tensor of its own.
  std::vector<size_t> replace_empty_outputs(Translation& translation) const {
    std::vector<size_t> replaced;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (signature_.is_written[i] && is_empty_tensor(arguments_[i]) && is_on_device(arguments_[i].toTensor())) {
        const Tensor& output = arguments_[i].toTensor();
        translation.replace(output, at::empty(output.sizes(), output.options().device(at::kCPU)));
        replaced.push_back(i);
      }
    }
    return replaced;
  }

  void grow(const Tensor& output, const Tensor& computed) const {
    if (output.sizes() != computed.sizes()) {
      output.resize_(computed.sizes());
    }
    if (computed.numel() > 0) {
      copy_into(output, computed);
    }
  }

  void copy_into(const Tensor& tensor, const Tensor& computed) const {
    auto target = reachable(tensor);
    enqueue(stream_, Work::kCopy, [target, computed]() mutable { target.copy_(computed); });
  }

  Values compute_on_stream(Values values) const {
    auto done = std::make_shared<Signal>();
    auto results = std::make_shared<Values>();
    auto failure = std::make_shared<std::exception_ptr>();
    const int draws = signature_.generator;
    enqueue(stream_, Work::kKernel, [op = op_, values, draws, done, results, failure]() mutable {
      SetAtEnd at_end(done);
      try {
        *results = draws == kNone ? call_operator(op, values) : call_with_chance(op, values, draws);
      } catch (...) {
        *failure = std::current_exception();
      }
    }, load_of(op_, arguments_, {}, /*is_needed=*/true));
    wait_for(*done);
    if (*failure) {
      std::rethrow_exception(*failure);
    }
    return std::move(*results);
  }

  // Lends the CPU's kernel a CPU generator with the device's state, and takes the state back.
  static Values call_with_chance(const c10::OperatorHandle& op, Values& values, int draws) {
    auto generator = values[draws].isGenerator() ? values[draws].toGenerator() : default_generator();
    if (generator.device().type() != kDeviceType) {
      return call_operator(op, values);
    }
    std::lock_guard<std::mutex> lock(generator_mutex());
    auto lent = at::detail::createCPUGenerator();
    lent.set_state(Tensor(generator.unsafeGetGeneratorImpl()->get_state()));
    values[draws] = IValue(lent);
    auto results = call_operator(op, values);
    generator.unsafeGetGeneratorImpl()->set_state(*lent.get_state().unsafeGetTensorImpl());
    return results;
  }

  IValue result(size_t i, const IValue& computed, const Values& values, const Translation& translation) const {
    const int same_as = signature_.same_as[i];
    if (same_as != kNone && signature_.is_written[same_as]) {
      return arguments_[same_as];
    }
    if (same_as != kNone && computed.isTensor()) {
      return view_of(arguments_[same_as].toTensor(), values[same_as].toTensor(), computed.toTensor());
    }
    if (computed.isTensor()) {
      return lifted(computed.toTensor(), translation);
    }
    if (computed.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& each : computed.toTensorVector()) {
        tensors.push_back(lifted(each, translation));
      }
      return tensors;
    }
    return computed;
  }

  // The view of `argument` that `view` is of `values`, which stood for it.
  Tensor view_of(const Tensor& argument, const Tensor& stood_for, const Tensor& view) const {
    TORCH_CHECK(view.dtype() == argument.dtype(), "openreg: ", op_.operator_name(), " views another dtype");
    const auto* begin = static_cast<const char*>(stood_for.const_data_ptr());
    const auto distance = static_cast<const char*>(view.const_data_ptr()) - begin;
    const auto offset = argument.storage_offset() + distance / static_cast<int64_t>(view.itemsize());
    return at::as_strided(argument, view.sizes(), view.strides(), offset);
  }

  // `computed` on the device, or the argument that it is.
  Tensor lifted(const Tensor& computed, const Translation& translation) const {
    if (!computed.defined()) {
      return computed;
    }
    Tensor argument = translation.argument_of(computed, arguments_);
    if (argument.defined()) {
      return argument;
    }
    if (computed.is_sparse()) {
      return moved(computed, kDevice);
    }
    Tensor result = like(computed);
    copy_into(result, computed);
    return result;
  }

  const c10::OperatorHandle op_;
  const Signature& signature_;
  const Values arguments_;
  const StreamId stream_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Values arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  for (auto& result : Call(op, std::move(arguments)).run()) {
    torch::jit::push(*stack, std::move(result));
  }
}

c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void run_instead(const char* name, Values arguments, Stack* stack) {
  for (auto& result : Call(find_operator(name), std::move(arguments)).run()) {
    torch::jit::push(*stack, std::move(result));
  }
}

// PyTorch leaves convolutions of foreign devices to these two.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  run_instead("aten::convolution", torch::jit::pop(*stack, op.schema().arguments().size()), stack);
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  constexpr size_t kGradient = 0, kBiasSizes = 3;  // arguments
  Values arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const bool has_bias = arguments.back().toBoolList().get(2);
  IValue bias_sizes;
  if (has_bias) {
    bias_sizes = std::vector<int64_t>{arguments[kGradient].toTensor().size(1)};
  }
  arguments.insert(arguments.begin() + kBiasSizes, bias_sizes);
  run_instead("aten::convolution_backward", std::move(arguments), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Without this it would be composed of other operators, unlike on the CPU.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // These write to an output of another shape first, which only the CPU can resize.
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace openreg
