#include "io/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "io/checksum.h"
#include "io/engine.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace io = memtune::io;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t start(io::Engine& engine, bool write, int fd, std::uint64_t offset, Bytes memory, Sums sums, std::int64_t priority) {
  if (offset % io::kAlign != 0) throw std::invalid_argument("offset must be a multiple of 4096");
  if (sums.size() != engine.blocks(memory.size())) throw std::invalid_argument("there must be one checksum per block");
  return engine.start({write, fd, memory.data(), memory.size(), offset, sums.data(), priority});
}

}  // namespace

void bind_io(nb::module_& m) {
  m.attr("IO_ALIGN") = io::kAlign;
  m.attr("IO_WRONG_CHECKSUM") = static_cast<int>(io::kWrongChecksum);
  m.attr("IO_END_OF_FILE") = static_cast<int>(io::kEndOfFile);
  m.attr("IO_CANCELLED") = static_cast<int>(io::kCancelled);
  m.def("checksum", [](Bytes data) {
          if (data.size() < io::kShortest) throw std::invalid_argument("the checksum is for more than 240 bytes");
          return io::checksum(data.data(), data.size());
        },
        "data"_a, nb::sig("def checksum(data: object) -> int"), "XXH3, 64 bits, of more than 240 bytes.");
  nb::class_<io::Engine>(m, "IoEngine", "Reads and writes of tensors in files, block by block; csrc/io/engine.h has the rules.")
      .def("__init__",
           [](io::Engine* self, const std::string& which, std::uint32_t depth, std::uint32_t block_bytes, bool checksums) {
             if (depth < 1 || depth > 1024 || block_bytes < 1 || block_bytes > (1u << 30)) {
               throw std::invalid_argument("depth must be 1 to 1024, block_bytes 1 to 2**30");
             }
             new (self) io::Engine(which, depth, block_bytes, checksums);
           },
           nb::kw_only(), "which"_a = "auto", "depth"_a = 16, "block_bytes"_a = 1 << 20, "checksums"_a = true)
      .def("start", &start, "write"_a, "fd"_a, "offset"_a, "memory"_a, "sums"_a, "priority"_a = 0,
           nb::sig("def start(self, write: bool, fd: int, offset: int, memory: object, sums: object, priority: int = 0) -> int"),
           "Begin to move `memory` (bytes); keep it, `sums` and the file until `wait` with the ticket has returned.")
      .def("wait", [](io::Engine& engine, std::uint64_t ticket) {
             const io::Result result = engine.wait(ticket);
             return std::make_pair(result.error, result.block);
           },
           "ticket"_a, nb::call_guard<nb::gil_scoped_release>(), nb::sig("def wait(self, ticket: int) -> tuple[int, int]"),
           "Until it is over: (0, an errno or an IO_ constant, first block that failed). Each ticket once.")
      .def("close", &io::Engine::close, nb::call_guard<nb::gil_scoped_release>(),
           "End what is under way; what has not begun is cancelled, as is all that is started later.")
      .def("blocks", &io::Engine::blocks, "bytes"_a, "Blocks, and so checksums, of that many bytes.")
      .def_prop_ro("read_bytes", [](io::Engine& engine) { return engine.counters().read_bytes; }, "Moved by the kernel so far.")
      .def_prop_ro("written_bytes", [](io::Engine& engine) { return engine.counters().written_bytes; }, "Moved by the kernel so far.")
      .def_prop_ro("backend", &io::Engine::name, "`io_uring` or `threads`.")
      .def_prop_ro("refused", &io::Engine::refused, "Why io_uring is not used; empty where it is, or was not tried.");
}
