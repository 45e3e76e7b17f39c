#include "allocator.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "device_memory.h"
#include "streams.h"

namespace openreg {
namespace {

constexpr size_t kGranuleBytes = 512;                // as CUDA's caching allocator rounds
constexpr size_t kSegmentBytes = size_t{2} << 20;    // segments are multiples
constexpr int kOverwritten = 0xFF;

size_t round_up(size_t nbytes, size_t granule) {
  return (nbytes + granule - 1) / granule * granule;
}

struct Block {
  char* address;
  size_t nbytes;
  StreamId stream;
  bool is_taken = false;  // by a tensor, or by streams that have not come past its end
  size_t requested_bytes = 0;
  Block* previous = nullptr;  // in its segment, as is the next
  Block* next = nullptr;
  std::set<StreamId> other_streams;
};

void release_memory(void* address);

class Allocator final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    if (nbytes == 0) {
      return {nullptr, nullptr, &release_memory, device};
    }
    std::unique_lock<std::mutex> lock(mutex_);
    Block* block = take(round_up(nbytes, kGranuleBytes), lock);
    if (block == nullptr) {
      refuse(nbytes);
    }
    block->requested_bytes = nbytes;
    taken_[block->address] = block;
    count_taken(*block);
    if (overwriting_ == Overwriting::kHandedOut) {
      overwrite(*block);
    }
    return {block->address, block->address, &release_memory, device};
  }

