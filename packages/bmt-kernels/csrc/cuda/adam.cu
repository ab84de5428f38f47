// Adam over many tensors in one launch. The order of operations, and what is rounded once and what twice, is that of
// torch.optim.Adam on CUDA: _foreach_lerp_, _foreach_mul_, _foreach_addcmul_, _foreach_sqrt, _foreach_div_, _foreach_add_,
// _foreach_addcdiv_. Intrinsics say so for each operation, whatever the compiler is allowed to contract.
#include "common/operations.h"
#include "cuda/flag.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/table.cuh"

namespace bmt {
namespace {

constexpr int adam_threads = 256;
constexpr int width = 4;  // elements of one access: 16 bytes in float32
constexpr std::size_t adam_chunk = 8192;

using AdamTable = Table<AdamRow, 256>;

template <Form form>
struct ParamOf {
    using Type = BFloat16;
};
template <>
struct ParamOf<Form::plain> {
    using Type = float;
};
template <>
struct ParamOf<Form::master_float16> {
    using Type = Float16;
};

// See [Note: weight forms].
__device__ float joined(BFloat16 param, std::uint16_t remainder) {
    const std::uint32_t upper = static_cast<std::uint32_t>(param.bits) << 16;
    const float sum = __uint_as_float(upper + static_cast<std::uint32_t>(static_cast<std::int16_t>(remainder)));
    return isnan(sum) ? __uint_as_float(upper) : sum;
}

__device__ void split(float weight, BFloat16* param, std::uint16_t* remainder) {
    const std::uint32_t bits = isnan(weight) ? 0x7fc00000u : __float_as_uint(weight);
    param->bits = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    *remainder = static_cast<std::uint16_t>(bits);
}

template <Form form, int count>
__device__ void load_weights(const AdamRow& row, std::size_t i, float (&weights)[count]) {
    using Param = typename ParamOf<form>::Type;
    if constexpr (form == Form::remainder) {
        const auto params = load<count>(static_cast<const Param*>(row.param) + i);
        const auto remainders = load<count>(static_cast<const std::uint16_t*>(row.master) + i);
        for (int k = 0; k < count; ++k) {
            weights[k] = joined(params.values[k], remainders.values[k]);
        }
    } else {
        const void* at = form == Form::plain ? row.param : row.master;
        const auto pack = load<count>(static_cast<const float*>(at) + i);
        for (int k = 0; k < count; ++k) {
            weights[k] = pack.values[k];
        }
    }
}

template <Form form, int count>
__device__ void store_weights(const AdamRow& row, std::size_t i, const float (&weights)[count]) {
    using Param = typename ParamOf<form>::Type;
    Pack<Param, count> params;
    if constexpr (form == Form::remainder) {
        Pack<std::uint16_t, count> remainders;
        for (int k = 0; k < count; ++k) {
            split(weights[k], &params.values[k], &remainders.values[k]);
        }
        store(static_cast<std::uint16_t*>(row.master) + i, remainders);
    } else {
        Pack<float, count> pack;
        for (int k = 0; k < count; ++k) {
            pack.values[k] = weights[k];
            params.values[k] = from_float<Param>(weights[k]);
        }
        if constexpr (form != Form::plain) {
            store(static_cast<float*>(row.master) + i, pack);
        }
    }
    store(static_cast<Param*>(row.param) + i, params);
}

__device__ void move_moments(float grad, float weight, const AdamSettings& s, float scale, float clip, float* mean,
                             float* square) {
    if (s.clip_at != nullptr) {
        grad = __fmul_rn(grad, clip);
    }
    if (scale != 1.0f) {
        grad = __fdiv_rn(grad, scale);
    }
    if (s.decay_kind == Decay::coupled) {
        grad = __fmaf_rn(s.decay, weight, grad);
    }
    // torch.lerp starts from the nearer end.
    const float difference = __fsub_rn(grad, *mean);
    *mean = s.mean_weight < 0.5f ? __fmaf_rn(s.mean_weight, difference, *mean)
                                 : __fmaf_rn(s.mean_weight - 1.0f, difference, grad);
    *square = __fmaf_rn(s.square_weight, __fmul_rn(grad, grad), __fmul_rn(*square, s.beta2));
}

__device__ float moved_weight(float weight, float mean, float square, const AdamSettings& s) {
    if (s.decay_kind == Decay::decoupled) {
        weight = __fmul_rn(weight, s.decay);
    }
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(square), s.root_correction), s.eps);
    return __fmaf_rn(s.step_size, __fdiv_rn(mean, denominator), weight);
}

