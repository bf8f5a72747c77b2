#define MEMTUNE_ISA quantise_avx512
#include "quant/quantise.inl"
