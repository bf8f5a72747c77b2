#include "remat/rematerializer.h"

#include <algorithm>
#include <utility>

namespace memtune::remat {

Rematerializer::Rematerializer(const Settings& settings) : cache(settings.arena, settings.rule), settings_(settings) {}

Id Rematerializer::constant(Bytes bytes) {
  const Id tensor = cache.lineage.add_tensor(bytes, -1, -1);
  const Id storage = cache.lineage.tensors[tensor].storage;
  const bool placed = cache.admit(storage, bytes);
  note_evictions();
  // Constants are pinned, so no later eviction could make this room.
  if (!placed) throw Infeasible(bytes, cache.arena.used());
  cache.pin(storage);
  cache.resident(storage);
  cache.lineage.tensors[tensor].present = true;
  cache.lineage.storages[storage].last_access = cache.clock;
  retain(tensor);
  return tensor;
}

std::vector<Id> Rematerializer::call(double cost, std::vector<Id> args, const std::vector<Out>& outs, Id takes_over, bool again, Bytes scratch,
                                     Bytes elements) {
  Lineage& lineage = cache.lineage;
  const Id op = static_cast<Id>(lineage.ops.size());
  std::vector<Id> unique;
  for (Id arg : args)
    if (std::find(unique.begin(), unique.end(), arg) == unique.end()) unique.push_back(arg);
  lineage.ops.push_back({.cost = cost, .args = std::move(unique), .outs = {}, .takes_over = takes_over, .scratch = scratch, .elements = elements});
  for (const Out& out : outs) {
    const Id tensor = lineage.add_tensor(out.bytes, out.base, op);
    if (out.base < 0) lineage.storages[lineage.tensors[tensor].storage].cheap = out.cheap;
    lineage.ops[op].outs.push_back(tensor);
    retain(tensor);
  }
  lineage.link(op);
  // A running mean: rules compare a tensor's cost with it before all ops are known.
  cache.mean_cost += (cost - cache.mean_cost) / static_cast<double>(++calls);
  run(op, true);
  // Outputs of an op that cannot run again must stay, so its inputs are not needed for them.
  if (!again)
    for (Id out : lineage.ops[op].outs) {
      lineage.tensors[out].op = -1;
      cache.pin(lineage.tensors[out].storage);
      needs_no_parents(lineage.tensors[out].storage);
    }
  return lineage.ops[op].outs;
}

void Rematerializer::retain(Id tensor) {
  ++cache.lineage.tensors[tensor].refs;
  ++cache.lineage.storages[cache.lineage.tensors[tensor].storage].refs;
}

void Rematerializer::release(Id tensor) {
  const Id storage = cache.lineage.tensors[tensor].storage;
  --cache.lineage.tensors[tensor].refs;
  if (--cache.lineage.storages[storage].refs > 0) return;
  drop(storage);
}

void Rematerializer::drop(Id storage) {
  const Storage& it = cache.lineage.storages[storage];
  if (settings_.release == Release::banish) {
    to_banish_.push_back(storage);
    try_banish();
  } else if (settings_.release == Release::evict && !it.pinned && it.resident && it.locks == 0) {
    ++cache.counters.released;
    cache.evict(storage);
    note_evictions();
  }
  if (settings_.forget) forget(storage);
}

// Forgets a storage without references from which no evicted storage is recomputed, and then its parents if that holds for them.
void Rematerializer::forget(Id storage) {
  std::vector<Id> stack{storage};
  while (!stack.empty()) {
    const Id at = stack.back();
    stack.pop_back();
    Storage& it = cache.lineage.storages[at];
    // An explicit stack: chains of evicted storages are as long as the model.
    if (it.forgotten || it.refs > 0 || it.needed_by > 0 || it.locks > 0) continue;
    it.forgotten = true;
    it.on_host = false;
    if (it.resident) cache.evict(at);
    cache.lineage.restored(at);  // removes it from all neighbourhoods
    for (Id parent : std::exchange(it.parents, {})) {
      --cache.lineage.storages[parent].needed_by;
      stack.push_back(parent);
    }
  }
  note_evictions();
}

// A storage that cannot be recomputed does not need its parents.
void Rematerializer::needs_no_parents(Id storage) {
  if (!settings_.forget) return;
  for (Id parent : std::exchange(cache.lineage.storages[storage].parents, {})) {
    std::erase(cache.lineage.storages[parent].children, storage);
    --cache.lineage.storages[parent].needed_by;
    forget(parent);
  }
}

// Frees unreferenced storages permanently once all their children are resident; these are pinned then.
void Rematerializer::try_banish() {
  Lineage& lineage = cache.lineage;
  // DTR's banishing (Kirisame et al. 2021): it is gone permanently, so its children can no longer be evicted.
  std::erase_if(to_banish_, [&](Id storage) {
    const Storage& it = lineage.storages[storage];
    const auto gone = [&](Id child) { return lineage.storages[child].evicted || lineage.storages[child].on_host; };
    if (it.locks > 0 || std::any_of(it.children.begin(), it.children.end(), gone)) return false;
    for (Id child : it.children)
      if (lineage.storages[child].resident) cache.pin(child);
    if (it.resident) {
      ++cache.counters.released;
      cache.evict(storage);
    }
    lineage.restored(storage);  // removes it from all neighbourhoods
    note_evictions();
    return true;
  });
}

void Rematerializer::require(Id tensor) {
  Lineage& lineage = cache.lineage;
  bring(tensor);
  cache.pin(lineage.tensors[tensor].storage);
}

void Rematerializer::bring(Id tensor) {
  if (!cache.lineage.tensors[tensor].present && !reload(tensor)) run(cache.lineage.tensors[tensor].op, false);
}

// Whether `tensor`, which is not there, was on the host, from where it is copied back.
bool Rematerializer::reload(Id tensor) {
  const Id storage = cache.lineage.tensors[tensor].storage;
  if (!cache.lineage.storages[storage].on_host || !cache.lineage.tensors[tensor].on_host) return false;
  const Bytes bytes = cache.lineage.storages[storage].bytes;
  const bool done = cache.reload(storage);
  note_evictions();
  if (!done) throw Infeasible(bytes, cache.arena.used());
  journal.push_back({Act::reload, storage});
  peak = std::max(peak, cache.arena.used());
  return true;
}

void Rematerializer::make_room(Bytes bytes) {
  const bool made = cache.make_room(bytes);
  note_evictions();
  if (!made) throw Infeasible(bytes, cache.arena.used());
  peak = std::max(peak, cache.arena.used() + bytes);
}

void Rematerializer::settle() {
  for (Id tensor = 0; tensor < static_cast<Id>(cache.lineage.tensors.size()); ++tensor)
    if (cache.lineage.tensors[tensor].refs > 0) require(tensor);
}

void Rematerializer::run(Id op, bool first) {
  enter(op, first);
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
    Id missing = -1;
    for (; frame.next < frame.args.size(); ++frame.next) {
      const Tensor& arg = cache.lineage.tensors[frame.args[frame.next]];
      if (!arg.present && !reload(frame.args[frame.next])) {
        missing = arg.op;
        break;
      }
      if (!frame.locked[frame.next]) cache.lock(arg.storage);
      frame.locked[frame.next] = 1;
    }
    if (missing >= 0) {
      // The recursion of DTR as a stack of frames; the frame is looked at again when the argument is there.
      if (!takes_along(frame)) enter(missing, false);
      continue;
    }
    try {
      execute(frame);
    } catch (const Infeasible&) {
      if (frame.along.empty()) throw;
      leave(frame);  // whole, one after the other: what the first ones have read may go in between
      const Frame again = frame;
      frames_.pop_back();
      enter(again.op, again.first);
      frames_.back().whole = true;
      continue;
    }
    leave(frame);
    frames_.pop_back();
  }
  // They were made for this op alone, and no reference holds them.
  if (!settings_.keep_replayed)
    for (Id storage : dead_again_)
      if (cache.evictable(storage) && cache.lineage.storages[storage].refs == 0) cache.evict(storage);
  dead_again_.clear();
  note_evictions();
  if (!to_banish_.empty()) try_banish();
}

