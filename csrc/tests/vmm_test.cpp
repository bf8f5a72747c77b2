// Allocators over mapped memory: a million random operations on a simulated driver, and real memory that is stitched, written and read.
#include "vmm/allocator.h"

#include <cstring>
#include <limits>
#include <random>
#include <unordered_map>
#include <unordered_set>

#include "check.h"

using namespace memtune::vmm;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

// The simulated driver, and a table of the chunk mapped at each address.
class Watched final : public Driver {
 public:
  explicit Watched(std::int64_t capacity) : books_(page_table(capacity)) {}
  std::optional<Chunk> create() override {
    const auto made = books_->create();
    chunks += made.has_value();
    return made;
  }
  void release(Chunk chunk) override {
    books_->release(chunk);
    --chunks;
  }
  Address reserve(std::int64_t bytes) override { return books_->reserve(bytes); }
  void give_back(Address address, std::int64_t bytes) override { books_->give_back(address, bytes); }
  bool map(Address address, std::span<const Chunk> mapped) override {
    for (std::size_t i = 0; i < mapped.size(); ++i) at[address / kChunkBytes + i] = mapped[i];
    return books_->map(address, mapped);
  }
  void unmap(Address address, std::int64_t bytes) override {
    for (std::int64_t i = 0; i < bytes / kChunkBytes; ++i) at.erase(address / kChunkBytes + i);
    books_->unmap(address, bytes);
  }
  void synchronize() override {}

  std::unordered_map<Address, Chunk> at;  // by page
  std::int64_t chunks = 0;

 private:
  std::unique_ptr<Driver> books_;
};

struct Block {
  Address address;
  std::int64_t bytes;
  std::uint64_t tag;
};

// The bytes of each chunk that are in use: none may be in two blocks, whatever their addresses.
class Ownership {
 public:
  void take(const Watched& driver, Block block) { walk(driver, block, true); }
  void give(const Watched& driver, Block block) { walk(driver, block, false); }

 private:
  void walk(const Watched& driver, Block block, bool take) {
    CHECK(block.address % kBlockBytes == 0);
    const Address last = block.address + static_cast<Address>(block.bytes);
    for (Address from = block.address, to = from; from < last; from = to) {
      to = std::min<Address>(last, (from / kChunkBytes + 1) * kChunkBytes);
      const auto page = driver.at.find(from / kChunkBytes);
      CHECK(page != driver.at.end());  // a block in use has memory everywhere
      const std::uint64_t begin = page->second * kChunkBytes + from % kChunkBytes;
      if (take) {
        const auto next = ends_.upper_bound(begin);
        CHECK(next == ends_.end() || next->first >= begin + (to - from));
        CHECK(next == ends_.begin() || std::prev(next)->second <= begin);
        ends_.emplace(begin, begin + (to - from));
      } else {
        CHECK(ends_.erase(begin) == 1);
      }
    }
  }
  std::map<std::uint64_t, std::uint64_t> ends_;  // of what is in use, by where it begins
};

std::int64_t random_size(std::mt19937_64& random) {
  const int kind = static_cast<int>(random() % 8);
  if (kind < 6) return 1 + static_cast<std::int64_t>(random() % 4096);
  if (kind == 6) return 1 + static_cast<std::int64_t>(random() % (256 << 10));
  return static_cast<std::int64_t>(random() % 24) * 512 * 1024 + 2 * kMiB;
}

