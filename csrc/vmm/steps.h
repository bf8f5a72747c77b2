// Training steps, watched and recognised: what a step asks for, the next one asks for again.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace memtune::vmm {

inline constexpr std::int64_t kBlockBytes = 512;  // all sizes are multiples of this

inline std::int64_t in_blocks(std::int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

struct WatchOptions {
  std::int64_t skip_steps = 1;     // before one is watched: the first makes the optimizer state
  std::int64_t window = 64;        // how far from its place in the step a request of the same size is still recognised
  std::int64_t replan_after = 64;  // requests that are not as known after which another step is watched; doubles each time
  bool any_size = false;           // a request of a size that is not within the window is the next one all the same
};

class Steps {
 public:
  // A request of the watched step. Times count requests and frees from the step's first one on.
  struct Row {
    std::int64_t bytes, start, end = -1;  // -1: not freed within another step's length
    std::int32_t stream;
  };

  explicit Steps(WatchOptions options) : options_(options) {}

  // The known request that this one is, each at most once in a step; -1: none.
  std::int64_t recognise(std::int64_t bytes, std::int32_t stream);
  // Counts a request that is not as known.
  void deviated(std::int64_t bytes, std::int32_t stream);

  void saw_allocation(std::uint64_t address, std::int64_t bytes, std::int32_t stream);
  void saw_free(std::uint64_t address);
  // The end of a step. True: a step has been watched until all that it frees is freed, and `learn` may be called.
  bool end_step();
  // Returns the watched requests, by which later requests are recognised from now on.
  std::vector<Row> learn();

  std::int64_t period() const { return period_; }  // of the step watched last
  std::int64_t learned() const { return learned_; }
  std::int64_t deviations() const { return deviations_; }
  const std::string& first_deviation() const { return first_deviation_; }

 private:
  enum class Watching { kNothing, kSteps, kFrees };
  struct Slot {
    std::int64_t bytes, row;
    bool used = false;
  };
  struct Sequence {
    std::vector<Slot> slots;
    std::size_t cursor = 0;
  };

  Slot* find(Sequence& sequence, std::int64_t bytes);

  WatchOptions options_;
  std::map<std::int32_t, Sequence> sequences_;  // by stream
  std::int64_t deviations_ = 0, since_learned_ = 0, learned_ = 0, steps_ = 0;
  std::string first_deviation_;

  Watching watching_ = Watching::kSteps;
  std::vector<Row> rows_;
  std::unordered_map<std::uint64_t, std::size_t> open_;  // rows without an end, by address
  std::int64_t clock_ = 0, period_ = 0;
};

}  // namespace memtune::vmm
