#include "simulator/allocator.h"

#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "simulator/free_list.h"

using namespace memtune;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

struct Program {
  std::vector<std::uint8_t> action;
  std::vector<std::int32_t> storage, stream;
  std::vector<std::int64_t> bytes, op, ready_op, step{0};

  Program& alloc(std::int32_t name, std::int64_t n_bytes) { return add(kAlloc, name, n_bytes); }
  Program& free(std::int32_t name) { return add(kFree, name, 0); }
  Program& empty_cache() { return add(kEmptyCache, 0, 0); }

  AllocatorReplay run(const AllocatorConfig& config = {}) const {
    return replay({action, storage, bytes, stream, op, ready_op, step}, config, true);
  }

 private:
  Program& add(Action what, std::int32_t name, std::int64_t n_bytes) {
    op.push_back(static_cast<std::int64_t>(op.size()));
    action.push_back(what);
    storage.push_back(name);
    stream.push_back(0);
    bytes.push_back(n_bytes);
    ready_op.push_back(-1);
    return *this;
  }
};

void segments_are_kept_until_the_cache_is_emptied() {
  const AllocatorReplay out = Program().alloc(0, 3 * kMiB).alloc(1, 30 * kMiB).free(0).free(1).empty_cache().run();
  CHECK((out.reserved_bytes == std::vector<std::int64_t>{20 * kMiB, 50 * kMiB, 50 * kMiB, 50 * kMiB, 0}));
  CHECK(out.device_allocs == 2 && out.device_frees == 2 && out.retries == 0 && out.ooms == 0);
  CHECK(out.peak_event == 1 && out.allocated_at_peak_bytes == 33 * kMiB);
}

void a_full_device_makes_room_or_says_what_was_missing() {
  Program program;
  program.alloc(0, 30 * kMiB).free(0).alloc(1, 40 * kMiB).alloc(2, 40 * kMiB).free(2);
  const AllocatorReplay out = program.run({.capacity_bytes = 64 * kMiB});
  CHECK(out.retries == 2 && out.ooms == 1 && out.first_oom.event == 3);
  CHECK(out.first_oom.requested_bytes == 40 * kMiB && out.first_oom.reserved_bytes == 40 * kMiB);
}

void free_lists_remain_sorted() {
  std::mt19937 random(0);
  FreeList list;
  std::vector<std::pair<std::int64_t, std::int64_t>> keys;
  for (int i = 0; i < 5000; ++i) {
    if (keys.empty() || random() % 3 != 0) {
      keys.emplace_back(random() % 50, i);
      list.insert({keys.back().first, keys.back().second, i});
    } else {
      const std::size_t row = random() % keys.size();
      list.erase(keys[row].first, keys[row].second);
      keys.erase(keys.begin() + static_cast<std::ptrdiff_t>(row));
    }
  }
  std::sort(keys.begin(), keys.end());
  std::size_t row = 0;
  list.for_each([&](const FreeList::Entry& entry) { CHECK(entry.key() == keys[row++]); });
  CHECK(row == keys.size());
  FreeList::Place place = list.lower_bound(25, 0);
  const auto expected = std::lower_bound(keys.begin(), keys.end(), std::pair<std::int64_t, std::int64_t>(25, 0));
  CHECK(list.at(place).key() == *expected);
  CHECK(list.step_back(place) && list.at(place).key() == *(expected - 1));
  CHECK(list.at(list.after(place)).key() == *expected);
}

void broken_streams_are_refused() {
  bool refused = false;
  try {
    Program().free(0).run();
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  segments_are_kept_until_the_cache_is_emptied();
  a_full_device_makes_room_or_says_what_was_missing();
  free_lists_remain_sorted();
  broken_streams_are_refused();
}
