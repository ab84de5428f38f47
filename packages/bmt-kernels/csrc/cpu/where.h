#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace bmt {

// On the CPU: (number of threads).
class Where {
   public:
    explicit Where(const std::vector<std::int64_t>& numbers) {
        if (numbers.size() != 1) {
            throw std::invalid_argument("where must be (threads,)");
        }
        threads = static_cast<std::size_t>(std::max<std::int64_t>(1, numbers[0]));
    }

    std::size_t threads;
};

}  // namespace bmt
