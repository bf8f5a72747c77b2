// One-dimensional numpy arrays that pass between Python and C++, without a copy.
#pragma once

#include <nanobind/ndarray.h>

#include <span>
#include <utility>
#include <vector>

namespace memtune {

template <typename T>
using Column = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using Made = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

// A view, valid as long as the column.
template <typename T>
std::span<const T> span(const Column<T>& column) {
  return {column.data(), column.size()};
}

// Moves `values` into a numpy array that owns them.
template <typename T>
Made<T> array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Made<T>(owned->data(), {owned->size()}, owner);
}

}  // namespace memtune
