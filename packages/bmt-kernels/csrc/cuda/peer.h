// Copies into the memory of other processes' devices on one host, and the flags that order them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace bmt {

// The device that is current when it is made, as one that others copy into and that copies into others. Copies are made by the copy
// engine, and flags are written and awaited by the streams themselves, so that nothing needs a multiprocessor.
class PeerLink {
   public:
    PeerLink();
    ~PeerLink();
    PeerLink(const PeerLink&) = delete;
    PeerLink& operator=(const PeerLink&) = delete;

    // What another process opens the allocation around `address` with, and where in the allocation that is.
    std::pair<std::string, std::size_t> shared(std::uintptr_t address) const;
    std::uintptr_t opened(const std::string& handle) const;
    void close(std::uintptr_t address) const;

    // Makes memory of the host known to the device, and returns where the device finds it.
    std::uintptr_t mapped(std::uintptr_t address, std::size_t bytes) const;
    void unmap(std::uintptr_t address) const;

    // On `stream`, after what `after` has been given: waits until `free` is at least `free_value`, copies, and writes `full`.
    void copy(std::uintptr_t source, std::size_t bytes, std::uintptr_t target, std::uintptr_t free,
              std::uint32_t free_value, std::uintptr_t full, std::uint32_t full_value, std::uintptr_t after,
              std::uintptr_t stream) const;
    void wait(std::uintptr_t flag, std::uint32_t value, std::uintptr_t stream) const;
    // On `stream`, after what `after` has been given: writes `flag`.
    void write(std::uintptr_t flag, std::uint32_t value, std::uintptr_t after, std::uintptr_t stream) const;

   private:
    using OnFlag = int(cudaStream_t, unsigned long long, std::uint32_t, unsigned int);
    using AddressRange = int(unsigned long long*, std::size_t*, unsigned long long);

    void order(std::uintptr_t after, std::uintptr_t stream) const;

    OnFlag* wait_value_ = nullptr;
    OnFlag* write_value_ = nullptr;
    AddressRange* address_range_ = nullptr;
    cudaEvent_t event_ = nullptr;
};

}  // namespace bmt
