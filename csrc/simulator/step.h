// One training step as columns, in the meaning of memtune/program.py; nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace memtune {

enum Phase : std::uint8_t { kPrologue, kForward, kRecompute, kBackward, kBoundary, kOptimizer, kPhases };
enum Tier : std::uint8_t { kDevice, kHost, kSsd, kTiers };
enum Kind : std::uint8_t { kTemporary = 5, kKinds = 8 };

// The resources of program.Resource, then the host thread that issues ops to a device.
enum Resource : std::uint8_t { kCompute = 0, kNothing = 8, kHostIssue = 9, kResources = 10 };

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
  std::span<const std::int32_t> producer;    // -1: there before the step
  std::span<const std::int32_t> held_until;  // -1: nobody
  // uses, sorted by op
  std::span<const std::int32_t> use_op;
  std::span<const std::int32_t> use_storage;
  std::span<const std::uint8_t> use_mutates;
  // what autograd keeps
  std::span<const std::int32_t> save_storage;
  std::span<const std::int32_t> save_until;

  std::size_t n_ops() const { return op_phase.size(); }
  std::size_t n_storages() const { return bytes.size(); }

  // Throws std::invalid_argument naming the column that has another length or points outside.
  void check() const;
};

}  // namespace memtune
