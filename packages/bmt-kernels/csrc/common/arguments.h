// What Python passes: lists of addresses, and how they become rows.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/adam.h"
#include "common/casts.h"
#include "common/element.h"
#include "common/overlap.h"
#include "common/tensor.h"

namespace bmt {

namespace py = pybind11;

using Addresses = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Lists that run in parallel come from one loop in Python: other lengths are our own mistake, and must not become memory
// errors.
inline void check_lengths(std::size_t expected, std::initializer_list<std::size_t> lengths) {
    for (const std::size_t length : lengths) {
        if (length != expected) {
            throw std::invalid_argument("lists of different lengths: " + std::to_string(length) + " and " +
                                        std::to_string(expected));
        }
    }
}

inline Element checked_element(int element) {
    if (element < 0 || element > static_cast<int>(Element::bfloat16)) {
        throw std::invalid_argument("no element type has number " + std::to_string(element));
    }
    return static_cast<Element>(element);
}

inline std::vector<AdamRow> adam_rows(Form form, Element grad, const Addresses& params, const Addresses& grads,
                                      const Addresses& exp_avgs, const Addresses& exp_avg_sqs, const Addresses& masters,
                                      const Sizes& numels) {
    check_lengths(numels.size(), {params.size(), grads.size(), exp_avgs.size(), exp_avg_sqs.size(), masters.size()});
    if (grad == Element::float64 || form < Form::plain || form > Form::remainder) {
        throw std::invalid_argument("adam_step has no kernel for this form of weight and gradient");
    }
    const std::size_t param_bytes = form == Form::plain ? 4 : 2;
    const std::size_t master_bytes = form == Form::remainder ? 2 : 4;
    MemoryUse memory;
    std::vector<AdamRow> rows;
    for (std::size_t i = 0; i < numels.size(); ++i) {
        if (form != Form::plain && masters[i] == 0 && numels[i] != 0) {
            throw std::invalid_argument("adam_step: masters[" + std::to_string(i) + "] is missing");
        }
        memory.add("params", i, params[i], numels[i] * param_bytes, true);
        memory.add("grads", i, grads[i], numels[i] * size_of(grad), false);
        memory.add("exp_avgs", i, exp_avgs[i], numels[i] * 4, true);
        memory.add("exp_avg_sqs", i, exp_avg_sqs[i], numels[i] * 4, true);
        memory.add("masters", i, masters[i], numels[i] * master_bytes, true);
        if (numels[i] != 0) {
            rows.push_back({pointer<void>(params[i]), pointer<const void>(grads[i]), pointer<float>(exp_avgs[i]),
                            pointer<float>(exp_avg_sqs[i]), pointer<void>(masters[i]), numels[i]});
        }
    }
    memory.check("adam_step");
    return rows;
}

// `weights` may be empty.
inline std::vector<Tensor> tensors(const Addresses& addresses, const Sizes& numels, const std::vector<int>& elements,
                                   const std::vector<double>& weights) {
    check_lengths(numels.size(), {addresses.size(), elements.size(), weights.empty() ? numels.size() : weights.size()});
    std::vector<Tensor> found;
    for (std::size_t i = 0; i < numels.size(); ++i) {
        const Element element = checked_element(elements[i]);
        if (numels[i] != 0) {
            found.push_back({pointer<void>(addresses[i]), numels[i], element, weights.empty() ? 1.0 : weights[i]});
        }
    }
    return found;
}

inline std::vector<Cast> casts(const Addresses& sources, const std::vector<int>& from, const Addresses& targets,
                               const std::vector<int>& to, const Sizes& numels) {
    check_lengths(numels.size(), {sources.size(), from.size(), targets.size(), to.size()});
    MemoryUse memory;
    std::vector<Cast> found;
    for (std::size_t i = 0; i < numels.size(); ++i) {
        const Cast one{pointer<const void>(sources[i]), pointer<void>(targets[i]), numels[i], checked_element(from[i]),
                       checked_element(to[i])};
        if (one.from == Element::float64 || one.to == Element::float64) {
            throw std::invalid_argument("cast has no kernel for float64");
        }
        memory.add("sources", i, sources[i], one.numel * size_of(one.from), false);
        memory.add("targets", i, targets[i], one.numel * size_of(one.to), true);
        if (one.numel != 0) {
            found.push_back(one);
        }
    }
    memory.check("cast");
    return found;
}

// Tensors that are written must not share memory with each other, nor with the one number that says how.
inline void check_written(const char* operation, const std::vector<Tensor>& written, const char* number,
                          std::uintptr_t number_at, std::size_t number_bytes) {
    MemoryUse memory;
    for (std::size_t i = 0; i < written.size(); ++i) {
        memory.add("tensors", i, reinterpret_cast<std::uintptr_t>(written[i].address),
                   written[i].numel * size_of(written[i].element), true);
    }
    memory.add(number, 0, number_at, number_bytes, false);
    memory.check(operation);
}

// The class AdamSettings of either module; see adam.h.
inline void bind_adam_settings(py::module_& module) {
    py::class_<AdamSettings>(module, "AdamSettings", py::module_local())
        .def(py::init([](double mean_weight, double beta2, double square_weight, double root_correction, double eps,
                         double step_size, double decay, int decay_kind, bool hold, double scale,
                         std::uintptr_t scale_at, std::uintptr_t clip_at, std::uintptr_t skip_at, bool skip_is_float) {
                 if (decay_kind < 0 || decay_kind > 2) {
                     throw std::invalid_argument("decay_kind must be 0, 1 or 2, not " + std::to_string(decay_kind));
                 }
                 return AdamSettings{static_cast<float>(mean_weight),
                                     static_cast<float>(beta2),
                                     static_cast<float>(square_weight),
                                     static_cast<float>(root_correction),
                                     static_cast<float>(eps),
                                     static_cast<float>(step_size),
                                     static_cast<float>(decay),
                                     static_cast<Decay>(decay_kind),
                                     hold,
                                     static_cast<float>(scale),
                                     pointer<const float>(scale_at),
                                     pointer<const float>(clip_at),
                                     {pointer<const void>(skip_at), skip_is_float}};
             }),
             py::kw_only(), py::arg("mean_weight"), py::arg("beta2"), py::arg("square_weight"),
             py::arg("root_correction"), py::arg("eps"), py::arg("step_size"), py::arg("decay"), py::arg("decay_kind"),
             py::arg("hold"), py::arg("scale"), py::arg("scale_at"), py::arg("clip_at"), py::arg("skip_at"),
             py::arg("skip_is_float"));
}

}  // namespace bmt