  void release(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(address));
    TORCH_INTERNAL_ASSERT(found != taken_.end(), "openreg: memory is freed that was never allocated");
    Block* block = found->second;
    taken_.erase(found);
    count_given_back(*block);
    block->other_streams.erase(block->stream);
    if (block->other_streams.empty()) {
      make_free(block);
      return;
    }
    Leaving leaving{block, {}};
    for (StreamId stream : block->other_streams) {
      leaving.ends.push_back(mark(stream));
    }
    leaving_.push_back(std::move(leaving));
  }

  void record(const void* address, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(const_cast<void*>(address)));
    if (found != taken_.end()) {
      found->second->other_streams.insert(stream);
    }
  }

  void set_overwriting(Overwriting when) {
    std::lock_guard<std::mutex> lock(mutex_);
    overwriting_ = when;
  }

  void set_limit(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_bytes_ = nbytes;
  }

  at::DeleterFnPtr raw_deleter() const override {
    return &release_memory;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    void* reachable_to = DeviceMemory::instance().reachable(to);
    const void* reachable_from = DeviceMemory::instance().reachable(from);
    enqueue(current_stream(), Work::kKernel, [=] { std::memmove(reachable_to, reachable_from, nbytes); });
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    drain_all();
    std::lock_guard<std::mutex> lock(mutex_);
    free_what_streams_left();
    give_empty_segments_back();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record(memory.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counted()) {
      stat->reset_accumulated();
    }
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_device_alloc = stats_.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : counted()) {
      stat->reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t total_bytes = DeviceMemory::instance().total_bytes();
    return {total_bytes - stats_.reserved_bytes[0].current, total_bytes};
  }

 private:
  // A block whose tensor is gone, and the points that streams have to pass before it is free.
  struct Leaving {
    Block* block;
    std::vector<SignalPtr> ends;
  };
  using FreeBlocks = std::set<std::pair<size_t, Block*>>;

  // Returns a block of exactly `nbytes`, or none.  Lets go of the lock while it waits for streams.
  Block* take(size_t nbytes, std::unique_lock<std::mutex>& lock) {
    free_what_streams_left();
    const bool is_within_limit =
        limit_bytes_ == 0 || stats_.allocated_bytes[0].current + static_cast<int64_t>(nbytes) <= static_cast<int64_t>(limit_bytes_);
    if (!is_within_limit) {
      return nullptr;
    }
    Block* block = find(nbytes);
    if (block == nullptr) {
      block = find_after_waiting(nbytes, lock);
    }
    if (block != nullptr) {
      split(block, nbytes);
      block->is_taken = true;
    }
    return block;
  }

  Block* find(size_t nbytes) {
    auto& blocks = free_[current_stream()];
    auto best = blocks.lower_bound({nbytes, nullptr});
    if (best == blocks.end()) {
      return new_segment(round_up(nbytes, kSegmentBytes));
    }
    Block* block = best->second;
    blocks.erase(best);
    return block;
  }

  Block* find_after_waiting(size_t nbytes, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    drain_all();
    lock.lock();
    free_what_streams_left();
    if (Block* block = find(nbytes)) {
      return block;
    }
    give_empty_segments_back();
    ++stats_.num_alloc_retries;
    return find(nbytes);
  }

  Block* new_segment(size_t nbytes) {
    if (!is_set_up_) {
      is_set_up_ = true;
      unused_[DeviceMemory::instance().begin()] = DeviceMemory::instance().total_bytes();
    }
    for (auto [address, unused_bytes] : unused_) {
      if (unused_bytes >= nbytes) {
        unused_.erase(address);
        if (unused_bytes > nbytes) {
          unused_[address + nbytes] = unused_bytes - nbytes;
        }
        stats_.reserved_bytes[0].increase(nbytes);
        stats_.segment[0].increase(1);
        ++stats_.num_device_alloc;
        return new Block{address, nbytes, current_stream()};
      }
    }
    return nullptr;
  }

  // Cuts `block` to `nbytes`; the rest is free.
  void split(Block* block, size_t nbytes) {
    if (block->nbytes - nbytes < kGranuleBytes) {
      return;
    }
    auto* rest = new Block{block->address + nbytes, block->nbytes - nbytes, block->stream};
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != nullptr) {
      rest->next->previous = rest;
    }
    block->next = rest;
    block->nbytes = nbytes;
    free_[rest->stream].insert({rest->nbytes, rest});
  }

  void make_free(Block* block) {
    stats_.active_bytes[0].decrease(block->nbytes);
    stats_.active[0].decrease(1);
    if (overwriting_ == Overwriting::kFreed) {
      overwrite(*block);
    }
    block->is_taken = false;
    block->other_streams.clear();
    auto& blocks = free_[block->stream];
    if (block->next != nullptr && !block->next->is_taken) {
      blocks.erase({block->next->nbytes, block->next});
      append_next(block);
    }
    if (block->previous != nullptr && !block->previous->is_taken) {
      block = block->previous;
      blocks.erase({block->nbytes, block});
      append_next(block);
    }
    blocks.insert({block->nbytes, block});
  }

  static void append_next(Block* block) {
    Block* next = block->next;
    block->nbytes += next->nbytes;
    block->next = next->next;
    if (block->next != nullptr) {
      block->next->previous = block;
    }
    delete next;
  }

  void free_what_streams_left() {
    std::vector<Leaving> staying;
    for (auto& leaving : leaving_) {
      bool is_over = true;
      for (auto& end : leaving.ends) {
        is_over = is_over && end->is_set();
      }
      if (is_over) {
        make_free(leaving.block);
      } else {
        staying.push_back(std::move(leaving));
      }
    }
    leaving_.swap(staying);
  }

  void give_empty_segments_back() {
    for (auto& [stream, blocks] : free_) {
      for (auto each = blocks.begin(); each != blocks.end();) {
        Block* block = each->second;
        if (block->previous != nullptr || block->next != nullptr) {
          ++each;
          continue;
        }
        each = blocks.erase(each);
        DeviceMemory::instance().give_back(block->address, block->nbytes);
        make_unused(block->address, block->nbytes);
        stats_.reserved_bytes[0].decrease(block->nbytes);
        stats_.segment[0].decrease(1);
        ++stats_.num_device_free;
        delete block;
      }
    }
  }

  void make_unused(char* address, size_t nbytes) {
    auto range = unused_.emplace(address, nbytes).first;
    auto next = std::next(range);
    if (next != unused_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      unused_.erase(next);
    }
    if (range != unused_.begin()) {
      auto previous = std::prev(range);
      if (previous->first + previous->second == range->first) {
        previous->second += range->second;
        unused_.erase(range);
      }
    }
  }

  static void overwrite(const Block& block) {
    void* memory = DeviceMemory::instance().reachable(block.address);
    const size_t nbytes = block.nbytes;
    enqueue(block.stream, Work::kMark, [=] { std::memset(memory, kOverwritten, nbytes); });
  }

  void count_taken(const Block& block) {
    stats_.allocation[0].increase(1);
    stats_.active[0].increase(1);
    stats_.allocated_bytes[0].increase(block.nbytes);
    stats_.active_bytes[0].increase(block.nbytes);
    stats_.requested_bytes[0].increase(block.requested_bytes);
  }

  void count_given_back(const Block& block) {
    stats_.allocation[0].decrease(1);
    stats_.allocated_bytes[0].decrease(block.nbytes);
    stats_.requested_bytes[0].decrease(block.requested_bytes);
  }

  std::vector<c10::CachingAllocator::Stat*> counted() {
    return {
        &stats_.allocation[0], &stats_.segment[0], &stats_.active[0], &stats_.allocated_bytes[0],
        &stats_.reserved_bytes[0], &stats_.active_bytes[0], &stats_.requested_bytes[0]};
  }

  [[noreturn]] void refuse(size_t nbytes) {
    ++stats_.num_ooms;
    const size_t total_bytes = limit_bytes_ == 0 ? DeviceMemory::instance().total_bytes() : limit_bytes_;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "openreg out of memory. Tried to allocate ", nbytes, " bytes; ",
        stats_.allocated_bytes[0].current, " of ", total_bytes, " are allocated.");
  }

  std::mutex mutex_;  // guards all below
  bool is_set_up_ = false;
  Overwriting overwriting_ = Overwriting::kHandedOut;
  size_t limit_bytes_ = 0;
  std::unordered_map<char*, Block*> taken_;
  std::map<StreamId, FreeBlocks> free_;
  std::vector<Leaving> leaving_;
  std::map<char*, size_t> unused_;  // ranges of the device's memory that no segment has
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Allocator& allocator() {
  static auto& allocator = *new Allocator();
  return allocator;
}

void release_memory(void* address) {
  if (address != nullptr) {
    allocator().release(address);
  }
}

const bool is_registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator(), 100);
  return true;
}();

}  // namespace

c10::DeviceAllocator& device_allocator() {
  return allocator();
}

void set_overwriting(Overwriting when) {
  allocator().set_overwriting(when);
}

void set_memory_limit(size_t nbytes) {
  allocator().set_limit(nbytes);
}

}  // namespace openreg
