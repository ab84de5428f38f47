#include "cuda/peer.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace bmt {
namespace {

// CU_STREAM_WAIT_VALUE_GEQ: as signed numbers, so that a counter may begin again at 0.
constexpr unsigned int at_least = 0;
constexpr unsigned int after_what_was_written = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        (void)cudaGetLastError();  // or the next kernel would be told of it
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
    }
}

void check_driver(int status, const char* what) {
    if (status != 0) {
        throw std::runtime_error(std::string(what) + ": the CUDA driver reports error " + std::to_string(status));
    }
}

cudaStream_t stream_at(std::uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }
void* memory_at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

template <class Function>
void find(void* driver, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(driver, name));
    if (function == nullptr) {
        throw std::runtime_error(std::string("the CUDA driver has no function ") + name);
    }
}

}  // namespace

PeerLink::PeerLink() {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == nullptr) {
        throw std::runtime_error(dlerror());
    }
    find(driver, "cuStreamWaitValue32_v2", wait_value_);
    find(driver, "cuStreamWriteValue32_v2", write_value_);
    find(driver, "cuMemGetAddressRange_v2", address_range_);
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}

PeerLink::~PeerLink() { (void)cudaEventDestroy(event_); }

std::pair<std::string, std::size_t> PeerLink::shared(std::uintptr_t address) const {
    unsigned long long start = 0;
    check_driver(address_range_(&start, nullptr, address), "cuMemGetAddressRange");
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, memory_at(address)), "cudaIpcGetMemHandle");
    return {std::string(handle.reserved, sizeof(handle.reserved)), address - start};
}

std::uintptr_t PeerLink::opened(const std::string& text) const {
    cudaIpcMemHandle_t handle;
    if (text.size() != sizeof(handle.reserved)) {
        throw std::invalid_argument("a handle of shared memory has " + std::to_string(sizeof(handle.reserved)) +
                                    " bytes");
    }
    std::memcpy(handle.reserved, text.data(), text.size());
    void* address = nullptr;
    check(cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return reinterpret_cast<std::uintptr_t>(address);
}

void PeerLink::close(std::uintptr_t address) const {
    check(cudaIpcCloseMemHandle(memory_at(address)), "cudaIpcCloseMemHandle");
}

std::uintptr_t PeerLink::mapped(std::uintptr_t address, std::size_t bytes) const {
    check(cudaHostRegister(memory_at(address), bytes, cudaHostRegisterMapped), "cudaHostRegister");
    void* found = nullptr;
    check(cudaHostGetDevicePointer(&found, memory_at(address), 0), "cudaHostGetDevicePointer");
    return reinterpret_cast<std::uintptr_t>(found);
}

void PeerLink::unmap(std::uintptr_t address) const {
    check(cudaHostUnregister(memory_at(address)), "cudaHostUnregister");
}

void PeerLink::copy(std::uintptr_t source, std::size_t bytes, std::uintptr_t target, std::uintptr_t free,
                    std::uint32_t free_value, std::uintptr_t full, std::uint32_t full_value, std::uintptr_t after,
                    std::uintptr_t stream) const {
    order(after, stream);
    wait(free, free_value, stream);
    check(cudaMemcpyAsync(memory_at(target), memory_at(source), bytes, cudaMemcpyDeviceToDevice, stream_at(stream)),
          "cudaMemcpyAsync");
    check_driver(write_value_(stream_at(stream), full, full_value, after_what_was_written), "cuStreamWriteValue32");
}

void PeerLink::wait(std::uintptr_t flag, std::uint32_t value, std::uintptr_t stream) const {
    check_driver(wait_value_(stream_at(stream), flag, value, at_least), "cuStreamWaitValue32");
}

void PeerLink::write(std::uintptr_t flag, std::uint32_t value, std::uintptr_t after, std::uintptr_t stream) const {
    order(after, stream);
    check_driver(write_value_(stream_at(stream), flag, value, after_what_was_written), "cuStreamWriteValue32");
}

void PeerLink::order(std::uintptr_t after, std::uintptr_t stream) const {
    if (after == stream) {
        return;
    }
    check(cudaEventRecord(event_, stream_at(after)), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream_at(stream), event_, 0), "cudaStreamWaitEvent");
}

}  // namespace bmt
