// The kernels for any processor.
#define BMT_ISA portable

#include "cpu/kernels.h"
#include "cpu/lanes_scalar.h"

namespace bmt::BMT_ISA {
using Lanes = Lane;
}

#include "cpu/all_kernels.inl"

const bmt::Kernels bmt::portable_kernels = bmt::BMT_ISA::all("portable");
