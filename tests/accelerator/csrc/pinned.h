// Page-locked host memory: allocated so, or registered.  Only such memory is copied asynchronously.
//
// 1. Allocated memory that is freed while streams still copy it stays until they have passed; then it is
//    overwritten with 0xEE and freed.
// 2. Nobody guards registered memory: whoever unregisters it has waited for its copies before.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "streams.h"

namespace openreg {

enum class Registration {
  kDone = 0,
  kNotMapped = 1,        // the range, or a part of it, is no memory of this process
  kAlreadyRegistered = 2,
  kNotRegistered = 3,
};

Registration register_host(char* address, size_t nbytes);
Registration unregister_host(char* address);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Notes that `stream` copies from or to pinned memory at `address`, up to where it is now.
void note_copy(const void* address, StreamId stream);

}  // namespace openreg
