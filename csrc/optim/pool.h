// Threads that stay: one call runs a function for each of its parts, the first one on the caller's thread.
#pragma once

#include <functional>

namespace memtune::optim {

// Calls `work(part)` for every part in [0, parts) and returns when all are done; calls from several threads take turns. `work` must
// not throw. A process that was forked starts threads of its own.
void run_parts(int parts, const std::function<void(int)>& work);

}  // namespace memtune::optim