void no_unit_of_memory_is_in_two_blocks(std::uint64_t seed, int operations, const AllocatorOptions& options, std::int64_t capacity) {
  std::mt19937_64 random(seed);
  auto owned = std::make_unique<Watched>(capacity);
  const Watched& driver = *owned;
  Allocator allocator(std::move(owned), options);
  Ownership ownership;
  std::vector<Block> blocks;
  std::int64_t in_use = 0, refused = 0;
  for (int i = 0; i < operations; ++i) {
    const std::uint64_t what = random() % 1000;
    if (what < 500 || blocks.empty()) {
      const std::int64_t bytes = random_size(random);
      const Address address = allocator.allocate(bytes, static_cast<std::int32_t>(random() % 2));
      if (address == 0) {
        ++refused;
        continue;
      }
      blocks.push_back({address, (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes, 0});
      CHECK(allocator.bytes_at(address) == blocks.back().bytes);
      in_use += blocks.back().bytes;
      ownership.take(driver, blocks.back());
    } else if (what < 997) {
      const std::size_t which = random() % blocks.size();
      ownership.give(driver, blocks[which]);
      in_use -= blocks[which].bytes;
      CHECK(allocator.free(blocks[which].address));
      CHECK(!allocator.free(blocks[which].address));
      blocks[which] = blocks.back();
      blocks.pop_back();
    } else if (what == 997) {
      allocator.begin_update();
    } else if (what == 998) {
      allocator.end_step();
    } else {
      allocator.release_unused();
    }
    CHECK(allocator.allocated_bytes() == in_use);
    CHECK(allocator.reserved_bytes() == driver.chunks * kChunkBytes);  // bytes are conserved
    CHECK(allocator.reserved_bytes() >= in_use && allocator.reserved_bytes() <= capacity);
  }
  for (const Block& block : blocks) CHECK(allocator.free(block.address));
  allocator.release_unused();
  CHECK(allocator.allocated_bytes() == 0);
  if (!options.planned) CHECK(driver.chunks == 0);
  if (capacity < 256 * kMiB) CHECK(refused > 0);
}

// A step with requests of many sizes whose order is always the same; `change` puts another size in at some places.
void one_step(Allocator& allocator, std::uint64_t seed, double change, std::mt19937_64& noise, std::vector<Block>& kept) {
  std::mt19937_64 random(seed);
  std::vector<Block> blocks;
  for (int i = 0; i < 400; ++i) {
    if (random() % 2 == 0 || blocks.empty()) {
      std::int64_t bytes = random_size(random);
      if (static_cast<double>(noise() % 1000) < 1000 * change) bytes += 512 * (1 + static_cast<std::int64_t>(noise() % 3));
      const Address address = allocator.allocate(bytes, static_cast<std::int32_t>(i % 5 == 0));
      CHECK(address != 0);
      blocks.push_back({address, bytes, 0});
    } else {
      const std::size_t which = random() % blocks.size();
      CHECK(allocator.free(blocks[which].address));
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  for (const Block& block : kept) CHECK(allocator.free(block.address));  // what the last step left goes in this one
  kept.assign(blocks.begin(), blocks.begin() + 3);
  for (std::size_t i = 3; i < blocks.size(); ++i) CHECK(allocator.free(blocks[i].address));
  allocator.end_step();
}

void a_steady_state_asks_the_driver_for_nothing(const AllocatorOptions& options) {
  Allocator allocator(page_table(std::int64_t{8} << 30), options);
  std::mt19937_64 noise(1);
  std::vector<Block> kept;
  for (int step = 0; step < 10; ++step) one_step(allocator, 5, 0.0, noise, kept);
  const Statistics before = allocator.statistics();
  for (int step = 0; step < 10; ++step) one_step(allocator, 5, 0.0, noise, kept);
  const Statistics after = allocator.statistics();
  CHECK(after.driver_calls == before.driver_calls);
  CHECK(after.plans == (options.planned || options.pools ? 1 : 0));
  CHECK(after.deviations == 0);
  if (options.planned) {
    CHECK(after.plan_served - before.plan_served == 10 * after.plan_requests);
    CHECK(after.plan_bytes <= after.plan_bound_bytes * 21 / 20);
  }
}

void deviations_are_served_and_planned_again() {
  AllocatorOptions options;
  options.planned = true;
  options.plan.watch.replan_after = 20;
  Allocator allocator(page_table(std::int64_t{8} << 30), options);
  std::mt19937_64 noise(2);
  std::vector<Block> kept;
  for (int step = 0; step < 6; ++step) one_step(allocator, 5, 0.0, noise, kept);
  CHECK(allocator.statistics().plans == 1 && allocator.statistics().deviations == 0);
  for (int step = 0; step < 6; ++step) one_step(allocator, 5, 0.02, noise, kept);
  const std::int64_t few = allocator.statistics().deviations;
  CHECK(few > 0 && !allocator.statistics().first_deviation.empty());
  for (int step = 0; step < 8; ++step) one_step(allocator, 6, 0.0, noise, kept);  // another model, so to say
  const Statistics found = allocator.statistics();
  CHECK(found.plans >= 2 && found.deviations > few);
  for (int step = 0; step < 4; ++step) one_step(allocator, 6, 0.0, noise, kept);
  CHECK(allocator.statistics().deviations == found.deviations);
}

// Steps of another model in between: what they need does not come on top of the plan's memory, and the plan serves again afterwards.
void a_plan_that_is_not_followed_gives_its_memory_back() {
  AllocatorOptions options;
  options.planned = true;
  options.plan.watch.replan_after = 1'000'000;
  AllocatorOptions without = options;
  without.planned = false;
  Allocator allocator(page_table(std::int64_t{8} << 30), options), stitched(page_table(std::int64_t{8} << 30), without);
  std::mt19937_64 noise(2), other_noise(2);
  std::vector<Block> kept, other_kept;
  for (int step = 0; step < 6; ++step) one_step(allocator, 5, 0.0, noise, kept);
  const std::int64_t served = allocator.statistics().plan_served, planned = allocator.statistics().plan_bytes;
  CHECK(served > 0 && planned > 16 * kMiB);
  for (int step = 0; step < 4; ++step) {
    if (step == 1) allocator.restart_peaks();
    one_step(allocator, 6, 0.0, noise, kept);
    one_step(stitched, 6, 0.0, other_noise, other_kept);
  }
  CHECK(allocator.statistics().peak_reserved_bytes <= stitched.statistics().peak_reserved_bytes + planned / 8);
  for (int step = 0; step < 4; ++step) one_step(allocator, 5, 0.0, noise, kept);
  const Statistics resumed = allocator.statistics();
  CHECK(resumed.plans == 1 && resumed.plan_served > served);
  one_step(allocator, 5, 0.0, noise, kept);
  CHECK(allocator.statistics().plan_served == resumed.plan_served + resumed.plan_requests);
  CHECK(allocator.statistics().driver_calls == resumed.driver_calls);
}

// Brief and kept blocks in turn; the brief ones go, and one request is as large as all their holes.
std::int64_t lost_to_holes(bool pools) {
  AllocatorOptions options;
  options.pools = pools;
  options.transient_within = 100;
  options.arena_below_bytes = 1024 * kMiB;  // without pools: one arena
  Allocator allocator(page_table(std::int64_t{8} << 30), options);
  for (int step = 0; step < 6; ++step) {
    if (step == 4) allocator.restart_peaks();
    std::vector<Address> kept, brief;
    for (int i = 0; i < 48; ++i) {
      brief.push_back(allocator.allocate(2 * kMiB, 0));
      kept.push_back(allocator.allocate(2 * kMiB, 0));
    }
    for (const Address each : brief) CHECK(allocator.free(each));
    for (int i = 0; i < 50; ++i) CHECK(allocator.free(allocator.allocate(96 * kMiB, 0)));
    for (const Address each : kept) CHECK(allocator.free(each));
    allocator.end_step();
  }
  const Statistics found = allocator.statistics();
  return 100 * (found.peak_reserved_bytes - found.peak_allocated_bytes) / found.peak_reserved_bytes;
}

void what_lives_long_leaves_no_holes_among_what_does_not() {
  CHECK(lost_to_holes(false) >= 25);
  CHECK(lost_to_holes(true) <= 5);
}

// The first update makes blocks that stay, while gradients lie between free activations; they are freed after the step. Returns the
// percentage of memory that nothing uses in later steps.
std::int64_t lost_around_state(bool notified) {
  AllocatorOptions options;
  options.planned = true;
  Allocator allocator(page_table(std::int64_t{8} << 30), options);
  for (int step = 0; step < 8; ++step) {
    if (step == 6) allocator.restart_peaks();
    std::vector<Address> kept, gradients;
    for (int i = 0; i < 48; ++i) kept.push_back(allocator.allocate(3 * kMiB, 0));
    for (const Address each : kept) {
      gradients.push_back(allocator.allocate(kMiB, 0));
      CHECK(allocator.free(each));
    }
    if (notified) allocator.begin_update();
    for (int i = 0; step == 0 && i < 48; ++i) {
      const Address temporary = allocator.allocate(kMiB, 0);
      CHECK(allocator.allocate(kMiB + 512, 0) != 0 && allocator.allocate(2 * kMiB + 512, 0) != 0);
      CHECK(allocator.free(temporary));
    }
    allocator.end_step();
    for (const Address each : gradients) CHECK(allocator.free(each));
  }
  const Statistics found = allocator.statistics();
  return 100 * (found.peak_reserved_bytes - found.peak_allocated_bytes) / found.peak_reserved_bytes;
}

void state_of_the_first_update_holds_no_memory_of_the_steps() {
  CHECK(lost_around_state(false) >= 20);
  CHECK(lost_around_state(true) <= 1);
}

void stitching_makes_one_block_of_many() {
  Allocator allocator(page_table(64 * kMiB), {});
  std::vector<Address> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(allocator.allocate(4 * kMiB, 0));
  CHECK(allocator.allocate(2 * kMiB, 0) == 0);  // all of it is in use
  for (int i = 0; i < 16; i += 2) CHECK(allocator.free(blocks[static_cast<std::size_t>(i)]));
  const Address one = allocator.allocate(30 * kMiB, 0);
  CHECK(one != 0 && allocator.reserved_bytes() == 64 * kMiB && allocator.statistics().states[2] == 1);
  CHECK(allocator.allocate(2 * kMiB, 0) != 0);
  CHECK(allocator.free(one));
  CHECK(allocator.allocate(30 * kMiB, 0) == one);  // S1: the stitched block is there still
  CHECK(allocator.free(one));
  CHECK(allocator.allocate(28 * kMiB, 1) != 0);  // another stream, where nothing else is left
}

// Real memory: a block keeps what was written to it, whatever is stitched, split and freed around it.
void what_is_written_is_read(std::uint64_t seed, int operations, AllocatorOptions options) {
  std::string why;
  std::unique_ptr<Driver> driver = memory_file(why);
  if (!driver) {
    std::printf("skipped: %s\n", why.c_str());
    return;
  }
  options.limit_bytes = 160 * kMiB;
  Allocator allocator(std::move(driver), options);
  std::mt19937_64 random(seed);
  std::vector<Block> blocks;
  const auto words = [](const Block& block) {
    std::vector<std::uint64_t*> found;  // the first and last word of every page, and of the block
    const auto last = block.address + static_cast<Address>(block.bytes) - 8;
    for (Address at = block.address; at < last; at += 4096) found.push_back(reinterpret_cast<std::uint64_t*>(at));
    found.push_back(reinterpret_cast<std::uint64_t*>(last));
    return found;
  };
  for (int i = 0; i < operations; ++i) {
    if (random() % 2 == 0 || blocks.empty()) {
      const std::int64_t bytes = (random_size(random) + 511) / 512 * 512;
      const Address address = allocator.allocate(bytes, 0);
      if (address == 0) continue;
      blocks.push_back({address, bytes, random()});
      for (std::uint64_t* word : words(blocks.back())) *word = blocks.back().tag ^ reinterpret_cast<Address>(word);
    } else {
      const std::size_t which = random() % blocks.size();
      for (const std::uint64_t* word : words(blocks[which])) CHECK(*word == (blocks[which].tag ^ reinterpret_cast<Address>(word)));
      CHECK(allocator.free(blocks[which].address));
      blocks[which] = blocks.back();
      blocks.pop_back();
    }
    if (i % 200 == 0) allocator.end_step();
  }
  CHECK(allocator.statistics().states[2] > 0 || options.planned || options.pools);
}

}  // namespace

int main() {
  AllocatorOptions planned, lazy, pools;
  pools.pools = true;
  planned.planned = true;
  planned.plan.watch.replan_after = 10;
  planned.plan.layout_s = 0.05;  // a plan of random requests uses up all the time it gets
  lazy.stitch = {true, 8 * kMiB, 4, 64 * kMiB};
  const std::int64_t much = std::int64_t{4} << 30;
  no_unit_of_memory_is_in_two_blocks(1, 300'000, {}, much);
  no_unit_of_memory_is_in_two_blocks(2, 200'000, {}, 96 * kMiB);
  no_unit_of_memory_is_in_two_blocks(3, 200'000, lazy, 128 * kMiB);
  no_unit_of_memory_is_in_two_blocks(4, 200'000, planned, much);
  no_unit_of_memory_is_in_two_blocks(5, 100'000, planned, 96 * kMiB);
  no_unit_of_memory_is_in_two_blocks(8, 200'000, pools, much);
  no_unit_of_memory_is_in_two_blocks(9, 100'000, pools, 96 * kMiB);
  for (const AllocatorOptions& each : {AllocatorOptions{}, planned, pools}) a_steady_state_asks_the_driver_for_nothing(each);
  what_lives_long_leaves_no_holes_among_what_does_not();
  state_of_the_first_update_holds_no_memory_of_the_steps();
  deviations_are_served_and_planned_again();
  a_plan_that_is_not_followed_gives_its_memory_back();
  stitching_makes_one_block_of_many();
  what_is_written_is_read(6, 6'000, {});
  what_is_written_is_read(7, 6'000, planned);
  what_is_written_is_read(10, 6'000, pools);
  return 0;
}
