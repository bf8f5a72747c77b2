#include "optim/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "huge_pages.h"
#include "optim/update.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace optim = memtune::optim;

namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

bool is_float32(const Array& array) { return array.dtype() == nb::dtype<float>(); }

// numpy has no bfloat16; it is represented by 16-bit integers.
bool is_bfloat16(const Array& array) {
  const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
  return array.dtype().bits == 16 && (code == nb::dlpack::dtype_code::Bfloat || code == nb::dlpack::dtype_code::UInt);
}

bool is_byte(const Array& array) { return array.dtype() == nb::dtype<std::uint8_t>(); }

void must(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <typename T>
T found_in(const std::string& name, std::initializer_list<std::pair<const char*, T>> known, const char* what) {
  for (const auto& [key, value] : known) {
    if (name == key) return value;
  }
  throw std::invalid_argument(what);
}

// A moment's memory, checked against the format and the number of elements; null where there is none.
void* moment(const std::optional<Array>& array, const std::optional<Array>& scale, optim::Moments format, std::size_t n) {
  if (!array) return nullptr;
  must(array->size() == n, "a moment must have as many elements as the weight");
  const bool right = format == optim::Moments::float32 ? is_float32(*array)
                     : format == optim::Moments::bfloat16 ? is_bfloat16(*array) : is_byte(*array);
  must(right, "a moment's type must be that of `moments`");
  if (format == optim::Moments::blocks8) {
    must(scale && is_float32(*scale) && scale->size() == (n + optim::kBlock - 1) / optim::kBlock,
         "8-bit moments need one float32 scale per block");
  }
  return array->data();
}

float* data(const std::optional<Array>& scale) { return scale ? static_cast<float*>(scale->data()) : nullptr; }

optim::Rule rule_of(const std::string& name) {
  using optim::Rule;
  return found_in<Rule>(name, {{"adamw", Rule::adamw}, {"sgd", Rule::sgd}, {"adagrad", Rule::adagrad}, {"lion", Rule::lion}},
                        "rule must be adamw, sgd, adagrad or lion");
}

optim::Moments format_of(const std::string& name) {
  using optim::Moments;
  return found_in<Moments>(name, {{"float32", Moments::float32}, {"bfloat16", Moments::bfloat16}, {"int8", Moments::blocks8}},
                           "moments must be float32, bfloat16 or int8");
}

// Number of elements, addresses of weight, gradient, out, first, second, first_scale and second_scale (0: none), whether the gradient is
// bfloat16, and the index of the numbers.
using Row = std::array<std::uint64_t, 10>;

void update_all(const std::string& rule, const std::string& moments, const std::vector<Row>& rows, const std::vector<optim::Numbers>& numbers,
                int threads) {
  const auto which = rule_of(rule);
  const auto format = format_of(moments);
  std::vector<optim::Job> jobs;
  jobs.reserve(rows.size());
  for (const Row& row : rows) {
    const auto at = [&](int i) { return reinterpret_cast<void*>(row[i]); };
    must(row[9] < numbers.size(), "a row has the index of no numbers");
    must(row[0] == 0 || (row[1] && row[2]), "a row needs a weight and a gradient");
    jobs.push_back({{static_cast<float*>(at(1)), at(2), static_cast<std::uint16_t*>(at(3)), at(4), at(5), static_cast<float*>(at(6)),
                     static_cast<float*>(at(7)), row[8] != 0},
                    &numbers[row[9]],
                    static_cast<std::int64_t>(row[0])});
  }
  nb::gil_scoped_release released;
  optim::update_all(optim::best(), which, format, jobs, threads);
}

void update(const std::string& rule, const std::string& moments, Array weight, Array gradient, std::optional<Array> out,
            std::optional<Array> first, std::optional<Array> second, std::optional<Array> first_scale,
            std::optional<Array> second_scale, const optim::Numbers& numbers, int threads, const std::string& isa) {
  using optim::Rule;
  const auto which = rule_of(rule);
  const auto format = format_of(moments);
  const std::size_t n = weight.size();
  must(is_float32(weight), "weight must be float32");
  must(gradient.size() == n && (is_float32(gradient) || is_bfloat16(gradient)),
       "gradient must have as many elements as the weight, float32 or bfloat16");
  must(!out || (out->size() == n && is_bfloat16(*out)), "out must have as many elements as the weight, bfloat16");
  const bool needs_first = which == Rule::adamw || which == Rule::lion || (which == Rule::sgd && first.has_value());
  const bool needs_second = which == Rule::adamw || which == Rule::adagrad;
  must(first.has_value() == needs_first && second.has_value() == needs_second, "the rule has another number of moments");
  const optim::Tensors tensors{static_cast<float*>(weight.data()), gradient.data(),
                               out ? static_cast<std::uint16_t*>(out->data()) : nullptr, moment(first, first_scale, format, n),
                               moment(second, second_scale, format, n), data(first_scale), data(second_scale), is_bfloat16(gradient)};
  const optim::Update form = isa.empty() ? optim::best() : optim::named(isa.c_str());
  must(form != nullptr, "this machine or this build lacks that instruction set");
  nb::gil_scoped_release released;
  optim::update(form, which, format, tensors, numbers, static_cast<std::int64_t>(n), threads);
}

}  // namespace

