// A persistent thread pool: a call runs a function for each part, the first one on the caller's thread.
#pragma once

#include <functional>

namespace memtune::optim {

// Calls `work(part)` for every part in [0, parts) and returns when all are done; calls from several threads are serialized. `work` must
// not throw. A forked process starts new threads.
void run_parts(int parts, const std::function<void(int)>& work);

}  // namespace memtune::optim