void Rematerializer::enter(Id op, bool first) {
  Frame frame{.op = op, .first = first};
  for (Id arg : cache.lineage.ops[op].args) take_arg(frame, arg);
  frames_.push_back(std::move(frame));
}

void Rematerializer::take_arg(Frame& frame, Id arg) {
  const Tensor& it = cache.lineage.tensors[arg];
  cache.lineage.storages[it.storage].last_access = cache.clock;
  if (it.present) cache.lock(it.storage);
  frame.args.push_back(arg);
  frame.locked.push_back(it.present);
}

// Whether the maker of the frame's missing argument, with makers of its own missing inputs, runs tile by tile along with the frame's
// operator. It does if the full argument does not fit, and all these operators are elementwise on resident inputs.
bool Rematerializer::takes_along(Frame& frame) {
  const Lineage& lineage = cache.lineage;
  const Id missing = frame.args[frame.next];
  if (settings_.parts < 2 || frame.whole || lineage.ops[frame.op].elements < settings_.parts || lineage.ops[frame.op].takes_over >= 0) return false;
  Bytes wanted = lineage.storages[lineage.tensors[missing].storage].bytes;
  for (Id out : lineage.ops[frame.op].outs) wanted += lineage.storages[lineage.tensors[out].storage].bytes;
  if (wanted <= cache.arena.free_bytes()) return false;
  std::vector<Id> along = frame.along;
  if (!in_parts(frame, lineage.tensors[missing].op, along)) return false;
  frame.args.erase(frame.args.begin() + static_cast<std::ptrdiff_t>(frame.next));
  frame.locked.erase(frame.locked.begin() + static_cast<std::ptrdiff_t>(frame.next));
  std::sort(along.begin(), along.end());
  frame.along = along;
  for (Id op : along)
    for (Id arg : lineage.ops[op].args)
      if (lineage.tensors[arg].present && std::find(frame.args.begin(), frame.args.end(), arg) == frame.args.end()) take_arg(frame, arg);
  return true;
}

