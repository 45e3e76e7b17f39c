#include "pace.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

namespace openreg {
namespace {

constexpr size_t kEngines = 3;
constexpr double kMsPerS = 1e3;
constexpr double kNsPerMs = 1e6;
constexpr unsigned long kTimerSlackNs = 1000;  // a thread's own is 50 us

struct Clock {
  double free_ms = 0;  // when the engine has done what it was given so far
  double busy_ms = 0;
};

struct Pace {
  double operations = 0;
  double memory_bytes = 0;
  double link_bytes = 0;
  std::array<Clock, kEngines> clocks{};

  double taken_ms(const Load& load) const {
    if (load.engine != Engine::kKernels) {
      return kMsPerS * load.nbytes / link_bytes;
    }
    return kMsPerS * std::max(load.operations / operations, load.nbytes / memory_bytes);
  }
};

std::mutex pace_mutex;
Pace pace;  // guarded by it
std::atomic<bool> is_set{false};

void sleep_until(double at_ms) {
  thread_local const bool is_precise = prctl(PR_SET_TIMERSLACK, kTimerSlackNs) == 0;
  (void)is_precise;
  const auto at_ns = static_cast<int64_t>(at_ms * kNsPerMs);
  const timespec at{at_ns / 1'000'000'000, at_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) != 0) {
  }
}

}  // namespace

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * kMsPerS + static_cast<double>(now.tv_nsec) / kNsPerMs;
}

void set_pace(double operations, double memory_bytes, double link_bytes) {
  std::lock_guard<std::mutex> lock(pace_mutex);
  pace = Pace{operations, memory_bytes, link_bytes};
  is_set = operations > 0;
}

bool is_paced() {
  return is_set;
}

double sleep_through(const Load& load, double earliest_ms) {
  double end_ms = 0;
  {
    std::lock_guard<std::mutex> lock(pace_mutex);
    auto& clock = pace.clocks[static_cast<size_t>(load.engine)];
    const double taken_ms = pace.taken_ms(load);
    clock.free_ms = std::max(clock.free_ms, earliest_ms) + taken_ms;
    clock.busy_ms += taken_ms;
    end_ms = clock.free_ms;
  }
  sleep_until(end_ms);
  return end_ms;
}

double busy_ms(Engine engine) {
  std::lock_guard<std::mutex> lock(pace_mutex);
  return pace.clocks[static_cast<size_t>(engine)].busy_ms;
}

}  // namespace openreg
