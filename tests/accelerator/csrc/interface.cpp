// What Python calls, by ctypes: plain C functions, so that no headers of Python are needed and no mode sees a call.
//
// ctypes lets go of Python's lock around each.  What may fail returns a code or nothing; nothing raises.

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "allocator.h"
#include "counters.h"
#include "device_memory.h"
#include "pinned.h"
#include "runtime.h"
#include "streams.h"

namespace openreg {
namespace {

// Streams that are held, each by a number, until it is released.
class Holds {
 public:
  int64_t add(SignalPtr signal) {
    std::lock_guard<std::mutex> lock(mutex_);
    signals_[++last_] = std::move(signal);
    return last_;
  }
  void release(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = signals_.find(number);
    if (found != signals_.end()) {
      found->second->set();
      signals_.erase(found);
    }
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, SignalPtr> signals_;
  int64_t last_ = 0;
};

Holds& holds() {
  static auto& holds = *new Holds();
  return holds;
}

at::Tensor generator_state() {
  std::lock_guard<std::mutex> lock(generator_mutex());
  return at::Tensor(default_generator().unsafeGetGeneratorImpl()->get_state());
}

}  // namespace
}  // namespace openreg

extern "C" {

void openreg_set_delays(int kernel_us, int copy_us, uint64_t seed) {
  openreg::set_delays(kernel_us, copy_us, seed);
}

void openreg_set_pace(double operations, double memory_bytes, double link_bytes) {
  openreg::set_pace(operations, memory_bytes, link_bytes);
}

// `engine`: see openreg::Engine.
double openreg_busy_ms(int engine) {
  return openreg::busy_ms(static_cast<openreg::Engine>(engine));
}

void openreg_set_overwriting(int when) {
  openreg::set_overwriting(static_cast<openreg::Overwriting>(when));
}

void openreg_set_memory_limit(uint64_t nbytes) {
  openreg::set_memory_limit(nbytes);
}

uint64_t openreg_total_bytes() {
  return openreg::DeviceMemory::instance().total_bytes();
}

void openreg_drain() {
  openreg::drain_all();
}

int64_t openreg_current_stream() {
  return openreg::current_stream();
}

int64_t openreg_hold(int64_t stream) {
  auto signal = std::make_shared<openreg::Signal>();
  openreg::hold(stream, signal);
  return openreg::holds().add(signal);
}

void openreg_release(int64_t held) {
  openreg::holds().release(held);
}

void openreg_keep_busy(int64_t stream, int64_t us) {
  openreg::enqueue(stream, openreg::Work::kMark, [us] { usleep(us); });
}

int openreg_register_host(uint64_t address, uint64_t nbytes) {
  return static_cast<int>(openreg::register_host(reinterpret_cast<char*>(address), nbytes));
}

int openreg_unregister_host(uint64_t address) {
  return static_cast<int>(openreg::unregister_host(reinterpret_cast<char*>(address)));
}

void openreg_seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(openreg::generator_mutex());
  openreg::default_generator().unsafeGetGeneratorImpl()->set_current_seed(seed);
}

uint64_t openreg_initial_seed() {
  std::lock_guard<std::mutex> lock(openreg::generator_mutex());
  return openreg::default_generator().current_seed();
}

uint64_t openreg_generator_state_bytes() {
  return openreg::generator_state().nbytes();
}

void openreg_get_generator_state(char* into) {
  auto state = openreg::generator_state();
  std::memcpy(into, state.const_data_ptr(), state.nbytes());
}

// `state` is a CPU tensor's bytes, as many as openreg_generator_state_bytes says.
void openreg_set_generator_state(const char* from) {
  auto state = openreg::generator_state();
  std::memcpy(state.mutable_data_ptr(), from, state.nbytes());
  std::lock_guard<std::mutex> lock(openreg::generator_mutex());
  openreg::default_generator().unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

// The text stays until this thread asks again.
const char* openreg_counts() {
  thread_local std::string counts;
  counts = openreg::counts_as_json();
  return counts.c_str();
}
}
