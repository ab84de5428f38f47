// What one Adam step needs to know, the same on every device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bmt {

// Addresses of one parameter and its state. `master` is float32 or the 16-bit remainder, null in the plain form.
struct AdamRow {
    void* param;
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    void* master;
    std::size_t numel;
};

enum class Decay : int { none = 0, coupled = 1, decoupled = 2 };

// A flag in memory of the device: one byte, or one float32. Null: not set.
struct Flag {
    const void* address;
    bool is_float;
};

// Numbers are rounded to float32 where torch rounds its scalars: after they were combined in double precision.
struct AdamSettings {
    float mean_weight;  // 1 - beta1
    float beta2;
    float square_weight;    // 1 - beta2
    float root_correction;  // sqrt(1 - beta2**t)
    float eps;
    float step_size;  // -lr / (1 - beta1**t)
    float decay;      // coupled: weight_decay; decoupled: 1 - lr * weight_decay
    Decay decay_kind;
    bool hold;
    float scale;            // gradients are divided by it, unless it is 1
    const float* scale_at;  // if not null, instead of `scale`
    const float* clip_at;   // if not null, gradients are multiplied by what is there
    Flag skip;
};

}  // namespace bmt