template <Form form, class Grad, int count>
__device__ void adam_at(const AdamRow& row, std::size_t i, const AdamSettings& s, float scale, float clip) {
    const auto grads = load<count>(static_cast<const Grad*>(row.grad) + i);
    auto means = load<count>(row.exp_avg + i);
    auto squares = load<count>(row.exp_avg_sq + i);
    float weights[count];
    load_weights<form>(row, i, weights);
    for (int k = 0; k < count; ++k) {
        move_moments(to_float(grads.values[k]), weights[k], s, scale, clip, &means.values[k], &squares.values[k]);
    }
    store(row.exp_avg + i, means);
    store(row.exp_avg_sq + i, squares);
    if (s.hold) {
        return;
    }
    for (int k = 0; k < count; ++k) {
        weights[k] = moved_weight(weights[k], means.values[k], squares.values[k], s);
    }
    store_weights<form>(row, i, weights);
}

template <Form form, class Grad>
__device__ bool is_aligned_row(const AdamRow& row) {
    constexpr std::size_t master_bytes = form == Form::remainder ? 2 : 4;
    return is_aligned(row.param, width * sizeof(typename ParamOf<form>::Type)) &&
           is_aligned(row.grad, width * sizeof(Grad)) && is_aligned(row.exp_avg, width * 4) &&
           is_aligned(row.exp_avg_sq, width * 4) &&
           (form == Form::plain || is_aligned(row.master, width * master_bytes));
}

// One block per chunk.
template <Form form, class Grad>
__global__ void __launch_bounds__(adam_threads)
    adam_kernel(const __grid_constant__ AdamTable table, const __grid_constant__ AdamSettings s) {
    if (is_set(s.skip)) {
        return;
    }
    const float scale = s.scale_at == nullptr ? s.scale : *s.scale_at;
    const float clip = s.clip_at == nullptr ? 1.0f : *s.clip_at;
    const int entry = table.entry_of(blockIdx.x);
    const AdamRow& row = table.entries[entry];
    const std::size_t begin = (blockIdx.x - table.first_chunk[entry]) * adam_chunk;
    const std::size_t end = begin + adam_chunk < row.numel ? begin + adam_chunk : row.numel;
    std::size_t rest = begin;
    if (is_aligned_row<form, Grad>(row)) {
        rest = end - (end - begin) % width;
        for (std::size_t i = begin + threadIdx.x * width; i < rest; i += adam_threads * width) {
            adam_at<form, Grad, width>(row, i, s, scale, clip);
        }
    }
    for (std::size_t i = rest + threadIdx.x; i < end; i += adam_threads) {
        adam_at<form, Grad, 1>(row, i, s, scale, clip);
    }
}

template <Form form, class Grad>
void adam_of(const std::vector<AdamRow>& rows, const AdamSettings& settings, const Where& where) {
    const OnDevice device(where, "adam_step");
    for_tables<AdamTable>(
        rows, adam_chunk, [](const AdamRow& row) { return row; },
        [&](const AdamTable& table, unsigned chunks) {
            adam_kernel<form, Grad><<<chunks, adam_threads, 0, stream_of(where)>>>(table, settings);
            device.launched();
        });
}

template <Form form>
void adam_in_form(Element grad, const std::vector<AdamRow>& rows, const AdamSettings& settings, const Where& where) {
    switch (grad) {
        case Element::float32: return adam_of<form, float>(rows, settings, where);
        case Element::float16: return adam_of<form, Float16>(rows, settings, where);
        case Element::bfloat16: return adam_of<form, BFloat16>(rows, settings, where);
        case Element::float64: return;  // refused by the module
    }
}

}  // namespace

void adam_step(Form form, Element grad, const std::vector<AdamRow>& rows, const AdamSettings& settings,
               const Where& where) {
    switch (form) {
        case Form::plain: return adam_in_form<Form::plain>(grad, rows, settings, where);
        case Form::master_float16: return adam_in_form<Form::master_float16>(grad, rows, settings, where);
        case Form::master_bfloat16: return adam_in_form<Form::master_bfloat16>(grad, rows, settings, where);
        case Form::remainder: return adam_in_form<Form::remainder>(grad, rows, settings, where);
    }
}

}  // namespace bmt