// Adds `op` to `along`, and before it those that make what it misses; false where one of them does not run in parts.
bool Rematerializer::in_parts(const Frame& frame, Id op, std::vector<Id>& along) const {
  constexpr std::size_t kMost = 8;
  const Lineage& lineage = cache.lineage;
  std::vector<Id> stack{op};
  while (!stack.empty()) {
    const Id at = stack.back();
    stack.pop_back();
    if (std::find(along.begin(), along.end(), at) != along.end()) continue;
    const Op& it = lineage.ops[at];
    if (it.elements != lineage.ops[frame.op].elements || it.takes_over >= 0 || along.size() == kMost) return false;
    along.push_back(at);
    for (Id arg : it.args) {
      if (lineage.tensors[arg].present) continue;
      if (lineage.tensors[arg].op < 0) return false;
      stack.push_back(lineage.tensors[arg].op);
    }
  }
  return true;
}

// Of what `op` makes, which has one output.
Bytes Rematerializer::part_bytes(Id op) const {
  const Op& it = cache.lineage.ops[op];
  const Bytes whole = cache.lineage.storages[cache.lineage.tensors[it.outs.front()].storage].bytes;
  return (it.elements + settings_.parts - 1) / settings_.parts * (whole / it.elements);
}

bool Rematerializer::overwrites(const Op& op, bool first) const {
  if (op.takes_over < 0 || !settings_.in_place) return false;
  const Storage& old = cache.lineage.storages[cache.lineage.tensors[op.takes_over].storage];
  const Storage& made = cache.lineage.storages[cache.lineage.tensors[op.outs.front()].storage];
  // The only lock is this op's own: no other op or reference reads the old value.
  return old.resident && !made.resident && !old.pinned && old.locks == 1 && old.refs <= (first ? 1 : 0) && old.bytes == made.bytes;
}

