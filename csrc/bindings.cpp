// The Python module of memtune's native code. Each folder of csrc adds its functions by bind_<folder>().

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "edit/bind.h"
#include "io/bind.h"
#include "layout/bind.h"
#include "optim/bind.h"
#include "order/bind.h"
#include "quant/bind.h"
#include "remat/bind.h"
#include "simulator/bind.h"
#include "tsplit/bind.h"
#include "vmm/bind.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "memtune's native code: free of torch's ABI, over plain arrays of bytes and seconds.";
  m.def("version", [] { return std::string(MEMTUNE_VERSION); },
        "Version of memtune that this module was built from; if it is not the package's, rebuild.");
  bind_edit(m);
  bind_io(m);
  bind_layout(m);
  bind_optim(m);
  bind_order(m);
  bind_quant(m);
  bind_remat(m);
  bind_simulator(m);
  bind_tsplit(m);
  bind_vmm(m);
  bind_allocator(m);
}
