// The device's streams: queues of work, each run by a thread of its own, and the signals that mark points in them.
//
// 1. The work of one stream runs in the order in which it was queued; streams run beside each other.
// 2. Who queues work goes on at once, unless very much is waiting already.
// 3. Before a kernel or a copy runs, its stream may be late by chance: see `set_delays`.
// 4. An error of queued work is raised by whoever synchronises next, as on a GPU.
// 5. No thread waits here with Python's lock held.
// 6. While the device is paced a stream has come to a point when what is before it has ended, by the device's pace:
//    that its thread wakes late is no part of what events tell.
// 7. Streams do not survive a fork: the child's calls raise.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "pace.h"

namespace openreg {

using StreamId = int64_t;
constexpr StreamId kDefaultStream = 0;

// A point in a stream's work, or any other thing that happens once.  Thread-safe.
class Signal {
 public:
  void set();
  bool is_set();
  void wait();     // whoever may hold Python's lock calls wait_for instead
  double at_ms();  // when the stream that has set it had come so far, on a clock of no particular beginning
 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  double at_ms_ = 0;
};
using SignalPtr = std::shared_ptr<Signal>;

// Blocks until `signal` is set, without Python's lock.
void wait_for(Signal& signal);

// Sets its signal when it goes, whatever happened meanwhile: nobody waits for ever.
class SetAtEnd {
 public:
  explicit SetAtEnd(SignalPtr signal) : signal_(std::move(signal)) {}
  ~SetAtEnd() { signal_->set(); }
  SetAtEnd(const SetAtEnd&) = delete;
  SetAtEnd& operator=(const SetAtEnd&) = delete;

 private:
  SignalPtr signal_;
};

enum class Work {
  kKernel,  // may be late
  kCopy,    // may be late by another measure
  kMark,    // events, fillings: never late
};

// While the device is paced, work with a load is slept through instead of run.
void enqueue(StreamId stream, Work kind, std::function<void()> run, Load load = {});

// Queues a point; the signal is set when the stream has come so far.
SignalPtr mark(StreamId stream);

// Makes `stream` do nothing that is queued later before `signal` is set.
void hold(StreamId stream, SignalPtr signal);

bool is_idle(StreamId stream);
void synchronize(StreamId stream);
void synchronize_all();

// The same for all streams, but an error stays for the next who asks: for the allocator.
void drain_all();

// The stream that this thread's work goes to.
StreamId current_stream();
StreamId exchange_stream(StreamId stream);

// Hands out streams of a pool in turn, as torch.cuda does: after 32 they come again.
StreamId next_stream();

// A kernel or copy is late by up to so many microseconds every other time, by chance from `seed`.
void set_delays(int kernel_us, int copy_us, uint64_t seed);

}  // namespace openreg
