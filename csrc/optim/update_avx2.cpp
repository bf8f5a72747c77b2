#define MEMTUNE_ISA update_avx2
#include "optim/update.inl"
