// The device's pace: how long kernels and copies take while they are slept through, not computed.
//
// 1. A kernel takes its operations over one rate, or the bytes of its arguments and results over another, whichever
//    is longer.  Operations are counted for products of matrices and attention.
// 2. A copy between the device and the host takes its bytes over the link's rate.
// 3. One kernel runs at a time, and one copy each way, on whatever streams they are.
// 4. Work begins when the work before it ended, if it was queued by then: that a thread wakes late does not add up.
// 5. What the host waits for is computed as well, and nothing else is: no value means anything.
#pragma once

#include <cstdint>

namespace openreg {

enum class Engine { kNone = -1, kKernels = 0, kCopiesIn = 1, kCopiesOut = 2 };

// How much there is to do.
struct Load {
  Engine engine = Engine::kNone;
  double nbytes = 0;
  double operations = 0;
  bool is_needed = false;  // it is computed although it is slept through
};

// Operations, bytes of the device's memory, and bytes over the link each way, all a second; 0: it is computed.
void set_pace(double operations, double memory_bytes, double link_bytes);
bool is_paced();

// Sleeps through `load`, which may begin at `earliest_ms`; returns when it ended.
double sleep_through(const Load& load, double earliest_ms);

// How long an engine has been busy since the pace was set.
double busy_ms(Engine engine);

double now_ms();

}  // namespace openreg
