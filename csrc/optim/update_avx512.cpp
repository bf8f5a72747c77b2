#define MEMTUNE_ISA update_avx512
#include "optim/update.inl"
