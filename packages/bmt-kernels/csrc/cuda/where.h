#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace bmt {

// On a GPU: (index of the device, address of the stream).
class Where {
   public:
    explicit Where(const std::vector<std::int64_t>& numbers) {
        if (numbers.size() != 2) {
            throw std::invalid_argument("where must be (device, stream)");
        }
        device = static_cast<int>(numbers[0]);
        stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(numbers[1]));
    }

    int device;
    void* stream;
};

}  // namespace bmt
