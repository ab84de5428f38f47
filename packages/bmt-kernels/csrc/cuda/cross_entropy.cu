// Cross entropy, one block per row of logits, which is read once in each pass and never held in float32.
#include "common/operations.h"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/reduce.cuh"

namespace bmt {
namespace {

constexpr int in_flight = 4;  // loads of 16 bytes that a thread has under way

// Rows of half types are read at the speed of memory only with the processor's approximate exponential: two units in the last
// place of float32 are nothing beside the rounding of the logits.
template <class T>
__device__ float exponential(float x) {
    return __expf(x);
}
template <>
__device__ float exponential<float>(float x) {
    return expf(x);
}

// What some classes of a row add up to, relative to their maximum: see [Note: online softmax].
//
// [Note: online softmax]
// The maximum is found in the same pass as the sum of exp(x - maximum): when it grows, the sum so far is multiplied by
// exp(old - new) (Milakov and Gimelshein 2018, section 3). Where all is -inf the shift is 0 instead, as -inf - -inf is NaN.
struct RowSums {
    float largest;
    float exponentials;  // sum of exp(x - shift)
    float differences;   // sum of weight * (x - shift)
    float weights;

    __device__ float shift() const { return largest == -INFINITY ? 0.0f : largest; }

    __device__ void raise(float new_largest) {
        if (new_largest > largest || new_largest != new_largest) {
            const float before = shift();
            // Nothing but -inf adds up to 0, and stays so although exp(before - shift) may be infinite.
            exponentials = largest == -INFINITY ? 0.0f : exponentials * expf(before - new_largest);
            largest = new_largest;
            differences += weights * (before - new_largest);
        }
    }
};

__device__ RowSums combined(RowSums a, RowSums b) {
    const float largest = max_or_nan(a.largest, b.largest);
    a.raise(largest);
    b.raise(largest);
    return {largest, a.exponentials + b.exponentials, a.differences + b.differences, a.weights + b.weights};
}

__device__ RowSums shuffled_down(const RowSums& sums, int offset) {
    return {
        __shfl_down_sync(0xffffffffu, sums.largest, offset), __shfl_down_sync(0xffffffffu, sums.exponentials, offset),
        __shfl_down_sync(0xffffffffu, sums.differences, offset), __shfl_down_sync(0xffffffffu, sums.weights, offset)};
}

// Adds some packs of `size` classes, which begin at the classes `at`.
template <bool with_sum, int packs, int size, class T>
__device__ void add_classes(RowSums& sums, const Pack<T, size> (&x)[packs], const std::int64_t (&at)[packs],
                            const float* weight) {
    float largest = -INFINITY;
#pragma unroll
    for (int u = 0; u < packs; ++u) {
#pragma unroll
        for (int k = 0; k < size; ++k) {
            largest = max_or_nan(to_float(x[u].values[k]), largest);
        }
    }
    sums.raise(largest);
    const float shift = sums.shift();
#pragma unroll
    for (int u = 0; u < packs; ++u) {
#pragma unroll
        for (int k = 0; k < size; ++k) {
            const float difference = to_float(x[u].values[k]) - shift;
            sums.exponentials += exponential<T>(difference);
            if constexpr (with_sum) {
                const float factor = weight == nullptr ? 1.0f : weight[at[u] + k];
                sums.differences += factor * difference;
                sums.weights += factor;
            }
        }
    }
}

template <bool with_sum, class T>
__device__ RowSums thread_sums(const T* x, std::int64_t classes, const float* weight) {
    constexpr int size = 16 / sizeof(T);
    const auto thread = static_cast<std::int64_t>(threadIdx.x);
    const auto threads = static_cast<std::int64_t>(blockDim.x);
    const std::int64_t head = elements_before_alignment(x, classes);
    const std::int64_t packs = (classes - head) / size;
    RowSums sums{-INFINITY, 0.0f, 0.0f, 0.0f};
    std::int64_t i = thread;
    for (; i + (in_flight - 1) * threads < packs; i += in_flight * threads) {
        Pack<T, size> some[in_flight];
        std::int64_t at[in_flight];
#pragma unroll
        for (int u = 0; u < in_flight; ++u) {
            at[u] = head + (i + u * threads) * size;
            some[u] = load<size>(x + at[u]);
        }
        add_classes<with_sum>(sums, some, at, weight);
    }
    for (; i < packs; i += threads) {
        const std::int64_t at[1] = {head + i * size};
        const Pack<T, size> one[1] = {load<size>(x + at[0])};
        add_classes<with_sum>(sums, one, at, weight);
    }
    // What is not aligned, at either end of the row, is less than a pack each.
    const std::int64_t ends = classes - packs * size;
    for (i = thread; i < ends; i += threads) {
        const std::int64_t at[1] = {i < head ? i : i + packs * size};
        const Pack<T, 1> one[1] = {load<1>(x + at[0])};
        add_classes<with_sum>(sums, one, at, weight);
    }
    return sums;
}

template <class T, bool with_sum>
__global__ void forward_kernel(Logits logits, Targets targets, const float* weight, ForwardResult result) {
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const T* x = static_cast<const T*>(logits.address) + row * logits.stride;
    const RowSums sums =
        block_combined(thread_sums<with_sum>(x, logits.classes, weight), {-INFINITY, 0.0f, 0.0f, 0.0f});
    if (threadIdx.x != 0) {
        return;
    }
    const float log_sum = logf(sums.exponentials);
    const std::int64_t column = column_of(targets.address[row], targets.first_class, logits.classes);
    result.row_max[row] = sums.largest;
    result.log_sum[row] = log_sum;
    result.target_log_prob[row] = column < logits.classes ? (to_float(x[column]) - sums.largest) - log_sum : 0.0f;
    if constexpr (with_sum) {
        // Where everything is -inf, log p is undefined.
        result.log_prob_sum[row] = sums.largest == -INFINITY ? NAN : sums.differences - sums.weights * log_sum;
    }
}

struct RowFactors {
    float row_max, log_sum, total, hit, spread;
    std::int64_t column;
};

template <bool has_spread, class T, int size>
__device__ Pack<T, size> gradients_of(const Pack<T, size>& x, std::int64_t at, const RowFactors& row,
                                      const float* weight) {
    Pack<T, size> gradients;
    const std::int64_t hit_at = row.column - at;
    const int hit = hit_at >= 0 && hit_at < size ? static_cast<int>(hit_at) : size;
#pragma unroll
    for (int k = 0; k < size; ++k) {
        float gradient = row.total * exponential<T>((to_float(x.values[k]) - row.row_max) - row.log_sum);
        if constexpr (has_spread) {
            gradient -= weight == nullptr ? row.spread : row.spread * weight[at + k];
        }
        if (k == hit) {
            gradient -= row.hit;
        }
        gradients.values[k] = from_float<T>(gradient);
    }
    return gradients;
}

// Every thread writes where it has read before, and nowhere else, so that `gradient` may be the logits.
template <class T, bool has_spread>
__global__ void backward_kernel(Logits logits, Targets targets, BackwardFactors factors, const float* weight,
                                Gradient gradient) {
    constexpr int size = 16 / sizeof(T);
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const auto thread = static_cast<std::int64_t>(threadIdx.x);
    const auto threads = static_cast<std::int64_t>(blockDim.x);
    const std::int64_t classes = logits.classes;
    const T* x = static_cast<const T*>(logits.address) + row * logits.stride;
    T* out = static_cast<T*>(gradient.address) + row * gradient.stride;
    const RowFactors f{factors.row_max[row],
                       factors.log_sum[row],
                       factors.total[row],
                       factors.hit[row],
                       has_spread ? factors.spread[row] : 0.0f,
                       column_of(targets.address[row], targets.first_class, classes)};
    std::int64_t head = elements_before_alignment(x, classes);
    std::int64_t packs = (classes - head) / size;
    if (elements_before_alignment(out, classes) != head) {
        packs = 0;
    }
    for (std::int64_t i = thread; i < packs; i += in_flight * threads) {
        Pack<T, size> some[in_flight];
#pragma unroll
        for (int u = 0; u < in_flight; ++u) {
            if (i + u * threads < packs) {
                some[u] = load<size>(x + head + (i + u * threads) * size);
            }
        }
#pragma unroll
        for (int u = 0; u < in_flight; ++u) {
            const std::int64_t at = head + (i + u * threads) * size;
            if (i + u * threads < packs) {
                store(out + at, gradients_of<has_spread>(some[u], at, f, weight));
            }
        }
    }
    const std::int64_t ends = classes - packs * size;
    for (std::int64_t i = thread; i < ends; i += threads) {
        const std::int64_t at = packs == 0 || i < head ? i : i + packs * size;
        store(out + at, gradients_of<has_spread>(load<1>(x + at), at, f, weight));
    }
}

// To read only, many small blocks are best: while some combine their sums, others load.
constexpr unsigned forward_threads = 128;

unsigned backward_threads(std::int64_t classes) { return classes >= 16384 ? 512 : classes >= 2048 ? 256 : 128; }

unsigned blocks_for(const Logits& logits) {
    if (logits.rows > 0x7fffffff) {
        throw std::invalid_argument("cross entropy takes at most 2147483647 rows");
    }
    return static_cast<unsigned>(logits.rows);
}

template <class T>
void forward_of(const Logits& logits, const Targets& targets, const float* weight, const ForwardResult& result,
                const Where& where) {
    const OnDevice device(where, "cross_entropy_forward");
    auto* kernel = result.log_prob_sum == nullptr ? forward_kernel<T, false> : forward_kernel<T, true>;
    kernel<<<blocks_for(logits), forward_threads, 0, stream_of(where)>>>(logits, targets, weight, result);
    device.launched();
}

template <class T>
void backward_of(const Logits& logits, const Targets& targets, const BackwardFactors& factors, const float* weight,
                 const Gradient& gradient, const Where& where) {
    const OnDevice device(where, "cross_entropy_backward");
    auto* kernel = factors.spread == nullptr ? backward_kernel<T, false> : backward_kernel<T, true>;
    kernel<<<blocks_for(logits), backward_threads(logits.classes), 0, stream_of(where)>>>(logits, targets, factors,
                                                                                          weight, gradient);
    device.launched();
}

}  // namespace

void cross_entropy_forward(const Logits& logits, const Targets& targets, const float* weight,
                           const ForwardResult& result, const Where& where) {
    switch (logits.element) {
        case Element::float32: return forward_of<float>(logits, targets, weight, result, where);
        case Element::float16: return forward_of<Float16>(logits, targets, weight, result, where);
        case Element::bfloat16: return forward_of<BFloat16>(logits, targets, weight, result, where);
        case Element::float64: return;  // refused by the module
    }
}

void cross_entropy_backward(const Logits& logits, const Targets& targets, const BackwardFactors& factors,
                            const float* weight, const Gradient& gradient, const Where& where) {
    switch (logits.element) {
        case Element::float32: return backward_of<float>(logits, targets, factors, weight, gradient, where);
        case Element::float16: return backward_of<Float16>(logits, targets, factors, weight, gradient, where);
        case Element::bfloat16: return backward_of<BFloat16>(logits, targets, factors, weight, gradient, where);
        case Element::float64: return;  // refused by the module
    }
}

}  // namespace bmt
