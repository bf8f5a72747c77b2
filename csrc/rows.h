// A table with stable row numbers; the row that was freed last is reused first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memtune {

template <typename Row>
class Rows {
 public:
  std::int32_t add(Row row) {
    if (unused_.empty()) {
      rows_.push_back(std::move(row));
      return static_cast<std::int32_t>(rows_.size()) - 1;
    }
    const std::int32_t number = unused_.back();
    unused_.pop_back();
    rows_[number] = std::move(row);
    return number;
  }

  // The row's contents are readable until it is reused.
  void give_up(std::int32_t number) { unused_.push_back(number); }

  Row& operator[](std::int32_t number) { return rows_[number]; }
  const Row& operator[](std::int32_t number) const { return rows_[number]; }
  std::int32_t size() const { return static_cast<std::int32_t>(rows_.size()); }  // of all rows, unused ones too

 private:
  std::vector<Row> rows_;
  std::vector<std::int32_t> unused_;
};

}  // namespace memtune
