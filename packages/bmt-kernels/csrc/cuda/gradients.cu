// What is done to all gradients of a step at once, whatever their dtypes, in one launch.
#include "common/operations.h"
#include "cuda/flag.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/reduce.cuh"
#include "cuda/table.cuh"

namespace bmt {
namespace {

constexpr int threads = 256;
constexpr std::size_t chunk = 16384;
constexpr int sum_blocks = 768;  // about as many as run at once

using TensorTable = Table<Tensor, 512>;

const auto as_it_is = [](const Tensor& tensor) { return tensor; };

// The part of a tensor that a block works on.
struct Part {
    const Tensor* tensor;
    std::size_t begin;
    std::int64_t count;

    template <class T>
    __device__ T* start() const {
        return static_cast<T*>(tensor->address) + begin;
    }
};

__device__ Part part_of(const TensorTable& table, std::uint32_t index) {
    const int entry = table.entry_of(index);
    const Tensor* tensor = &table.entries[entry];
    const std::size_t begin = (index - table.first_chunk[entry]) * chunk;
    const std::size_t left = tensor->numel - begin;
    return {tensor, begin, static_cast<std::int64_t>(left < chunk ? left : chunk)};
}

// Calls work(T*, std::integral_constant<int, n>) for n neighbouring elements, 16 bytes where they are aligned and one where not,
// until all `count` elements have had their turn in one of the block's threads.
template <class T, class Work>
__device__ void for_packs(T* start, std::int64_t count, const Work& work) {
    constexpr int size = 16 / sizeof(T);
    const std::int64_t head = elements_before_alignment(start, count);
    const std::int64_t packs = (count - head) / size;
    const auto thread = static_cast<std::int64_t>(threadIdx.x);
    if (thread < head) {
        work(start + thread, std::integral_constant<int, 1>());
    }
#pragma unroll 8
    for (std::int64_t i = thread; i < packs; i += threads) {
        work(start + head + i * size, std::integral_constant<int, size>());
    }
    const std::int64_t tail = head + packs * size + thread;
    if (tail < count) {
        work(start + tail, std::integral_constant<int, 1>());
    }
}

// Calls work with the part as elements of its type.
template <class Work>
__device__ void in_type(const Part& part, const Work& work) {
    switch (part.tensor->element) {
        case Element::float32: return work(part.start<float>());
        case Element::float64: return work(part.start<double>());
        case Element::float16: return work(part.start<Float16>());
        case Element::bfloat16: return work(part.start<BFloat16>());
    }
}

// The exponent is all ones in infinities and NaN.
__device__ bool is_non_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u; }
__device__ bool is_non_finite(double x) { return (__double2hiint(x) & 0x7ff00000) == 0x7ff00000; }
__device__ bool is_non_finite(Float16 x) { return (x.bits & 0x7c00u) == 0x7c00u; }
__device__ bool is_non_finite(BFloat16 x) { return (x.bits & 0x7f80u) == 0x7f80u; }

__global__ void __launch_bounds__(threads)
    non_finite_kernel(const __grid_constant__ TensorTable table, std::uint8_t* flag) {
    const Part part = part_of(table, blockIdx.x);
    bool found = false;
    in_type(part, [&](auto* start) {
        for_packs(start, part.count, [&](const auto* at, auto size) {
            const auto pack = load<size.value>(at);
            for (int k = 0; k < size.value; ++k) {
                found |= is_non_finite(pack.values[k]);
            }
        });
    });
    // Blocks that write all write the same.
    if (__syncthreads_or(found) && threadIdx.x == 0) {
        *flag = 1;
    }
}

template <Power kind>
struct Sum {
    double value;
};

template <Power kind>
__device__ Sum<kind> combined(Sum<kind> a, Sum<kind> b) {
    if constexpr (kind == Power::largest) {
        return {max_or_nan(a.value, b.value)};
    } else {
        return {a.value + b.value};
    }
}

template <Power kind>
__device__ Sum<kind> shuffled_down(Sum<kind> sum, int offset) {
    return {__shfl_down_sync(0xffffffffu, sum.value, offset)};
}

template <Power kind, class Real>
__device__ Real with_power(Real sum, Real x, double p) {
    if constexpr (kind == Power::sum) {
        return sum + fabs(x);
    } else if constexpr (kind == Power::squares) {
        return sum + x * x;
    } else if constexpr (kind == Power::largest) {
        return max_or_nan(sum, static_cast<Real>(fabs(x)));
    } else {
        return sum + pow(fabs(x), static_cast<Real>(p));
    }
}

__device__ float to_real(float x) { return x; }
__device__ double to_real(double x) { return x; }
__device__ float to_real(Float16 x) { return to_float(x); }
__device__ float to_real(BFloat16 x) { return to_float(x); }

// Block b sums the chunks b, b + sum_blocks, ... into partial[b]. A thread's elements of a chunk are summed in float32, all else
// in float64, always in the same order.
template <Power kind>
__global__ void __launch_bounds__(threads) partial_sums_kernel(const __grid_constant__ TensorTable table, double p,
                                                               std::uint32_t chunks, bool is_first, double* partial) {
    Sum<kind> total{0};
    for (std::uint32_t index = blockIdx.x; index < chunks; index += sum_blocks) {
        const Part part = part_of(table, index);
        double of_part = 0;
        in_type(part, [&](auto* start) {
            decltype(to_real(*start)) sum = 0;
            for_packs(start, part.count, [&](const auto* at, auto size) {
                // A sum of its own for each pack: the next one need not wait for this one's.
                const auto pack = load<size.value>(at);
                decltype(sum) of_pack = 0;
                for (int k = 0; k < size.value; ++k) {
                    of_pack = with_power<kind>(of_pack, to_real(pack.values[k]), p);
                }
                sum = kind == Power::largest ? max_or_nan(sum, of_pack) : sum + of_pack;
            });
            of_part = sum;
        });
        total = combined(total, Sum<kind>{kind == Power::largest ? of_part : of_part * part.tensor->weight});
    }
    total = block_combined(total, Sum<kind>{0});
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = is_first ? total.value : combined(total, Sum<kind>{partial[blockIdx.x]}).value;
    }
}

