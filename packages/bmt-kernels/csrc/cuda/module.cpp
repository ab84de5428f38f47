// The Python module bmt_kernels._cuda.
#include "cuda/where.h"

#include "common/bindings.h"
#include "cuda/architectures.h"
#include "cuda/peer.h"

#include <pybind11/stl.h>

namespace bmt {
namespace {

void bind_peer_link(py::module_& module) {
    // A call waits if the stream's queue is full, perhaps until a thread of Python ends what the stream waits for.
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<PeerLink>(module, "PeerLink")
        .def(py::init<>())
        .def("shared",
             [](const PeerLink& link, std::uintptr_t address) {
                 const auto [handle, offset] = link.shared(address);
                 return py::make_tuple(py::bytes(handle), offset);
             })
        .def("opened", &PeerLink::opened)
        .def("close", &PeerLink::close)
        .def("mapped", &PeerLink::mapped)
        .def("unmap", &PeerLink::unmap)
        .def("copy", &PeerLink::copy, without_gil)
        .def("wait", &PeerLink::wait, without_gil)
        .def("write", &PeerLink::write, without_gil)
        .def("gather", &PeerLink::gather, without_gil);
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
