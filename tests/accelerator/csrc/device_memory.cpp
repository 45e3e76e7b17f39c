#include "device_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <cstdlib>

namespace openreg {
namespace {

constexpr size_t kDefaultBytes = size_t{3} << 30;

size_t asked_bytes() {
  const char* asked = std::getenv("TIERSTORE_ACCELERATOR_BYTES");
  return asked == nullptr ? kDefaultBytes : std::strtoull(asked, nullptr, 10);
}

char* map(int file, size_t nbytes, int access) {
  void* address = mmap(nullptr, nbytes, access, MAP_SHARED, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "openreg: the system maps no ", nbytes, " bytes");
  return static_cast<char*>(address);
}

}  // namespace

DeviceMemory::DeviceMemory() : total_bytes_(asked_bytes()), file_(memfd_create("openreg", 0)) {
  TORCH_CHECK(
      file_ >= 0 && ftruncate(file_, static_cast<off_t>(total_bytes_)) == 0,
      "openreg: the system has no file of ", total_bytes_, " bytes in memory");
  begin_ = map(file_, total_bytes_, PROT_NONE);
  reachable_ = map(file_, total_bytes_, PROT_READ | PROT_WRITE);
}

DeviceMemory& DeviceMemory::instance() {
  static auto& memory = *new DeviceMemory();
  return memory;
}

bool DeviceMemory::contains(const void* address) const {
  const auto* byte = static_cast<const char*>(address);
  return byte >= begin_ && byte < begin_ + total_bytes_;
}

void* DeviceMemory::reachable(const void* address) const {
  return address == nullptr ? nullptr : reachable_ + (static_cast<const char*>(address) - begin_);
}

void DeviceMemory::give_back(char* address, size_t nbytes) const {
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - begin_, static_cast<off_t>(nbytes));
}

}  // namespace openreg