template <Power kind>
__global__ void __launch_bounds__(sum_blocks) total_kernel(const double* partial, float* result) {
    const Sum<kind> total = block_combined(Sum<kind>{partial[threadIdx.x]}, Sum<kind>{0});
    if (threadIdx.x == 0) {
        *result = static_cast<float>(total.value);
    }
}

template <Power kind>
void powers_sum_of(const std::vector<Tensor>& tensors, double p, float* result, double* workspace, const Where& where) {
    const OnDevice device(where, "powers_sum");
    bool is_first = true;
    for_tables<TensorTable>(tensors, chunk, as_it_is, [&](const TensorTable& table, unsigned chunks) {
        partial_sums_kernel<kind><<<sum_blocks, threads, 0, stream_of(where)>>>(table, p, chunks, is_first, workspace);
        device.launched();
        is_first = false;
    });
    if (is_first) {
        check(cudaMemsetAsync(result, 0, sizeof(float), stream_of(where)), "powers_sum");
        return;
    }
    total_kernel<kind><<<1, sum_blocks, 0, stream_of(where)>>>(workspace, result);
    device.launched();
}

__device__ float scaled(float x, float factor) { return x * factor; }
__device__ double scaled(double x, float factor) { return x * static_cast<double>(factor); }
__device__ Float16 scaled(Float16 x, float factor) { return from_float<Float16>(to_float(x) * factor); }
__device__ BFloat16 scaled(BFloat16 x, float factor) { return from_float<BFloat16>(to_float(x) * factor); }

__global__ void __launch_bounds__(threads)
    scale_kernel(const __grid_constant__ TensorTable table, const float* factor_at) {
    const Part part = part_of(table, blockIdx.x);
    const float factor = *factor_at;
    in_type(part, [&](auto* start) {
        for_packs(start, part.count, [&](auto* at, auto size) {
            auto pack = load<size.value>(at);
            for (int k = 0; k < size.value; ++k) {
                pack.values[k] = scaled(pack.values[k], factor);
            }
            store(at, pack);
        });
    });
}

__global__ void __launch_bounds__(threads)
    zero_kernel(const __grid_constant__ TensorTable table, const __grid_constant__ Flag flag) {
    if (!is_set(flag)) {
        return;
    }
    const Part part = part_of(table, blockIdx.x);
    in_type(part, [&](auto* start) {
        for_packs(start, part.count, [&](auto* at, auto size) {
            using Element = std::remove_reference_t<decltype(*at)>;
            store(at, Pack<Element, size.value>{});
        });
    });
}

}  // namespace

const std::size_t powers_sum_workspace = sum_blocks;

void has_non_finite(const std::vector<Tensor>& tensors, std::uint8_t* flag, const Where& where) {
    const OnDevice device(where, "has_non_finite");
    for_tables<TensorTable>(tensors, chunk, as_it_is, [&](const TensorTable& table, unsigned chunks) {
        non_finite_kernel<<<chunks, threads, 0, stream_of(where)>>>(table, flag);
        device.launched();
    });
}

void powers_sum(const std::vector<Tensor>& tensors, Power kind, double p, float* result, double* workspace,
                const Where& where) {
    switch (kind) {
        case Power::sum: return powers_sum_of<Power::sum>(tensors, p, result, workspace, where);
        case Power::squares: return powers_sum_of<Power::squares>(tensors, p, result, workspace, where);
        case Power::largest: return powers_sum_of<Power::largest>(tensors, p, result, workspace, where);
        case Power::other: return powers_sum_of<Power::other>(tensors, p, result, workspace, where);
    }
}

void scale(const std::vector<Tensor>& tensors, const float* factor, const Where& where) {
    const OnDevice device(where, "scale_");
    for_tables<TensorTable>(tensors, chunk, as_it_is, [&](const TensorTable& table, unsigned chunks) {
        scale_kernel<<<chunks, threads, 0, stream_of(where)>>>(table, factor);
        device.launched();
    });
}

void zero_if(const std::vector<Tensor>& tensors, const Flag& flag, const Where& where) {
    const OnDevice device(where, "zero_if_");
    for_tables<TensorTable>(tensors, chunk, as_it_is, [&](const TensorTable& table, unsigned chunks) {
        zero_kernel<<<chunks, threads, 0, stream_of(where)>>>(table, flag);
        device.launched();
    });
}

}  // namespace bmt
