// What PyTorch asks of a device beside memory and kernels: random numbers, hooks, and the guard of streams and events.
#pragma once

#include <ATen/core/Generator.h>

#include <mutex>

namespace openreg {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice{kDeviceType, 0};

// The device's own random numbers.
const at::Generator& default_generator();

// Held by whoever reads or changes a generator of the device.
std::mutex& generator_mutex();

// Gives `storage` memory of `nbytes`, with what it had at its beginning.
void resize_storage(const c10::Storage& storage, size_t nbytes);

}  // namespace openreg
