// What the device has done so far, for tests that ask whether something was asynchronous at all.
#pragma once

#include <cstdint>
#include <string>

namespace openreg {

enum class Counter {
  kAsynchronousCopies,  // between the device and pinned memory
  kStagedCopies,        // from other host memory
  kBlockingCopies,      // to other host memory
  kQueuedKernels,       // the host went on at once
  kAwaitedKernels,      // the host waited: results whose shape depends on values, or no tensors
};

void count(Counter counter);

// Counts an operator, by how it ran.
void count_kernel(Counter counter, const std::string& operator_name);

// All counts as a JSON object; operators under their names.
std::string counts_as_json();

}  // namespace openreg
