#include "vmm/allocator.h"

#include <algorithm>
#include <utility>

namespace memtune::vmm {

Allocator::Allocator(std::unique_ptr<Driver> driver, const AllocatorOptions& options)
    : options_(options), memory_(std::move(driver), options.limit_bytes), stitcher_(memory_, options.stitch), planned_(memory_, options.plan) {}

Address Allocator::allocate(std::int64_t bytes, std::int32_t stream) {
  bytes = std::max<std::int64_t>((bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes, kBlockBytes);
  ++requests_;
  Owner owner = Owner::kPlanned;
  const Address address = serve(bytes, stream, owner);
  if (address == 0) return ++failures_, 0;
  blocks_[address] = {bytes, stream, owner};
  allocated_ += bytes;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  if (options_.planned) planned_.saw_allocation(address, bytes, stream);
  return address;
}

Address Allocator::serve(std::int64_t bytes, std::int32_t stream, Owner& owner) {
  if (options_.planned) {
    if (const Address address = planned_.allocate(bytes, stream)) return address;
  }
  owner = bytes < options_.arena_below_bytes ? Owner::kArena : Owner::kStitcher;
  const Address address = owner == Owner::kArena ? arena(stream).allocate(bytes) : stitcher_.allocate(bytes, stream);
  return address != 0 ? address : serve_last(bytes, stream, owner);
}

// Memory has run out: what either side holds unused goes to the other.
Address Allocator::serve_last(std::int64_t bytes, std::int32_t stream, Owner owner) {
  memory_.synchronize();
  for (auto& [each, arena] : arenas_) arena.trim();
  if (owner == Owner::kStitcher) return stitcher_.allocate_last(bytes, stream);
  stitcher_.release_unused();
  return arena(stream).allocate(bytes);
}

bool Allocator::free(Address address) {
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) return false;
  const Block block = found->second;
  blocks_.erase(found);
  allocated_ -= block.bytes;
  if (options_.planned) planned_.saw_free(address);
  if (block.owner == Owner::kPlanned) return planned_.free(address);
  return block.owner == Owner::kArena ? arena(block.stream).free(address) : stitcher_.free(address);
}

std::int64_t Allocator::bytes_at(Address address) const {
  const auto found = blocks_.find(address);
  return found == blocks_.end() ? -1 : found->second.bytes;
}

void Allocator::end_step() {
  // Before a plan is put into effect, what the watched steps left unused is given back: the arena takes its place.
  if (!options_.planned || !planned_.end_step()) return;
  release_unused();
  planned_.adopt();
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
  made.deviations = planned_.deviations();
  made.plans = planned_.plans();
  made.first_deviation = planned_.first_deviation();
  return made;
}

Arena& Allocator::arena(std::int32_t stream) { return arenas_.try_emplace(stream, memory_, options_.arena_range_bytes).first->second; }

}  // namespace memtune::vmm
