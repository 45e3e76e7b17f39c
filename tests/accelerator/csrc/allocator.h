// The caching allocator of device memory, with the rules that make a GPU's hard to use rightly.
//
// 1. A block belongs to the stream it was allocated on.  It is free when its tensor goes, and the same stream's
//    next allocation may have it at once: only that stream's order protects its bytes.
// 2. A block that was recorded on other streams is free only when they have come past its tensor's end.
// 3. A block is overwritten, in the order of its stream, when it is handed out (or already when it is freed):
//    what reads it without having waited reads 0xFF, NaN in every floating dtype.
// 4. Blocks are split and merged within segments.  Where no free block is large enough, a segment is taken of the
//    device's memory; where there is none, all streams are waited for and empty segments given back; then it is
//    out of memory.
// 5. `set_memory_limit` lowers what tensors may have together: the allocation that would exceed it raises.
//
// Statistics are those of torch.accelerator, peaks included.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace openreg {

enum class Overwriting {
  kNever = 0,
  kHandedOut = 1,  // when the block is handed out again
  kFreed = 2,      // as soon as it is free
};

c10::DeviceAllocator& device_allocator();
void set_overwriting(Overwriting when);

// At most so many bytes may be allocated at a time; 0: what the device has.
void set_memory_limit(size_t nbytes);

}  // namespace openreg
