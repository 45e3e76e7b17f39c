#include "counters.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

namespace openreg {
namespace {

constexpr std::array<const char*, 5> kNames = {
    "asynchronous_copies", "staged_copies", "blocking_copies", "queued_kernels", "awaited_kernels"};

std::mutex& mutex() {
  static auto& mutex = *new std::mutex();  // guards the counts
  return mutex;
}

std::map<std::string, int64_t>& counts() {
  static auto& counts = *[] {
    auto* counts = new std::map<std::string, int64_t>();
    for (const char* name : kNames) {
      (*counts)[name] = 0;
    }
    return counts;
  }();
  return counts;
}

}  // namespace

void count(Counter counter) {
  std::lock_guard<std::mutex> lock(mutex());
  ++counts()[kNames[static_cast<size_t>(counter)]];
}

void count_kernel(Counter counter, const std::string& operator_name) {
  std::lock_guard<std::mutex> lock(mutex());
  const char* name = kNames[static_cast<size_t>(counter)];
  ++counts()[name];
  ++counts()[std::string(name) + " " + operator_name];
}

std::string counts_as_json() {
  std::lock_guard<std::mutex> lock(mutex());
  std::string json = "{";
  for (const auto& [name, number] : counts()) {
    json += (json.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(number);
  }
  return json + "}";
}

}  // namespace openreg
