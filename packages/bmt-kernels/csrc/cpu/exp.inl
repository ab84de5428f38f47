// The exponential function on lanes, for float32 results within one unit in the last place.
#pragma once

namespace bmt::BMT_ISA {

// With n the whole number nearest to x / log 2 and r = x - n log 2, exp(x) = 2**n * exp(r), and the Taylor series of degree 7 has
// a relative error below 2**-27 for |r| <= log(2) / 2. Below -104 the result is 0, above 89 it is infinite; NaN stays NaN.
template <class F>
static inline F exp(F x) {
    x = clamp(x, -105.0f, 89.0f);
    const F n = round(x * F::all(0x1.715476p+0f));
    // log 2 in two parts, of which the first has zeros at its end, so that its product with n is exact.
    F r = fma(n, F::all(-0x1.62e400p-1f), x);
    r = fma(n, F::all(-0x1.7f7d1cp-20f), r);
    F sum = F::all(1.0f / 5040);
    sum = fma(sum, r, F::all(1.0f / 720));
    sum = fma(sum, r, F::all(1.0f / 120));
    sum = fma(sum, r, F::all(1.0f / 24));
    sum = fma(sum, r, F::all(1.0f / 6));
    sum = fma(sum, r, F::all(0.5f));
    sum = fma(sum, r, F::all(1.0f));
    sum = fma(sum, r, F::all(1.0f));
    return times_power_of_two(sum, n);
}

}  // namespace bmt::BMT_ISA
