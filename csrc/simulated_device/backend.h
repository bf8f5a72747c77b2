// Interface of the backend to kernels.cpp.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "simulated_device/devices.h"

namespace memtune::sim {

// Dispatch of ops that are no ops of the user: modes, autograd and autocast do not see them.
struct Quiet {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                                              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

int current_device();
std::int64_t current_stream(int device);
inline int current_timeline(int device) { return Devices::timeline(device, current_stream(device)); }

c10::Allocator* device_allocator();
// The CPU generator that draws the numbers of `generator`, or of the device's default one.
at::Generator cpu_generator(const std::optional<at::Generator>& generator, int device);

}  // namespace memtune::sim