void bind_optim(nb::module_& m) {
  using optim::Numbers;
  nb::class_<Numbers>(m, "OptimizerNumbers", "Scalars of one optimizer step; csrc/optim/update.h lists those that each rule reads.")
      .def("__init__",
           [](Numbers* self, double decay, double first, double second, double rest, double lookahead, double correction, double eps,
              double rate, double sign, bool from_gradient, std::uint64_t seed) {
             const auto f = [](double x) { return static_cast<float>(x); };
             new (self) Numbers{f(decay), f(first), f(second), f(rest), f(lookahead), f(correction), f(eps), f(rate), f(sign),
                                from_gradient, seed};
           },
           nb::kw_only(), "decay"_a = 0.0, "first"_a = 0.0, "second"_a = 0.0, "rest"_a = 0.0, "ahead"_a = 0.0,
           "correction"_a = 1.0, "eps"_a = 0.0, "rate"_a = 0.0, "sign"_a = 1.0, "from_gradient"_a = false, "seed"_a = 0);
  m.def("wish_huge_pages", [](std::uintptr_t memory, std::size_t bytes) { return memtune::wish_huge_pages(reinterpret_cast<void*>(memory), bytes); },
        "memory"_a, "bytes"_a,
        "Advises huge pages within `bytes` at the address `memory`; returns False if there are none.");
  m.attr("MOMENT_BLOCK") = optim::kBlock;
  m.def("optimizer_isa", [] { return std::string(optim::best_name()); }, "The instruction set that `optimizer_update` uses here.");
  m.def("optimizer_update", &update, "rule"_a, "moments"_a, "weight"_a, "gradient"_a, "out"_a.none(), "first"_a.none(),
        "second"_a.none(), "first_scale"_a.none(), "second_scale"_a.none(), "numbers"_a, "threads"_a = 1, "isa"_a = "",
        nb::sig("def optimizer_update(rule: str, moments: str, weight: object, gradient: object, out: object | None, "
                "first: object | None, second: object | None, first_scale: object | None, second_scale: object | None, "
                "numbers: OptimizerNumbers, threads: int = 1, isa: str = '') -> None"),
        "One optimizer step over one tensor in host memory, in one pass on `threads` threads: weight (float32) and moments in place, "
        "the new weight in bfloat16 to `out`, which may be the gradient's memory. ValueError names an invalid argument.");
  m.def("optimizer_update_all", &update_all, "rule"_a, "moments"_a, "rows"_a, "numbers"_a, "threads"_a = 1,
        "`optimizer_update` of several tensors of distinct memory, by address: a row has the number of elements, the addresses of weight, "
        "gradient, out, first, second, first_scale and second_scale (0: none), 1 for a bfloat16 gradient, and the index in `numbers`. The "
        "caller holds the tensors, which are dense and of the types of `optimizer_update`.");
}
