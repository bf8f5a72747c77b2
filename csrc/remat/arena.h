// A simulated arena in address order: places of storages, and holes.
//
// Without addresses it only counts bytes: a request fits if the total does.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "remat/lineage.h"

namespace memtune::remat {

struct Piece {
  Bytes offset, bytes;
  Id storage;  // -1 for a hole
};

struct ArenaSettings {
  Bytes capacity = 0;
  bool addressed = false;
  bool best_fit = false;     // else first fit from the end that the request asks for
  Bytes align = 1;           // sizes are rounded up to it
  Bytes small_bytes = 0;     // requests up to this size go to an area of their own …
  Bytes small_capacity = 0;  // … of this size, taken from the capacity, while it lasts
};

class Arena {
 public:
  explicit Arena(const ArenaSettings& settings);

  bool fits(Bytes bytes) const;
  // Gives `storage` a place, from the right end if `right`; false if no hole is large enough.
  bool place(Id storage, Bytes bytes, bool right);
  void remove(Id storage);
  // Moves the place of `from` to `to`.
  void take_over(Id from, Id to);
  // Moves all pieces together at the left end; returns the bytes that moved. `whole`: free memory of the small pieces' area joins the
  // rest permanently.
  Bytes compact(bool whole);

  Bytes used() const { return used_; }
  Bytes peak() const { return peak_; }
  Bytes free_bytes() const { return settings_.capacity - used_; }
  Bytes largest_hole() const;
  Bytes free_around(Id storage) const;  // bytes of the holes on both sides
  bool is_small(Bytes bytes) const;     // goes to the area of small pieces
  const std::map<Bytes, Piece>& pieces() const { return pieces_; }
  Bytes rounded(Bytes bytes) const { return (bytes + settings_.align - 1) / settings_.align * settings_.align; }
  const ArenaSettings& settings() const { return settings_; }

 private:
  void count(Bytes bytes);
  ArenaSettings settings_;
  std::map<Bytes, Piece> pieces_;             // by offset, holes too
  std::unordered_map<Id, Bytes> offset_;      // of what has an address
  struct Unaddressed {
    Bytes bytes;
    bool small;  // in the area of small pieces; else it has no address
  };
  std::unordered_map<Id, Unaddressed> unaddressed_;
  Bytes used_ = 0, peak_ = 0, small_used_ = 0;
};

}  // namespace memtune::remat
