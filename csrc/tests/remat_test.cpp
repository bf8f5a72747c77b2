#include <cmath>

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
  overwriting_op_reuses_unshared_memory();
  return 0;
}
