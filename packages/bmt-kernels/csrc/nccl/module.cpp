// The Python module bmt_kernels._nccl. What its functions promise stands in _nccl.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/engine.h"

namespace py = pybind11;

namespace bmt::nccl {
namespace {

// (address, bytes, peer)
using PartTuple = std::tuple<std::uintptr_t, std::size_t, int>;

void set_error(const std::string& message) {
    const py::object type = py::module_::import("bmt_kernels.nccl.errors").attr("NcclError");
    PyErr_SetString(type.ptr(), message.c_str());
}

// Runs in Python's main thread, between two of its instructions.
int raise_if_untold(void* argument) {
    const std::unique_ptr<std::weak_ptr<Core>> reference(static_cast<std::weak_ptr<Core>*>(argument));
    const auto core = reference->lock();
    const std::string message = core == nullptr ? std::string() : core->state.untold();
    if (message.empty()) {
        return 0;
    }
    try {
        set_error(message);
    } catch (py::error_already_set& error) {
        error.restore();
    }
    return -1;
}

std::shared_ptr<Engine> make_engine(const Library& library, const std::string& driver, int device, double timeout) {
    // The core holds the function, and the function must find the core.
    const auto reference = std::make_shared<std::weak_ptr<Core>>();
    const auto tell = [reference] {
        auto argument = std::make_unique<std::weak_ptr<Core>>(*reference);
        if (Py_AddPendingCall(raise_if_untold, argument.get()) == 0) {
            (void)argument.release();
        }
    };
    auto core = std::make_shared<Core>(library, driver, device, timeout, tell);
    *reference = core;
    return Engine::made(std::move(core));
}

UniqueId unique_id_of(const std::string& bytes) {
    UniqueId id{};
    if (bytes.size() != sizeof(id.bytes)) {
        throw std::invalid_argument("a unique id has 128 bytes, not " + std::to_string(bytes.size()));
    }
    std::memcpy(id.bytes, bytes.data(), sizeof(id.bytes));
    return id;
}

std::vector<Part> parts(const std::vector<PartTuple>& tuples) {
    std::vector<Part> result;
    result.reserve(tuples.size());
    for (const auto& [address, bytes, peer] : tuples) {
        result.push_back({address, bytes, peer});
    }
    return result;
}

std::shared_ptr<Communicator> make_communicator(Engine& engine, const py::bytes& id, const std::vector<int>& ranks,
                                                int rank) {
    const UniqueId unique_id = unique_id_of(id);
    if (rank < 0 || static_cast<std::size_t>(rank) >= ranks.size()) {
        throw std::invalid_argument("member " + std::to_string(rank) + " of " + std::to_string(ranks.size()));
    }
    const py::gil_scoped_release without_gil;
    return engine.communicator(unique_id, ranks, rank);
}

std::optional<std::string> wait_for_failure(Engine& engine, double seconds) {
    engine.core->state.wait(Seconds(seconds));
    return engine.core->state.failed() ? std::optional(engine.core->state.message()) : std::nullopt;
}

void bind_communicator(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
        .def("all_gather", &Communicator::all_gather, without_gil)
        .def("reduce_scatter", &Communicator::reduce_scatter, without_gil)
        .def("all_reduce", &Communicator::all_reduce, without_gil)
        .def("broadcast", &Communicator::broadcast, without_gil)
        .def("all_to_all", &Communicator::all_to_all, without_gil)
        .def(
            "exchange",
            [](Communicator& self, const std::vector<PartTuple>& sends, const std::vector<PartTuple>& recvs,
               std::uintptr_t stream) { self.exchange(parts(sends), parts(recvs), stream); },
            without_gil);
}

void bind_engine(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::class_<Library>(module, "Library")
        .def(py::init<const std::string&, bool>(), py::arg("path"), py::arg("only_if_loaded") = false)
        .def_readonly("path", &Library::path)
        .def_readonly("version", &Library::version)
        .def("unique_id", [](const Library& self) {
            UniqueId id;
            {
                const py::gil_scoped_release released;
                id = self.unique_id();
            }
            return py::bytes(id.bytes, sizeof(id.bytes));
        });
    py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
        .def(py::init(&make_engine), py::arg("library"), py::arg("driver"), py::arg("device"), py::arg("timeout"))
        .def("communicator", make_communicator)
        .def(
            "fail", [](Engine& self, const std::string& message) { self.core->state.fail(message); }, without_gil)
        .def(
            "check", [](Engine& self) { self.core->state.check(); }, without_gil)
        .def("wait_for_failure", wait_for_failure, without_gil)
        .def_property_readonly("is_closed", [](const Engine& self) { return self.core->state.closed(); })
        .def("close", [](Engine& self, double patience) { return self.close(Seconds(patience)); }, without_gil);
}

}  // namespace
}  // namespace bmt::nccl

PYBIND11_MODULE(_nccl, module) {
    module.doc() =
        "NCCL on raw addresses. Use the communication backend nccl-native instead, which checks what it is given.";
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) {
                std::rethrow_exception(thrown);
            }
        } catch (const bmt::nccl::Failed& error) {
            bmt::nccl::set_error(error.what());
        } catch (const bmt::nccl::CannotOpen& error) {
            PyErr_SetString(PyExc_OSError, error.what());
        }
    });
    bmt::nccl::bind_engine(module);
    bmt::nccl::bind_communicator(module);
}
