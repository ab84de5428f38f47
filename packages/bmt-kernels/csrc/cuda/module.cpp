// The Python module bmt_kernels._cuda.
#include "cuda/where.h"

#include "common/bindings.h"
#include "cuda/architectures.h"
#include "cuda/peer.h"

#include <pybind11/stl.h>

namespace bmt {
namespace {

void bind_peer_link(py::module_& module) {
    // A call may wait for the device, and the device until a thread of Python ends what its streams wait for.
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<PeerLink>(module, "PeerLink")
        .def(py::init<>())
        .def("shared",
             [](const PeerLink& link, std::uintptr_t address) {
                 std::pair<std::string, std::size_t> shared;
                 {
                     const py::gil_scoped_release released;
                     shared = link.shared(address);
                 }
                 const auto& [handle, offset] = shared;
                 return py::make_tuple(py::bytes(handle), offset);
             })
        .def("opened", &PeerLink::opened, without_gil)
        .def("close", &PeerLink::close, without_gil)
        .def("mapped", &PeerLink::mapped, without_gil)
        .def("unmap", &PeerLink::unmap, without_gil)
        .def("copy", &PeerLink::copy, without_gil)
        .def("wait", &PeerLink::wait, without_gil)
        .def("write", &PeerLink::write, without_gil);
}

}  // namespace
}  // namespace bmt

PYBIND11_MODULE(_cuda, module) {
    module.doc() =
        "Compiled kernels for CUDA, on raw addresses. Use bmt_kernels instead, which checks what it is given.";
    bmt::bind_operations(module);
    bmt::bind_peer_link(module);
    module.attr("ARCHITECTURES") = bmt::architectures();
}
