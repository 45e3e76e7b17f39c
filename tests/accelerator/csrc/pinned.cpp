#include "pinned.h"

#include <sys/mman.h>

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace openreg {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr int kOverwritten = 0xEE;

struct Range {
  size_t nbytes;
  bool is_ours;                   // allocated here, not registered
  std::vector<SignalPtr> copies;  // where streams have to come before it may be freed
};

bool is_mapped(char* address, size_t nbytes) {
  const size_t before = reinterpret_cast<uintptr_t>(address) % kPageBytes;
  // msync says whether all of a range is mapped; it writes nothing of anonymous memory.
  return msync(address - before, nbytes + before, MS_ASYNC) == 0;
}

bool are_over(const std::vector<SignalPtr>& copies) {
  for (const auto& copy : copies) {
    if (!copy->is_set()) {
      return false;
    }
  }
  return true;
}

class PinnedMemory {
 public:
  Registration add(char* address, size_t nbytes) {
    if (!is_mapped(address, nbytes)) {
      return Registration::kNotMapped;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_new = ranges_.emplace(address, Range{nbytes, false, {}}).second;
    return is_new ? Registration::kDone : Registration::kAlreadyRegistered;
  }

  Registration remove(char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ranges_.find(address);
    if (found == ranges_.end() || found->second.is_ours) {
      return Registration::kNotRegistered;
    }
    ranges_.erase(found);
    return Registration::kDone;
  }

  char* allocate(size_t nbytes) {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, kPageBytes, nbytes) == 0, "openreg: no host memory for ", nbytes, " bytes");
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.emplace(static_cast<char*>(address), Range{nbytes, true, {}});
    return static_cast<char*>(address);
  }

  void free(char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ranges_.find(address);
    TORCH_INTERNAL_ASSERT(found != ranges_.end(), "openreg: pinned memory is freed that was never allocated");
    leaving_.emplace_back(address, std::move(found->second));
    ranges_.erase(found);
    std::vector<std::pair<char*, Range>> staying;
    for (auto& [each, range] : leaving_) {
      if (are_over(range.copies)) {
        std::memset(each, kOverwritten, range.nbytes);
        std::free(each);
      } else {
        staying.emplace_back(each, std::move(range));
      }
    }
    leaving_.swap(staying);
  }

  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address) != nullptr;
  }

  void note(const void* address, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Range* range = find(address);
    if (range != nullptr && range->is_ours) {
      range->copies.push_back(mark(stream));
    }
  }

 private:
  Range* find(const void* address) {
    char* byte = static_cast<char*>(const_cast<void*>(address));
    auto after = ranges_.upper_bound(byte);
    if (after == ranges_.begin()) {
      return nullptr;
    }
    auto found = std::prev(after);
    return byte < found->first + found->second.nbytes ? &found->second : nullptr;
  }

  std::mutex mutex_;  // guards all below
  std::map<char*, Range> ranges_;
  std::vector<std::pair<char*, Range>> leaving_;
};

PinnedMemory& pinned_memory() {
  static auto& memory = *new PinnedMemory();
  return memory;
}

void free_pinned(void* address) {
  if (address != nullptr) {
    pinned_memory().free(static_cast<char*>(address));
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    const c10::Device host(c10::DeviceType::CPU);
    void* address = nbytes == 0 ? nullptr : pinned_memory().allocate(nbytes);
    return {address, address, &free_pinned, host};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

}  // namespace

Registration register_host(char* address, size_t nbytes) {
  return pinned_memory().add(address, nbytes);
}

Registration unregister_host(char* address) {
  return pinned_memory().remove(address);
}

c10::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* address) {
  return pinned_memory().has(address);
}

void note_copy(const void* address, StreamId stream) {
  pinned_memory().note(address, stream);
}

}  // namespace openreg
