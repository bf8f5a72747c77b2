#define MEMTUNE_ISA update_base
#include "optim/update.inl"