void Rematerializer::execute(const Frame& frame) {
  const Op& op = cache.lineage.ops[frame.op];
  const bool over = overwrites(op, frame.first);
  Bytes scratch = frame.first ? 0 : op.scratch;
  if (!frame.along.empty()) scratch += part_bytes(frame.op);
  for (Id each : frame.along) scratch += part_bytes(each);
  place(op, over, scratch);
  note_evictions();
  for (Id each : frame.along) {
    const Op& again = cache.lineage.ops[each];
    journal.push_back({Act::along, each});
    replay_cost += again.cost;
    cache.clock += again.cost;
    ++replays;
    ++cache.lineage.storages[cache.lineage.tensors[again.outs.front()].storage].replays;
  }
  if (over) journal.push_back({Act::over_write, frame.op});
  journal.push_back({frame.first ? Act::run : Act::replay, frame.op});
  (frame.first ? first_cost : replay_cost) += op.cost;
  replay_cost += std::exchange(cache.exposed, 0.0);
  cache.clock += op.cost;
  if (frame.first)
    for (Id out : op.outs) cache.lineage.storages[cache.lineage.tensors[out].storage].last_access = cache.clock;
  else
    ++replays;
  if (settings_.cost_limit > 0 && std::max(first_cost, all_first_cost) + replay_cost > settings_.cost_limit) throw Thrashing();
  if (settings_.work_limit > 0 && work() > settings_.work_limit) throw Thrashing();
}

// Room for all that the operator makes, also for what is still there: the second copy is freed right after.
void Rematerializer::place(const Op& op, bool over, Bytes scratch) {
  Lineage& lineage = cache.lineage;
  constexpr Id kSecond = 1 << 30;  // keys of second copies
  std::vector<Id> keys, there;
  Bytes all = 0;
  for (Id out : op.outs)
    if (!lineage.tensors[out].view && lineage.storages[lineage.tensors[out].storage].resident) there.push_back(lineage.tensors[out].storage);
  for (Id storage : there) cache.lock(storage);
  for (Id out : op.outs)
    if (!lineage.tensors[out].view && !(over && out == op.outs.front())) all += lineage.storages[lineage.tensors[out].storage].bytes;
  const bool counted = !cache.arena.settings().addressed;
  // Without addresses one count is enough; with them each storage needs a gap of its own.
  if (counted && !cache.make_room(all + scratch)) throw Infeasible(all + scratch, cache.arena.used());
  for (Id out : op.outs) {
    const Id storage = lineage.tensors[out].storage;
    if (lineage.tensors[out].view || (over && out == op.outs.front())) continue;
    const Id key = lineage.storages[storage].resident ? kSecond + storage : storage;
    const Bytes bytes = lineage.storages[storage].bytes;
    const bool right = cache.rule.groups > 1 && lineage.storages[storage].cheap;
    if (!cache.make_room(bytes) || !cache.arena.place(key, bytes, right)) {
      for (Id placed : keys) cache.drop(placed);
      throw Infeasible(bytes, cache.arena.used());
    }
    keys.push_back(key);
  }
  if (scratch > 0 && !cache.make_room(scratch)) {
    for (Id placed : keys) cache.drop(placed);
    throw Infeasible(scratch, cache.arena.used());
  }
  peak = std::max(peak, cache.arena.used() + scratch);
  for (Id key : keys)
    if (key >= kSecond) cache.drop(key);
  for (Id storage : there) cache.unlock(storage);
  if (over) {
    const Id from = lineage.tensors[op.takes_over].storage, to = lineage.tensors[op.outs.front()].storage;
    cache.take_over(from, to);
  }
  for (Id out : op.outs) {
    Storage& made = lineage.storages[lineage.tensors[out].storage];
    if (made.evicted) ++made.replays;
    made.on_host = false;
    if (!lineage.tensors[out].view && !made.resident) {
      if (made.refs == 0) dead_again_.push_back(lineage.tensors[out].storage);
      cache.resident(lineage.tensors[out].storage);
    }
    lineage.tensors[out].present = true;
  }
}

void Rematerializer::leave(const Frame& frame) {
  for (std::size_t i = 0; i < frame.args.size(); ++i)
    if (frame.locked[i]) cache.unlock(cache.lineage.tensors[frame.args[i]].storage);
}

void Rematerializer::note_evictions() {
  for (const auto& [storage, to_host] : cache.evicted_now) journal.push_back({to_host ? Act::swap : Act::evict, storage});
  cache.evicted_now.clear();
}

}  // namespace memtune::remat
