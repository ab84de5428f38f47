// Launching on the device and stream that the caller names, and saying what went wrong.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/where.h"

namespace bmt {

inline void check(cudaError_t status, const char* operation) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(operation) + ": " + cudaGetErrorName(status) + ", " +
                                 cudaGetErrorString(status));
    }
}

// Makes a device the current one for as long as it lives.
class OnDevice {
   public:
    OnDevice(const Where& where, const char* operation) : operation_(operation), device_(where.device) {
        check(cudaGetDevice(&before_), operation);
        if (before_ != device_) {
            check(cudaSetDevice(device_), operation);
        }
    }

    ~OnDevice() {
        if (before_ != device_) {
            cudaSetDevice(before_);
        }
    }

    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    // After each launch: throws what the launch itself met. What a kernel meets while it runs, torch reports later.
    void launched() const { check(cudaGetLastError(), operation_); }

   private:
    const char* operation_;
    int device_;
    int before_ = 0;
};

inline cudaStream_t stream_of(const Where& where) { return static_cast<cudaStream_t>(where.stream); }

}  // namespace bmt
