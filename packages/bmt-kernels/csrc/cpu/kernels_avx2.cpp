// The kernels for x86-64 processors with AVX2, FMA and F16C: this file alone is compiled for them.
#define BMT_ISA avx2

#include "cpu/kernels.h"
#include "cpu/lanes_avx2.h"

#include "cpu/all_kernels.inl"

const bmt::Kernels bmt::avx2_kernels = bmt::BMT_ISA::all("avx2");
