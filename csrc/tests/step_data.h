// A step that owns its columns, so that a test reads as data.
#pragma once

#include <vector>

#include "simulator/step.h"

struct StepData {
  std::vector<std::uint8_t> op_phase, op_resource;
  std::vector<double> op_s, op_issue_s;
  std::vector<std::int64_t> bytes;
  std::vector<std::uint8_t> tier, kind;
  std::vector<std::int32_t> producer, held_until;
  std::vector<std::int32_t> use_op, use_storage;
  std::vector<std::uint8_t> use_mutates;
  std::vector<std::int32_t> save_storage, save_until;
  // Neutral where a test does not say otherwise.
  std::vector<std::uint8_t> op_stream = std::vector<std::uint8_t>(op_phase.size());
  std::vector<std::uint8_t> op_prefetch = std::vector<std::uint8_t>(op_phase.size());
  std::vector<std::int32_t> op_match = std::vector<std::int32_t>(op_phase.size());

  memtune::Step view() const {
    return {op_phase, op_resource, op_s,        op_issue_s,   bytes,      tier,      kind,        producer, held_until,
            use_op,   use_storage, use_mutates, save_storage, save_until, op_stream, op_prefetch, op_match};
  }
};
