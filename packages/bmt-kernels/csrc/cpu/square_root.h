// The square root of float32 parameters' Adam.
//
// [Note: torch's square root]
// torch's sqrt on x86-64 is that of the MKL that is linked into it, which on some processors is not the nearest number in one
// case out of five. To equal torch.optim.Adam in every bit, Adam for float32 parameters uses the same function, found in torch's
// library by its name. Whether the result is equal is tried out before the kernel is used (bmt_kernels/bits.py).
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace bmt {

// MKL's vmsSqrt at this address; 0: the processor's own square root.
void use_mkl_square_root(std::uintptr_t vms_sqrt);

// Null for the processor's own.
SquareRoot* square_root();

}  // namespace bmt
