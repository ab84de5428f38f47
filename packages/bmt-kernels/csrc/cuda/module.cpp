// The Python module bmt_kernels._cuda.
#include "cuda/where.h"

#include "common/bindings.h"
#include "cuda/architectures.h"

PYBIND11_MODULE(_cuda, module) {
    module.doc() =
        "Compiled kernels for CUDA, on raw addresses. Use bmt_kernels instead, which checks what it is given.";
    bmt::bind_operations(module);
    module.attr("ARCHITECTURES") = bmt::architectures();
}
