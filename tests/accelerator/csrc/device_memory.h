// The device's memory: addresses that the host cannot touch, and a second mapping of them that streams work in.
//
// A host that reads or writes device memory dies of it, as it would without unified memory.
#pragma once

#include <cstddef>

namespace openreg {

class DeviceMemory {
 public:
  // All of it, mapped at the first call; TIERSTORE_ACCELERATOR_BYTES says how much (3 GiB).
  static DeviceMemory& instance();

  bool contains(const void* address) const;

  // The address at which a stream's thread reaches what the device has at `address`.
  void* reachable(const void* address) const;

  // Gives the pages of a range back to the system: they read as zeros until they are written.
  void give_back(char* address, size_t nbytes) const;

  char* begin() const { return begin_; }
  size_t total_bytes() const { return total_bytes_; }

 private:
  DeviceMemory();

  size_t total_bytes_;
  int file_;
  char* begin_;
  char* reachable_;
};

}  // namespace openreg
