// The functions that both Python modules have. What they promise stands in _cpu.pyi and _cuda.pyi.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "common/arguments.h"
#include "common/operations.h"

namespace bmt {

using Numbers = std::vector<std::int64_t>;

inline void call_adam_step(int form_number, int grad_number, const Addresses& params, const Addresses& grads,
                           const Addresses& exp_avgs, const Addresses& exp_avg_sqs, const Addresses& masters,
                           const Sizes& numels, const AdamSettings& settings, const Numbers& where) {
    const auto form = static_cast<Form>(form_number);
    const Element grad = checked_element(grad_number);
    const auto rows = adam_rows(form, grad, params, grads, exp_avgs, exp_avg_sqs, masters, numels);
    if (!rows.empty()) {
        adam_step(form, grad, rows, settings, Where(where));
    }
}

inline void call_cast(const Addresses& sources, const std::vector<int>& from, const Addresses& targets,
                      const std::vector<int>& to, const Sizes& numels, const Numbers& where) {
    cast(casts(sources, from, targets, to, numels), Where(where));
}

inline void call_has_non_finite(const Addresses& addresses, const Sizes& numels, const std::vector<int>& elements,
                                std::uintptr_t flag, const Numbers& where) {
    has_non_finite(tensors(addresses, numels, elements, {}), pointer<std::uint8_t>(flag), Where(where));
}

inline void call_powers_sum(const Addresses& addresses, const Sizes& numels, const std::vector<int>& elements,
                            const std::vector<double>& weights, int kind, double p, std::uintptr_t result,
                            std::uintptr_t workspace, const Numbers& where) {
    if (kind < 0 || kind > static_cast<int>(Power::other)) {
        throw std::invalid_argument("no power has number " + std::to_string(kind));
    }
    powers_sum(tensors(addresses, numels, elements, weights), static_cast<Power>(kind), p, pointer<float>(result),
               pointer<double>(workspace), Where(where));
}

inline void call_scale(const Addresses& addresses, const Sizes& numels, const std::vector<int>& elements,
                       std::uintptr_t factor, const Numbers& where) {
    const auto written = tensors(addresses, numels, elements, {});
    check_written("scale_", written, "factor", factor, 4);
    scale(written, pointer<const float>(factor), Where(where));
}

inline void call_zero_if(const Addresses& addresses, const Sizes& numels, const std::vector<int>& elements,
                         std::uintptr_t flag, bool flag_is_float, const Numbers& where) {
    const auto written = tensors(addresses, numels, elements, {});
    check_written("zero_if_", written, "flag", flag, flag_is_float ? 4 : 1);
    zero_if(written, {pointer<const void>(flag), flag_is_float}, Where(where));
}

inline Logits checked_logits(std::uintptr_t address, int element, const std::vector<std::int64_t>& sizes) {
    if (sizes.size() != 3 || sizes[0] < 0 || sizes[1] < 1 || checked_element(element) == Element::float64) {
        throw std::invalid_argument("cross entropy has no kernel for these logits");
    }
    return {pointer<const void>(address), static_cast<Element>(element), sizes[0], sizes[1], sizes[2]};
}

// `logits` is (rows, classes, stride), `results` are the addresses of row_max, log_sum, target_log_prob, log_prob_sum.
inline void call_cross_entropy_forward(std::uintptr_t address, int element, const std::vector<std::int64_t>& sizes,
                                       std::uintptr_t target, std::int64_t first_class, std::uintptr_t weight,
                                       const Addresses& results, const Numbers& where) {
    check_lengths(4, {results.size()});
    cross_entropy_forward(checked_logits(address, element, sizes), {pointer<const std::int64_t>(target), first_class},
                          pointer<const float>(weight),
                          {pointer<float>(results[0]), pointer<float>(results[1]), pointer<float>(results[2]),
                           pointer<float>(results[3])},
                          Where(where));
}

// The gradient may take the place of the logits, row for row, and may share memory with nothing else.
inline void check_gradient(const Logits& logits, std::uintptr_t target, std::uintptr_t weight, const Addresses& factors,
                           std::uintptr_t gradient, std::int64_t gradient_stride) {
    if (logits.rows > 1 && (gradient_stride < logits.classes || logits.stride < 0)) {
        throw std::invalid_argument("cross_entropy_backward: rows of the gradient overlap");
    }
    const auto reach = [&](std::int64_t stride) {
        const std::int64_t elements = logits.rows == 0 ? 0 : (logits.rows - 1) * stride + logits.classes;
        return static_cast<std::size_t>(elements) * size_of(logits.element);
    };
    const auto rows = static_cast<std::size_t>(logits.rows);
    const auto address = reinterpret_cast<std::uintptr_t>(logits.address);
    MemoryUse memory;
    memory.add("gradient", 0, gradient, reach(gradient_stride), true);
    if (address != gradient || logits.stride != gradient_stride) {
        memory.add("logits", 0, address, reach(logits.stride), false);
    }
    memory.add("target", 0, target, rows * 8, false);
    memory.add("weight", 0, weight, static_cast<std::size_t>(logits.classes) * 4, false);
    for (std::size_t i = 0; i < factors.size(); ++i) {
        constexpr const char* names[] = {"row_max", "log_sum", "total", "hit", "spread"};
        memory.add(names[i], 0, factors[i], rows * 4, false);
    }
    memory.check("cross_entropy_backward");
}

// `factors` are the addresses of row_max, log_sum, total, hit and spread.
inline void call_cross_entropy_backward(std::uintptr_t address, int element, const std::vector<std::int64_t>& sizes,
                                        std::uintptr_t target, std::int64_t first_class, std::uintptr_t weight,
                                        const Addresses& factors, std::uintptr_t gradient, std::int64_t gradient_stride,
                                        const Numbers& where) {
    check_lengths(5, {factors.size()});
    const Logits logits = checked_logits(address, element, sizes);
    check_gradient(logits, target, weight, factors, gradient, gradient_stride);
    cross_entropy_backward(
        logits, {pointer<const std::int64_t>(target), first_class},
        {pointer<const float>(factors[0]), pointer<const float>(factors[1]), pointer<const float>(factors[2]),
         pointer<const float>(factors[3]), pointer<const float>(factors[4])},
        pointer<const float>(weight), {pointer<void>(gradient), gradient_stride}, Where(where));
}

inline void bind_operations(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> without_gil;
    bind_adam_settings(module);
    module.attr("POWERS_SUM_WORKSPACE") = powers_sum_workspace;
    module.def("adam_step", call_adam_step, without_gil);
    module.def("cast", call_cast, without_gil);
    module.def("has_non_finite", call_has_non_finite, without_gil);
    module.def("powers_sum", call_powers_sum, without_gil);
    module.def("scale_", call_scale, without_gil);
    module.def("zero_if_", call_zero_if, without_gil);
    module.def("cross_entropy_forward", call_cross_entropy_forward, without_gil);
    module.def("cross_entropy_backward", call_cross_entropy_backward, without_gil);
}

}  // namespace bmt
