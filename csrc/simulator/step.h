// One training step as columns, in the meaning of memtune/program/step.py; nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace memtune {

enum Phase : std::uint8_t { kPrologue, kForward, kRecompute, kBackward, kBoundary, kOptimizer, kPhases };
enum Tier : std::uint8_t { kDevice, kHost, kSsd, kTiers };
enum Use : std::uint8_t { kReads, kWrites, kHandsOver };  // kHandsOver: DONATES, the op's output takes its memory
enum Kind : std::uint8_t { kTemporary = 5, kKinds = 8 };

// The resources of program.Resource, then the host thread that issues ops to a device.
enum Resource : std::uint8_t {
  kCompute, kHostToDevice, kDeviceToHost, kIntraLink, kInterLink, kSsdRead, kSsdWrite, kHostThreads, kNothing, kHostIssue, kResources
};

// Values of op_stream; further ones are side streams.
enum Stream : std::uint8_t { kOwnStream = 0, kComputeStream = 1, kStreams = 8 };

inline constexpr std::size_t kQueues = std::size_t{kHostThreads} + kStreams;  // the resources' own streams, then the side streams

struct Step {
  // ops, n rows each
  std::span<const std::uint8_t> op_phase;
  std::span<const std::uint8_t> op_resource;
  std::span<const double> op_s;        // how long the op occupies its resource
  std::span<const double> op_issue_s;  // how long the host takes to issue it; 0 where the host computes
  // storages, m rows each
  std::span<const std::int64_t> bytes;
  std::span<const std::uint8_t> tier;
  std::span<const std::uint8_t> kind;
  std::span<const std::int32_t> producer;    // -1: it exists before the step
  std::span<const std::int32_t> held_until;  // -1: no reference
  // uses, sorted by op
  std::span<const std::int32_t> use_op;
  std::span<const std::int32_t> use_storage;
  std::span<const std::uint8_t> use_mutates;
  // what autograd keeps
  std::span<const std::int32_t> save_storage;
  std::span<const std::int32_t> save_until;
  // ops again: what only the events level asks for
  std::span<const std::uint8_t> op_stream;
  std::span<const std::uint8_t> op_prefetch;
  std::span<const std::int32_t> op_match;

  std::size_t n_ops() const { return op_phase.size(); }
  std::size_t n_storages() const { return bytes.size(); }
  bool computes(std::size_t op) const {  // whether the op keeps the order of the compute stream
    if (op_resource[op] == kNothing) return false;
    return op_stream[op] == kComputeStream || (op_stream[op] == kOwnStream && op_resource[op] == kCompute);
  }

  std::size_t queue(std::size_t op) const {  // the stream whose order the op keeps, below kQueues
    const std::uint8_t stream = op_stream[op];
    if (stream == kOwnStream) return op_resource[op];
    return stream == kComputeStream ? std::size_t{kCompute} : std::size_t{kHostThreads} + stream;
  }

  // Per storage the op after which it is freed; -1 where it never exists, n or more where it outlives the step.
  std::vector<std::int32_t> ends() const;

  // Throws std::invalid_argument naming the column that has another length or points outside.
  void check() const;
};

// Rows by a key: those with key k are `rows[first[k]] .. rows[first[k + 1]]`, ascending; keys outside [0, n) are left out.
struct ByKey {
  std::vector<std::int32_t> first, rows;

  ByKey(std::span<const std::int32_t> keys, std::size_t n);
  std::span<const std::int32_t> operator[](std::size_t key) const {
    return {rows.data() + first[key], rows.data() + first[key + 1]};
  }
};

}  // namespace memtune
