#include "quant/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "quant/quantise.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace quant = memtune::quant;

namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Lengths = std::vector<std::int64_t>;

void must(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// numpy has no bfloat16; it is represented by 16-bit integers.
quant::Format format_of(const Array& array) {
  const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
  const bool narrow = array.dtype().bits == 16 && (code == nb::dlpack::dtype_code::Bfloat || code == nb::dlpack::dtype_code::UInt);
  must(narrow || array.dtype() == nb::dtype<float>(), "values must be float32 or bfloat16");
  return narrow ? quant::Format::bfloat16 : quant::Format::float32;
}

// As `format_of`, and float16.
quant::Format any_format_of(const Array& array) {
  const bool half = array.dtype().bits == 16 && static_cast<nb::dlpack::dtype_code>(array.dtype().code) == nb::dlpack::dtype_code::Float;
  return half ? quant::Format::float16 : format_of(array);
}

const quant::Form& form_of(const std::string& isa) {
  const quant::Form* form = isa.empty() ? quant::best() : quant::named(isa.c_str());
  must(form != nullptr, "this machine or this build lacks that instruction set");
  return *form;
}

void pack(Array packed, Array values, std::optional<Array> error, const Lengths& lengths, int bits, std::int64_t block,
          std::int64_t nodes, int threads, const std::string& isa) {
  const quant::Row row = quant::row_of(lengths, bits, block);
  const std::int64_t n = static_cast<std::int64_t>(values.size());
  const std::int64_t rows = row.numel > 0 ? n / row.numel : 0;
  must(rows * row.numel == n, "values must be whole rows of the lengths");
  must(nodes > 0 && rows % nodes == 0, "nodes must divide the rows");
  must(packed.dtype() == nb::dtype<std::uint8_t>() && static_cast<std::int64_t>(packed.size()) == rows * row.n_bytes,
       "packed must be bytes, as many as the rows need");
  must(!error || (error->dtype() == nb::dtype<float>() && error->size() == values.size()), "error must be float32 and like values");
  const quant::Packing what{values.data(), format_of(values), error ? static_cast<float*>(error->data()) : nullptr, rows, nodes,
                            static_cast<std::uint8_t*>(packed.data())};
  const quant::Form& form = form_of(isa);
  nb::gil_scoped_release released;
  quant::pack(form, row, what, threads);
}

void unpack(Array values, Array packed, const Lengths& lengths, int bits, std::int64_t block, std::int64_t sources, double factor,
            int threads, const std::string& isa) {
  const quant::Row row = quant::row_of(lengths, bits, block);
  const std::int64_t n = static_cast<std::int64_t>(values.size());
  const std::int64_t rows = row.numel > 0 ? n / row.numel : 0;
  must(rows * row.numel == n, "values must be whole rows of the lengths");
  must(sources > 0 && packed.dtype() == nb::dtype<std::uint8_t>() &&
           static_cast<std::int64_t>(packed.size()) == sources * rows * row.n_bytes,
       "packed must be bytes, as many as the rows of all sources need");
  const quant::Unpacking what{static_cast<const std::uint8_t*>(packed.data()), sources, rows, static_cast<float>(factor),
                              values.data(), format_of(values)};
  const quant::Form& form = form_of(isa);
  nb::gil_scoped_release released;
  quant::unpack(form, row, what, threads);
}

void compress(Array packed, Array values, int bits, std::int64_t group, std::optional<std::uint32_t> seed, int threads,
              const std::string& isa) {
  const quant::Groups groups = quant::groups_of(static_cast<std::int64_t>(values.size()), bits, group);
  must(packed.dtype() == nb::dtype<std::uint8_t>() && static_cast<std::int64_t>(packed.size()) == groups.n_bytes,
       "packed must be bytes, as many as the groups need");
  const quant::Compressing what{values.data(), any_format_of(values), seed.value_or(0), seed.has_value(),
                                static_cast<std::uint8_t*>(packed.data())};
  const quant::Form& form = form_of(isa);
  nb::gil_scoped_release released;
  quant::compress(form, groups, what, threads);
}

void decompress(Array values, Array packed, int bits, std::int64_t group, int threads, const std::string& isa) {
  const quant::Groups groups = quant::groups_of(static_cast<std::int64_t>(values.size()), bits, group);
  must(packed.dtype() == nb::dtype<std::uint8_t>() && static_cast<std::int64_t>(packed.size()) == groups.n_bytes,
       "packed must be bytes, as many as the groups need");
  const quant::Decompressing what{static_cast<const std::uint8_t*>(packed.data()), values.data(), any_format_of(values)};
  const quant::Form& form = form_of(isa);
  nb::gil_scoped_release released;
  quant::decompress(form, groups, what, threads);
}

}  // namespace

void bind_quant(nb::module_& m) {
  m.def("quantise", &pack, "packed"_a, "values"_a, "error"_a.none(), "lengths"_a, "bits"_a, "block"_a, "nodes"_a = 1,
        "threads"_a = 1, "isa"_a = "",
        nb::sig("def quantise(packed: object, values: object, error: object | None, lengths: Sequence[int], bits: int, block: int, "
                "nodes: int = 1, threads: int = 1, isa: str = '') -> None"),
        "Packs rows of values into rows of bytes: stretches of `lengths` are alternately quantised in blocks and kept as float32. "
        "csrc/quant/quantise.h has the format. ValueError names an invalid argument.");
  m.def("dequantise", &unpack, "values"_a, "packed"_a, "lengths"_a, "bits"_a, "block"_a, "sources"_a = 1, "factor"_a = 1.0,
        "threads"_a = 1, "isa"_a = "",
        nb::sig("def dequantise(values: object, packed: object, lengths: Sequence[int], bits: int, block: int, sources: int = 1, "
                "factor: float = 1.0, threads: int = 1, isa: str = '') -> None"),
        "Unpacks rows of bytes into values: `factor` times the sum over `sources`, each with all rows. ValueError names an invalid argument.");
  m.def("compress", &compress, "packed"_a, "values"_a, "bits"_a, "group"_a, "seed"_a.none(), "threads"_a = 1, "isa"_a = "",
        nb::sig("def compress(packed: object, values: object, bits: int, group: int, seed: int | None, threads: int = 1, "
                "isa: str = '') -> None"),
        "Compresses values, float32 or 16-bit floats, into bytes: groups of integers between their least and largest value, rounded at "
        "random from `seed`, or to the nearest without one. csrc/quant/groups.inl has the rules. ValueError names an invalid argument.");
  m.def("decompress", &decompress, "values"_a, "packed"_a, "bits"_a, "group"_a, "threads"_a = 1, "isa"_a = "",
        nb::sig("def decompress(values: object, packed: object, bits: int, group: int, threads: int = 1, isa: str = '') -> None"),
        "Decompresses what `compress` packed into values of the same number. ValueError names an invalid argument.");
}
