// Shared libraries opened at run time: NCCL, and the CUDA driver.
#pragma once

#include <stdexcept>
#include <string>

#include "nccl/abi.h"

namespace bmt::nccl {

// There is no such library, or it cannot be loaded.
class CannotOpen : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// NCCL, once its version is one whose interface is known; never closed, as its threads may outlive every communicator.
class Library {
   public:
    // With `only_if_loaded`, the copy that the process has loaded already, under this name. Throws CannotOpen, or
    // std::runtime_error if it is none that can be used.
    Library(const std::string& path, bool only_if_loaded);

    UniqueId unique_id() const;
    std::string describe(Result result, Comm comm) const;

    Api api{};
    int version = 0;
    std::string path;  // of the file that was found
};

// The driver, and the context that PyTorch uses on one device.
class Device {
   public:
    Device(const std::string& driver_path, int index);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    void check(int status, const char* what) const;
    std::string name_of(int status) const;

    Driver driver{};
    Context context = nullptr;

   private:
    int device_ = 0;
};

// While it lives, the calling thread works on the device.
class Current {
   public:
    explicit Current(const Device& device) : device_(device) {
        device.check(device.driver.context_push(device.context), "cuCtxPushCurrent");
    }
    ~Current() {
        Context popped = nullptr;
        device_.driver.context_pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
};

}  // namespace bmt::nccl
