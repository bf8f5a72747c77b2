#include "vmm/allocator.h"

#include <algorithm>
#include <utility>

namespace memtune::vmm {

Allocator::Allocator(std::unique_ptr<Driver> driver, const AllocatorOptions& options)
    : options_(options), memory_(std::move(driver), options.limit_bytes), stitcher_(memory_, options.stitch),
      planned_(memory_, options.plan), lifetimes_(options.plan.watch, options.transient_within) {}

Address Allocator::allocate(std::int64_t bytes, std::int32_t stream) {
  Block block{std::max(in_blocks(bytes), kBlockBytes), stream, Owner::kArena, Pool::kLasting};
  ++requests_;
  const Address address = serve(block);
  if (address == 0) return ++failures_, 0;
  blocks_[address] = block;
  allocated_ += block.bytes;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  saw_allocation(address, block);
  return address;
}

Address Allocator::serve(Block& block) {
  Address address = 0;
  if (state_ == State::kBeingMade) {
    block.pool = Pool::kState;
    address = arena(block).allocate(block.bytes);
  } else if (options_.pools) {
    block.pool = lifetimes_.pool_of(block.bytes, block.stream);
    address = arena(block).allocate(block.bytes);
  } else if (options_.planned && (address = planned_.allocate(block.bytes, block.stream)) != 0) {
    block.owner = Owner::kPlanned;
  } else if (block.bytes < options_.arena_below_bytes) {
    address = arena(block).allocate(block.bytes);
  } else {
    block.owner = Owner::kStitcher;
    address = stitcher_.allocate(block.bytes, block.stream);
  }
  return address != 0 ? address : serve_last(block);
}

// Memory has run out: what one side holds unused goes to the other.
Address Allocator::serve_last(const Block& block) {
  memory_.synchronize();
  planned_.suspend();
  for (auto& [each, arena] : arenas_) arena.trim();
  if (block.owner == Owner::kStitcher) return stitcher_.allocate_last(block.bytes, block.stream);
  stitcher_.release_unused();
  return arena(block).allocate(block.bytes);
}

bool Allocator::free(Address address) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return false;
  const Block block = found->second;
  blocks_.erase(found);
  if (!block.is_freed) allocated_ -= block.bytes;
  saw_free(address);
  if (block.owner == Owner::kPlanned) return planned_.free(address);
  return block.owner == Owner::kArena ? arena(block).free(address) : stitcher_.free(address);
}

bool Allocator::free_later(Address address) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return false;
  found->second.is_freed = true;
  allocated_ -= found->second.bytes;
  return true;
}

void Allocator::saw_allocation(Address address, const Block& block) {
  if (options_.pools) lifetimes_.saw_allocation(address, block.bytes, block.stream);
  if (options_.planned) planned_.saw_allocation(address, block.bytes, block.stream);
}

void Allocator::saw_free(Address address) {
  if (options_.pools) lifetimes_.saw_free(address);
  if (options_.planned) planned_.saw_free(address);
}

std::int64_t Allocator::bytes_at(Address address) const {
  const auto found = blocks_.find(address);
  return found == blocks_.end() ? -1 : found->second.bytes;
}

std::int32_t Allocator::stream_at(Address address) const {
  const auto found = blocks_.find(address);
  return found == blocks_.end() ? -1 : found->second.stream;
}

std::vector<Region> Allocator::regions() const {
  std::vector<Region> made;
  for (const auto& [each, arena] : arenas_) arena.add_regions(each.first, made);
  stitcher_.add_regions(made);
  planned_.add_regions(made);
  return made;
}

// The first update makes the optimizer's state, which lasts: between the blocks that forward and backward have left, it would hold
// their memory. That memory is given back first, so the step needs no more than it does anyway.
void Allocator::begin_update() {
  if (state_ != State::kNone) return;
  release_unused();
  state_ = State::kBeingMade;
}

void Allocator::end_step() {
  const bool learned = options_.pools && lifetimes_.end_step();
  const bool planned = options_.planned && planned_.end_step(), resumed = options_.planned && !planned && planned_.may_resume();
  const bool changes = learned || planned || resumed;
  // Before what was watched is put into effect, what the watched steps left unused is given back: the arenas take its place. Gradients
  // are freed after the step only, so what they held goes at the end of the next one.
  if (changes || changed_ || state_ == State::kBeingMade) release_unused();
  if (state_ == State::kBeingMade) state_ = State::kMade;
  if (learned) lifetimes_.learn();
  if (planned) planned_.adopt();
  if (resumed) planned_.resume();
  changed_ = changes;
}

void Allocator::release_unused() {
  stitcher_.release_unused();
  for (auto& [each, arena] : arenas_) arena.trim();
}

void Allocator::restart_peaks() {
  peak_allocated_ = allocated_;
  memory_.restart_peak();
}

Statistics Allocator::statistics() const {
  Statistics made;
  made.allocated_bytes = allocated_;
  made.peak_allocated_bytes = peak_allocated_;
  made.reserved_bytes = memory_.bytes();
  made.peak_reserved_bytes = memory_.peak_bytes();
  made.driver_calls = memory_.calls();
  made.requests = requests_;
  made.failures = failures_;
  made.stitched_bytes = stitcher_.stitched_bytes();
  std::copy(std::begin(stitcher_.states()), std::end(stitcher_.states()), std::begin(made.states));
  made.plan_bytes = planned_.height_bytes();
  made.plan_bound_bytes = planned_.bound_bytes();
  made.plan_requests = planned_.planned_requests();
  made.plan_served = planned_.served();
  made.deviations = steps().deviations();
  made.plans = options_.pools ? steps().learned() : planned_.plans();
  made.first_deviation = steps().first_deviation();
  return made;
}

Arena& Allocator::arena(const Block& block) {
  return arenas_.try_emplace({block.stream, block.pool}, memory_, options_.arena_range_bytes).first->second;
}

}  // namespace memtune::vmm
