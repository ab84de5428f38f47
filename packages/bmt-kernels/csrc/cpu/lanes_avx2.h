// Eight lanes with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "cpu/lanes_scalar.h"

namespace bmt::BMT_ISA {

struct Lanes {
    static constexpr std::size_t size = 8;
    __m256 v;

    static Lanes all(float x) { return {_mm256_set1_ps(x)}; }
    static Lanes load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Lanes load(const Float16* p) { return {_mm256_cvtph_ps(halves(p))}; }
    static Lanes load(const BFloat16* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(widened(p), 16))}; }
    static Lanes load(const BFloat16* param, const std::uint16_t* remainder) {
        const Lanes upper = load(param);
        const __m256i low = _mm256_cvtepi16_epi32(halves(remainder));
        const Lanes sum = {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(upper.v), low))};
        return {_mm256_blendv_ps(sum.v, upper.v, _mm256_castsi256_ps(sum.is_nan()))};
    }

    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(Float16* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    void store(BFloat16* p) const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i upper = _mm256_srli_epi32(bits, 16);
        const __m256i tie = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), tie);
        const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        store_narrowed(p, _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, is_nan()));
    }
    void store(BFloat16* param, std::uint16_t* remainder) const {
        const __m256i bits = _mm256_blendv_epi8(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fc00000), is_nan());
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
        store_narrowed(param, _mm256_srli_epi32(rounded, 16));
        store_narrowed(remainder, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
    }

    // 64 bytes to a multiple of 64, past the cache.
    static constexpr bool can_stream = true;
    static void stream_line(const void* from, void* to) {
        const __m256i* source = static_cast<const __m256i*>(from);
        __m256i* target = static_cast<__m256i*>(to);
        _mm256_stream_si256(target, _mm256_load_si256(source));
        _mm256_stream_si256(target + 1, _mm256_load_si256(source + 1));
    }
    static void finish_streams() { _mm_sfence(); }

    float sum() const {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    float max() const;

   private:
    __m256i is_nan() const { return _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }
    static __m128i halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static __m256i widened(const void* p) { return _mm256_cvtepu16_epi32(halves(p)); }
    static void store_narrowed(void* p, __m256i x) {
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
        _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
};

static inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline Lanes sqrt(Lanes a) { return {_mm256_sqrt_ps(a.v)}; }
static inline Lanes abs(Lanes a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes round(Lanes a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// The instruction returns its second operand if either is NaN.
static inline Lanes max(Lanes a, Lanes b) {
    return {_mm256_blendv_ps(_mm256_max_ps(a.v, b.v), a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
static inline Lanes clamp(Lanes a, float low, float high) {
    return {_mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), a.v))};
}

static inline Lanes times_power_of_two(Lanes a, Lanes n) {
    const __m256i whole = _mm256_cvtps_epi32(n.v);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return {_mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))};
}

inline float Lanes::max() const {
    alignas(32) float lane[size];
    _mm256_store_ps(lane, v);
    Lane largest{lane[0]};
    for (std::size_t i = 1; i < size; ++i) {
        largest = bmt::BMT_ISA::max(largest, Lane{lane[i]});
    }
    return largest.v;
}

}  // namespace bmt::BMT_ISA
