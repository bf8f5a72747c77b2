#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "remat/arena.h"
#include "remat/lineage.h"
#include "remat/rematerializer.h"

using namespace memtune::remat;

namespace {

void holes_merge_and_both_ends_are_served() {
  Arena arena({.capacity = 10, .addressed = true});
  CHECK(arena.place(0, 3, false) && arena.place(1, 3, false) && arena.place(2, 2, true));
  CHECK(arena.largest_hole() == 2 && !arena.fits(3));
  arena.remove(0);
  CHECK(arena.free_around(1) == 5 && arena.largest_hole() == 3);
  arena.remove(1);
  CHECK(arena.largest_hole() == 8 && arena.used() == 2 && arena.peak() == 8);
  arena.take_over(2, 7);
  CHECK(arena.compact(false) == 2 && arena.pieces().begin()->second.storage == 7);
}

void small_pieces_live_apart_while_their_area_lasts() {
  Arena arena({.capacity = 10, .addressed = true, .small_bytes = 1, .small_capacity = 2});
  CHECK(arena.place(0, 8, false) && !arena.fits(2));
  CHECK(arena.place(1, 1, false) && arena.place(2, 1, false) && !arena.fits(1));
  arena.remove(1);
  CHECK(arena.fits(1) && arena.used() == 9);
  arena.remove(0);
  CHECK(arena.place(3, 4, true) && arena.compact(false) == 4 && arena.largest_hole() == 4);
  CHECK(arena.compact(true) == 0 && arena.largest_hole() == 5 && !arena.is_small(1));
}

// a -> b -> c -> d: what each way of counting says when b and c are gone.
void neighbourhoods() {
  Lineage lineage;
  Id before = lineage.add_tensor(1, -1, -1);
  for (double cost : {1.0, 2.0, 4.0, 8.0}) {
    const Id op = static_cast<Id>(lineage.ops.size());
    lineage.ops.push_back({.cost = cost, .args = {before}, .outs = {}});
    before = lineage.add_tensor(1, -1, op);
    lineage.ops[op].outs = {before};
    lineage.link(op);
  }
  lineage.evicted(2);
  CHECK(lineage.closure_cost(1) == 2 && lineage.closure_cost(4) == 0);
  lineage.evicted(3);
  CHECK(lineage.closure_cost(1) == 6 && lineage.closure_cost(4) == 6 && lineage.classes_cost(4) == 6);
  lineage.restored(2);
  CHECK(lineage.closure_cost(1) == 0 && lineage.closure_cost(4) == 4);
  CHECK(lineage.classes_cost(1) == 0 && lineage.classes_cost(4) == 4);
}

// The cost of all that is evicted and reached from `from` through evicted storages.
double counted_again(const Lineage& lineage, Id from, std::vector<Id> Storage::* next) {
  std::set<Id> seen;
  std::vector<Id> stack{from};
  double sum = 0;
  while (!stack.empty()) {
    const Id at = stack.back();
    stack.pop_back();
    for (Id other : lineage.storages[at].*next)
      if (lineage.storages[other].evicted && seen.insert(other).second) {
        sum += lineage.storages[other].cost;
        stack.push_back(other);
      }
  }
  return sum;
}

// Makes a storage, or a view of `base`, out of `args`.
Id link(Lineage& lineage, double cost, std::vector<Id> args, Id base = -1) {
  const Id op = static_cast<Id>(lineage.ops.size());
  lineage.ops.push_back({.cost = cost, .args = std::move(args), .outs = {}});
  const Id out = lineage.add_tensor(1, base, op);
  lineage.ops[op].outs = {out};
  lineage.link(op);
  return out;
}

void kept_neighbourhoods_are_those_counted_again() {
  std::mt19937 random(0);
  const auto draw = [&](std::size_t below) { return static_cast<Id>(random() % below); };
  for (int round = 0; round < 200; ++round) {
    Lineage lineage;
    lineage.add_tensor(1, -1, -1);
    for (int change = 0; change < 60; ++change) {
      const auto count = lineage.storages.size();
      const Id storage = draw(count);
      const bool evicted = lineage.storages[storage].evicted;
      switch (draw(4)) {
        case 0: link(lineage, 1.0 + draw(9), {draw(count), draw(count)}); break;
        case 1: evicted ? lineage.restored(storage) : lineage.evicted(storage); break;
        default:
          if (evicted) break;
          CHECK(lineage.closure_cost(storage) == counted_again(lineage, storage, &Storage::parents) + counted_again(lineage, storage, &Storage::children));
      }
    }
  }
}

void view_joins_neighbourhoods() {
  Lineage lineage;
  const Id given = lineage.add_tensor(1, -1, -1);
  const Id first = link(lineage, 1, {given}), second = link(lineage, 2, {first}), other = link(lineage, 4, {given});
  lineage.evicted(second);
  CHECK(lineage.closure_cost(other) == 0);
  link(lineage, 8, {second, other}, other);
  lineage.evicted(first);
  CHECK(lineage.closure_cost(other) == 3);
}

void overwriting_op_reuses_unshared_memory() {
  Settings settings;
  settings.arena = {.capacity = 4, .addressed = true};
  settings.in_place = true;
  Rematerializer books(settings);
  const Id start = books.constant(1);
  const Id old = books.call(1, {start}, {{.bytes = 3}}, -1, true)[0];
  const Id made = books.call(1, {old}, {{.bytes = 3}}, old, true)[0];
  CHECK(books.journal.size() == 3 && books.journal[1].act == Act::over_write && books.cache.arena.peak() == 4);
  books.release(old);
  books.cache.evict(books.cache.lineage.tensors[made].storage);
  books.require(made);
  CHECK(books.replays == 2 && books.cache.arena.used() == 4);
}

}  // namespace

int main() {
  holes_merge_and_both_ends_are_served();
  small_pieces_live_apart_while_their_area_lasts();
  neighbourhoods();
  kept_neighbourhoods_are_those_counted_again();
  view_joins_neighbourhoods();
  overwriting_op_reuses_unshared_memory();
  return 0;
}
