// Combining the values of all threads of a block.
#pragma once

#include <cuda_runtime.h>

namespace bmt {

// Larger of two; NaN if either is.
__device__ inline double max_or_nan(double a, double b) { return a > b || a != a ? a : b; }

__device__ inline float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a > b || a != a ? a : b;
#endif
}

// Returns, in thread 0, all threads' values combined in a fixed order. Value needs combined(Value, Value) and
// shuffled_down(Value, int). All threads must call it; once only per block, as it uses one piece of shared memory.
template <class Value>
__device__ Value block_combined(Value value, Value neutral) {
    __shared__ Value of_warps[32];
    for (int offset = 16; offset > 0; offset /= 2) {
        value = combined(value, shuffled_down(value, offset));
    }
    const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = value;
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return neutral;
    }
    value = static_cast<int>(threadIdx.x) < warps ? of_warps[threadIdx.x] : neutral;
    for (int offset = 16; offset > 0; offset /= 2) {
        value = combined(value, shuffled_down(value, offset));
    }
    return value;
}

}  // namespace bmt
