#define MEMTUNE_ISA quantise_avx2
#include "quant/quantise.inl"
