// One arena in address order: who lives where, which holes are left.
//
// Without addresses it is a counter of bytes: whatever fits in total fits.
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
  // Gives `storage` a place, from the right end if asked to; false where no hole is large enough.
  bool place(Id storage, Bytes bytes, bool right);
  void remove(Id storage);
  // `to` lives where `from` lived.
  void take_over(Id from, Id to);
  // Moves everything together at the left end; returns the bytes that moved. `whole`: what the small pieces' area has free
  // joins the rest for good.
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
  struct Elsewhere {
    Bytes bytes;
    bool small;  // in the area of small pieces; else it has no address
  };
  std::unordered_map<Id, Elsewhere> elsewhere_;
  Bytes used_ = 0, peak_ = 0, small_used_ = 0;
};

}  // namespace memtune::remat
