// Casts of many tensors in one launch, whatever their types, rounded to nearest, ties to even.
#include "common/casts.h"

#include "common/operations.h"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/table.cuh"

namespace bmt {
namespace {

constexpr int cast_threads = 256;
constexpr std::size_t cast_chunk = 8192;
constexpr int width = 8;  // elements of one access: 16 bytes in half types, twice 16 in float32

using CastTable = Table<Cast, 512>;

template <int count, class From, class To>
__device__ void cast_at(const From* x, To* y) {
    const auto from = load<count>(x);
    Pack<To, count> to;
    for (int k = 0; k < count; ++k) {
        to.values[k] = from_float<To>(to_float(from.values[k]));
    }
    store(y, to);
}

template <class From, class To>
__device__ void cast_of(const From* x, To* y, std::int64_t count) {
    std::int64_t rest = 0;
    if (is_aligned(x, width * sizeof(From)) && is_aligned(y, width * sizeof(To))) {
        rest = count - count % width;
#pragma unroll 4
        for (std::int64_t i = static_cast<std::int64_t>(threadIdx.x) * width; i < rest; i += cast_threads * width) {
            cast_at<width>(x + i, y + i);
        }
    }
    for (std::int64_t i = rest + threadIdx.x; i < count; i += cast_threads) {
        cast_at<1>(x + i, y + i);
    }
}

template <class From>
__device__ void cast_from(const Cast& cast, std::size_t begin, std::int64_t count) {
    const From* x = static_cast<const From*>(cast.source) + begin;
    switch (cast.to) {
        case Element::float32: return cast_of(x, static_cast<float*>(cast.target) + begin, count);
        case Element::float16: return cast_of(x, static_cast<Float16*>(cast.target) + begin, count);
        case Element::bfloat16: return cast_of(x, static_cast<BFloat16*>(cast.target) + begin, count);
        case Element::float64: return;  // refused by the module
    }
}

__global__ void __launch_bounds__(cast_threads) cast_kernel(const __grid_constant__ CastTable table) {
    const int entry = table.entry_of(blockIdx.x);
    const Cast& cast = table.entries[entry];
    const std::size_t begin = (blockIdx.x - table.first_chunk[entry]) * cast_chunk;
    const std::size_t left = cast.numel - begin;
    const auto count = static_cast<std::int64_t>(left < cast_chunk ? left : cast_chunk);
    switch (cast.from) {
        case Element::float32: return cast_from<float>(cast, begin, count);
        case Element::float16: return cast_from<Float16>(cast, begin, count);
        case Element::bfloat16: return cast_from<BFloat16>(cast, begin, count);
        case Element::float64: return;  // refused by the module
    }
}

}  // namespace

void cast(const std::vector<Cast>& casts, const Where& where) {
    const OnDevice device(where, "cast");
    for_tables<CastTable>(
        casts, cast_chunk, [](const Cast& one) { return one; },
        [&](const CastTable& table, unsigned chunks) {
            cast_kernel<<<chunks, cast_threads, 0, stream_of(where)>>>(table);
            device.launched();
        });
}

}  // namespace bmt
