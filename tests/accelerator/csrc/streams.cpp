#include "streams.h"

#include <pthread.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <deque>
#include <random>
#include <string>
#include <thread>

#include "python_lock.h"

namespace openreg {
namespace {

constexpr StreamId kPooledStreams = 32;
constexpr size_t kLongestQueue = 1000;  // about as much as CUDA takes before a launch blocks

std::atomic<int> kernel_delay_us{0};
std::atomic<int> copy_delay_us{0};
std::atomic<bool> is_forked{false};

// The first error of queued work that nobody was told of yet.
class AsynchronousError {
 public:
  void keep(const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (message_.empty()) {
      message_ = message;
    }
  }
  void raise() {
    std::string message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      message.swap(message_);
    }
    TORCH_CHECK(message.empty(), "openreg: asynchronous error: ", message);
  }

 private:
  std::mutex mutex_;
  std::string message_;
};

// When the stream whose thread this is has come to what it runs; 0: it is no stream's, or nothing is paced.
thread_local double reached_ms = 0;

// What lives to the process's end is never destroyed: streams' threads may still use it then.
AsynchronousError& asynchronous_error() {
  static auto& error = *new AsynchronousError();
  return error;
}

struct Task {
  Work kind;
  std::function<void()> run;
  Load load;
  SignalPtr awaited;  // it does nothing but wait for this
  double queued_ms = 0;
};

class Queue {
 public:
  explicit Queue(StreamId id) : id_(id) {
    seed(0);
    std::thread([this] { run(); }).detach();
  }

  void push(Task task) {
    task.queued_ms = now_ms();
    std::unique_lock<std::mutex> lock(mutex_);
    if (task.kind != Work::kMark && tasks_.size() >= kLongestQueue) {
      lock.unlock();
      WithoutPythonLock unlocked;
      lock.lock();
      has_room_.wait(lock, [this] { return tasks_.size() < kLongestQueue; });
    }
    tasks_.push_back(std::move(task));
    has_work_.notify_one();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !is_running_;
  }

  void seed(uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    chance_.seed(static_cast<std::mt19937::result_type>(seed * 1009 + id_));
  }

 private:
  void run() {
    at::set_num_threads(1);
    c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
    c10::InferenceMode without_versions(true);
    for (;;) {
      int delay_us = 0;
      Task task = next(delay_us);
      if (delay_us > 0) {
        usleep(delay_us);
      }
      try {
        if (comes_to_run(task)) {
          task.run();
        }
      } catch (const std::exception& error) {
        asynchronous_error().keep(error.what());
      }
    }
  }

  // Takes the time that the task takes where the device is paced; says whether it is to be run.
  bool comes_to_run(const Task& task) {
    reached_ms = 0;
    if (!is_paced()) {
      return true;
    }
    reached_ms = std::max(ready_ms_, task.queued_ms);
    if (task.awaited != nullptr) {
      task.awaited->wait();
      ready_ms_ = std::max(ready_ms_, task.awaited->at_ms());
      return false;
    }
    if (task.load.engine == Engine::kNone) {
      return true;
    }
    ready_ms_ = sleep_through(task.load, reached_ms);
    return task.load.is_needed;
  }

  Task next(int& delay_us) {
    std::unique_lock<std::mutex> lock(mutex_);
    is_running_ = false;
    has_work_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    is_running_ = true;
    has_room_.notify_all();
    delay_us = chosen_delay_us(task.kind);
    return task;
  }

  int chosen_delay_us(Work kind) {
    const int most_us = kind == Work::kKernel ? kernel_delay_us.load()
        : kind == Work::kCopy                 ? copy_delay_us.load()
                                              : 0;
    if (most_us <= 0) {
      return 0;
    }
    const int chosen_us = static_cast<int>(chance_() % (2 * static_cast<unsigned>(most_us)));
    return chosen_us > most_us ? 0 : chosen_us;
  }

  const StreamId id_;
  double ready_ms_ = 0;  // when what was run so far ended, where it was paced; the thread's own
  std::mutex mutex_;  // guards all below
  std::condition_variable has_work_;
  std::condition_variable has_room_;
  std::deque<Task> tasks_;
  bool is_running_ = false;
  std::mt19937 chance_;
};

class Queues {
 public:
  Queue& of(StreamId stream) {
    TORCH_CHECK(!is_forked, "openreg: a forked process cannot use the device that its parent used");
    TORCH_CHECK(stream >= 0 && stream <= kPooledStreams, "openreg: there is no stream ", stream);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = queues_[stream];
    if (queue == nullptr) {
      queue = new Queue(stream);
      queue->seed(seed_);
    }
    return *queue;
  }

  void seed(uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    seed_ = seed;
    for (Queue* queue : queues_) {
      if (queue != nullptr) {
        queue->seed(seed);
      }
    }
  }

  std::deque<SignalPtr> mark_all() {
    std::deque<SignalPtr> signals;
    for (StreamId stream = 0; stream <= kPooledStreams; ++stream) {
      if (has(stream)) {
        signals.push_back(mark(stream));
      }
    }
    return signals;
  }

 private:
  bool has(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queues_[stream] != nullptr;
  }

  std::mutex mutex_;  // guards all below
  std::array<Queue*, kPooledStreams + 1> queues_{};
  uint64_t seed_ = 0;
};

Queues& queues() {
  static auto& queues = *[] {
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
    return new Queues();
  }();
  return queues;
}

thread_local StreamId this_threads_stream = kDefaultStream;
std::atomic<StreamId> streams_handed_out{0};

}  // namespace

void Signal::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_set_ = true;
  at_ms_ = reached_ms > 0 ? reached_ms : now_ms();
  changed_.notify_all();
}

bool Signal::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_set_;
}

void Signal::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

double Signal::at_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_ms_;
}

void wait_for(Signal& signal) {
  if (!signal.is_set()) {
    WithoutPythonLock unlocked;
    signal.wait();
  }
}

void enqueue(StreamId stream, Work kind, std::function<void()> run, Load load) {
  queues().of(stream).push({kind, std::move(run), load, nullptr});
}

SignalPtr mark(StreamId stream) {
  auto signal = std::make_shared<Signal>();
  enqueue(stream, Work::kMark, [signal] { signal->set(); });
  return signal;
}

void hold(StreamId stream, SignalPtr signal) {
  queues().of(stream).push({Work::kMark, [signal] { signal->wait(); }, {}, signal});
}

bool is_idle(StreamId stream) {
  return queues().of(stream).is_idle();
}

void synchronize(StreamId stream) {
  wait_for(*mark(stream));
  asynchronous_error().raise();
}

void synchronize_all() {
  drain_all();
  asynchronous_error().raise();
}

void drain_all() {
  for (const auto& signal : queues().mark_all()) {
    wait_for(*signal);
  }
}

StreamId current_stream() {
  return this_threads_stream;
}

StreamId exchange_stream(StreamId stream) {
  return std::exchange(this_threads_stream, stream);
}

StreamId next_stream() {
  return 1 + streams_handed_out++ % kPooledStreams;
}

void set_delays(int kernel_us, int copy_us, uint64_t seed) {
  kernel_delay_us = kernel_us;
  copy_delay_us = copy_us;
  queues().seed(seed);
}

}  // namespace openreg
