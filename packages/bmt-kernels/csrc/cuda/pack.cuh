// Several neighbouring elements as one load or store, and their values as float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "common/element.h"

namespace bmt {

template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
    T values[count];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline Float16 from_float<Float16>(float x) {
    return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float x) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

template <int count, class T>
__device__ inline Pack<T, count> load(const T* p) {
    return *reinterpret_cast<const Pack<T, count>*>(p);
}

template <int count, class T>
__device__ inline void store(T* p, const Pack<T, count>& pack) {
    *reinterpret_cast<Pack<T, count>*>(p) = pack;
}

__device__ inline bool is_aligned(const void* p, std::size_t bytes) {
    return (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1)) == 0;
}

// Number of elements before the first address that is a multiple of 16 bytes, at most `count`.
template <class T>
__device__ inline std::int64_t elements_before_alignment(const T* p, std::int64_t count) {
    const auto beyond = static_cast<std::int64_t>((reinterpret_cast<std::uintptr_t>(p) & 15) / sizeof(T));
    const std::int64_t before = beyond == 0 ? 0 : 16 / static_cast<std::int64_t>(sizeof(T)) - beyond;
    return before < count ? before : count;
}

}  // namespace bmt
