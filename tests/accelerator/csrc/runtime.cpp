#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "allocator.h"
#include "device_memory.h"
#include "pinned.h"
#include "streams.h"

namespace openreg {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// The CPU's generator under the device's name: a seed gives the device the numbers it gives the CPU.
class Generator final : public at::CPUGeneratorImpl {
 public:
  Generator() : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(DeviceMemory::instance().contains(address), "openreg: ", address, " is no memory of the device");
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

// What torch.Event holds: the last point that it was recorded at.
class Event {
 public:
  void record(StreamId stream) {
    auto signal = mark(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    signal_ = std::move(signal);
  }
  SignalPtr signal() {
    std::lock_guard<std::mutex> lock(mutex_);
    return signal_;
  }

 private:
  std::mutex mutex_;
  SignalPtr signal_;
};

// An event that was never recorded is one that has passed.
SignalPtr signal_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->signal();
}

Stream stream_of(StreamId id) {
  return Stream(Stream::UNSAFE, kDevice, id);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDeviceType;
  }
  Device exchangeDevice(Device) const override {
    return kDevice;
  }
  Device getDevice() const override {
    return kDevice;
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  Stream getStream(Device) const noexcept override {
    return stream_of(current_stream());
  }
  Stream getDefaultStream(Device) const override {
    return stream_of(kDefaultStream);
  }
  Stream getNewStream(Device, int) const override {
    return stream_of(next_stream());
  }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    return stream_of(next_stream());
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    return is_idle(stream.id());
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize(stream.id());
  }
  void synchronizeDevice(const DeviceIndex) const override {
    synchronize_all();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    device_allocator().recordStream(memory, stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->record(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    auto signal = signal_of(event);
    if (signal != nullptr && !signal->is_set()) {
      hold(stream.id(), signal);
    }
  }
  bool queryEvent(void* event) const override {
    auto signal = signal_of(event);
    return signal == nullptr || signal->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (auto signal = signal_of(event)) {
      wait_for(*signal);
    }
  }
  // As with CUDA who asks does not wait: torch.Event raises if one has not passed, was not recorded, or has no timing.
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return signal_of(end)->at_ms() - signal_of(begin)->at_ms();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

// The macro names its variable after the class.
namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

const at::Generator& default_generator() {
  static auto& generator = *new at::Generator(at::make_generator<Generator>());
  return generator;
}

std::mutex& generator_mutex() {
  static auto& mutex = *new std::mutex();
  return mutex;
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto memory = device_allocator().allocate(nbytes);
  const size_t kept_bytes = std::min(nbytes, storage.nbytes());
  if (kept_bytes > 0) {
    device_allocator().copy_data(memory.get(), storage.data(), kept_bytes);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(nbytes);
}

}  // namespace openreg
