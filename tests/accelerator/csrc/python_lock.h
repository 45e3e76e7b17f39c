// Python's global lock, let go of while this thread waits for the device.
//
// Declared here rather than included, so that building needs no headers of Python: these functions are part of
// its stable interface.
#pragma once

extern "C" {
int Py_IsInitialized(void);
int PyGILState_Check(void);
int PyGILState_Ensure(void);
void PyGILState_Release(int);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
void PyErr_Clear(void);
}

namespace openreg {

// While one lives, this thread does not hold Python's lock; where it held none, nothing happens.
class WithoutPythonLock {
 public:
  WithoutPythonLock() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      thread_ = PyEval_SaveThread();
    }
  }
  ~WithoutPythonLock() {
    if (thread_ != nullptr) {
      PyEval_RestoreThread(thread_);
    }
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* thread_ = nullptr;
};

// Forgets the error that a Python function left behind when it was called from here in vain.
inline void forget_python_error() {
  const int held = PyGILState_Ensure();
  PyErr_Clear();
  PyGILState_Release(held);
}

}  // namespace openreg
