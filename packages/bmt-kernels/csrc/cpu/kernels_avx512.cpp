// The kernels for x86-64 processors with AVX-512: this file alone is compiled for them.
#define BMT_ISA avx512

#include "cpu/kernels.h"
#include "cpu/lanes_avx512.h"

#include "cpu/all_kernels.inl"

const bmt::Kernels bmt::avx512_kernels = bmt::BMT_ISA::all("avx512");
