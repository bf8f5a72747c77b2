#define MEMTUNE_ISA quantise_base
#include "quant/quantise.inl"
