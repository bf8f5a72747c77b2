#include "edit/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "columns.h"
#include "edit/order.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::array, memtune::Column, memtune::Made, memtune::span;

namespace {

using I32 = Made<std::int32_t>;

std::tuple<I32, I32, I32, I32> order_rows(const Column<bool>& removed, const Column<std::int32_t>& anchor, const Column<bool>& after) {
  const auto bytes = [](const Column<bool>& column) {
    return std::span<const std::uint8_t>(reinterpret_cast<const std::uint8_t*>(column.data()), column.size());
  };
  memtune::Order order = memtune::order_rows(bytes(removed), span(anchor), bytes(after));
  return {array(std::move(order.rows)), array(std::move(order.position)), array(std::move(order.before)), array(std::move(order.next))};
}

using Any = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyMade = nb::ndarray<nb::numpy, nb::ndim<1>>;

template <typename T>
AnyMade taken(const Column<std::int32_t>& rows, const Any& old, const Any& added) {
  std::unique_ptr<T[]> values(new T[rows.size()]);
  const auto cells = [](const Any& column) { return std::span<const T>(static_cast<const T*>(column.data()), column.size()); };
  memtune::take_rows<T>(span(rows), cells(old), cells(added), values.get());
  T* data = values.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  const std::size_t shape[1] = {rows.size()};
  return AnyMade(data, 1, shape, owner, nullptr, old.dtype());
}

AnyMade take_rows(const Column<std::int32_t>& rows, const Any& old, const Any& added) {
  if (!(old.dtype() == added.dtype())) throw std::invalid_argument("both parts of a column must have the same dtype");
  switch (old.itemsize()) {
    case 1: return taken<std::uint8_t>(rows, old, added);
    case 4: return taken<std::uint32_t>(rows, old, added);
    case 8: return taken<std::uint64_t>(rows, old, added);
    default: throw std::invalid_argument("a column has 1, 4 or 8 bytes a row");
  }
}

std::tuple<I32, I32, Made<std::uint8_t>> sort_uses(const Column<std::int32_t>& op, const Column<std::int32_t>& storage, const Column<std::uint8_t>& mutates,
                    std::int32_t n_ops) {
  memtune::Uses uses = memtune::sort_uses(span(op), span(storage), span(mutates), n_ops);
  return {array(std::move(uses.op)), array(std::move(uses.storage)), array(std::move(uses.mutates))};
}

}  // namespace

void bind_edit(nb::module_& m) {
  m.def("order_rows", &order_rows, "removed"_a, "anchor"_a, "after"_a,
        "New order of rows and insertions: (remaining rows, position by row with -1 for removed ones and one more -1, position or "
        "that of the last remaining row before, position or that of the next row). ValueError for an anchor outside [-1, rows].");
  m.def("take_rows", &take_rows, "rows"_a, "old"_a, "added"_a,
        nb::sig("def take_rows(rows: NDArray[numpy.int32], old: NDArray[numpy.generic], added: NDArray[numpy.generic]) -> NDArray[numpy.generic]"),
        "The given rows of the column `old` followed by `added`, of the same dtype. ValueError for a row in neither.");
  m.def("sort_uses", &sort_uses, "op"_a, "storage"_a, "mutates"_a, "n_ops"_a,
        "(op, storage, mutates) sorted by op, uses of one op in their order. ValueError for an op outside the step.");
}
