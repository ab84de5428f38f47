// Sixteen lanes with AVX-512 F, BW, DQ and VL.
//
// The instructions of AVX512-BF16 are not used: they flush denormal numbers, and rounding must be right for those too.
#pragma once

#include <immintrin.h>

#include "cpu/lanes_scalar.h"

namespace bmt::BMT_ISA {

struct Lanes {
    static constexpr std::size_t size = 16;
    __m512 v;

    static Lanes all(float x) { return {_mm512_set1_ps(x)}; }
    static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Lanes load(const Float16* p) { return {_mm512_cvtph_ps(halves(p))}; }
    static Lanes load(const BFloat16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(widened(p), 16))}; }
    static Lanes load(const BFloat16* param, const std::uint16_t* remainder) {
        const Lanes upper = load(param);
        const __m512i low = _mm512_cvtepi16_epi32(halves(remainder));
        const Lanes sum = {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(upper.v), low))};
        return {_mm512_mask_mov_ps(sum.v, sum.is_nan(), upper.v)};
    }

    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(Float16* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    void store(BFloat16* p) const {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i upper = _mm512_srli_epi32(bits, 16);
        const __m512i tie = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), tie);
        const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
        store_narrowed(p, _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan(), quiet));
    }
    void store(BFloat16* param, std::uint16_t* remainder) const {
        const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(v), is_nan(), _mm512_set1_epi32(0x7fc00000));
        store_narrowed(param, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
        store_narrowed(remainder, bits);
    }

    // 64 bytes to a multiple of 64, past the cache.
    static constexpr bool can_stream = true;
    static void stream_line(const void* from, void* to) {
        _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(from));
    }
    static void finish_streams() { _mm_sfence(); }

    float sum() const { return _mm512_reduce_add_ps(v); }
    float max() const { return is_nan() != 0 ? __builtin_nanf("") : _mm512_reduce_max_ps(v); }

   private:
    __mmask16 is_nan() const { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
    static __m256i halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static __m512i widened(const void* p) { return _mm512_cvtepu16_epi32(halves(p)); }
    static void store_narrowed(void* p, __m512i x) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }
};

static inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Lanes sqrt(Lanes a) { return {_mm512_sqrt_ps(a.v)}; }
static inline Lanes abs(Lanes a) { return {_mm512_abs_ps(a.v)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Lanes round(Lanes a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Lanes times_power_of_two(Lanes a, Lanes n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// The instruction returns its second operand if either is NaN.
static inline Lanes max(Lanes a, Lanes b) {
    return {_mm512_mask_mov_ps(_mm512_max_ps(a.v, b.v), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
static inline Lanes clamp(Lanes a, float low, float high) {
    return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), a.v))};
}

}  // namespace bmt::BMT_ISA
