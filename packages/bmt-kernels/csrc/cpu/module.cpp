// The Python module bmt_kernels._cpu.
#include <string>

#include "cpu/where.h"

#include "common/bindings.h"
#include "cpu/processor.h"
#include "cpu/square_root.h"

PYBIND11_MODULE(_cpu, module) {
    namespace py = pybind11;
    module.doc() =
        "Compiled kernels for the CPU, on raw addresses. Use bmt_kernels instead, which checks what it is given.";
    bmt::bind_operations(module);
#ifdef BMT_WITHOUT_CUDA
    module.attr("WITHOUT_CUDA") = BMT_WITHOUT_CUDA;
#else
    module.attr("WITHOUT_CUDA") = py::none();
#endif
    module.def("instruction_set", [] { return std::string(bmt::kernels().name); });
    module.def("instruction_sets", bmt::usable_instruction_sets);
    module.def("use_instruction_set", bmt::use_instruction_set, py::arg("name"));
    module.def("use_mkl_square_root", bmt::use_mkl_square_root, py::arg("vms_sqrt"));
}
