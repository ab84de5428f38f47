// Refuses to write to memory that the same call reads or writes elsewhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace bmt {

// Collects the memory that a call uses; `check` throws std::invalid_argument (ValueError in Python) if anything that is
// written shares bytes with anything else.
class MemoryUse {
   public:
    void add(const char* list, std::size_t index, std::uintptr_t start, std::size_t bytes, bool is_written) {
        if (start != 0 && bytes != 0) {
            uses_.push_back({start, start + bytes, list, index, is_written});
        }
    }

    void check(const char* operation) {
        std::sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) { return a.start < b.start; });
        // The use that reaches furthest so far, among those written and among all.
        const Use* written = nullptr;
        const Use* any = nullptr;
        for (const Use& use : uses_) {
            const Use* before = use.is_written ? any : written;
            if (before != nullptr && use.start < before->end) {
                throw std::invalid_argument(std::string(operation) + ": " + name(*before) + " and " + name(use) +
                                            " share memory, and one of them is written. Pass a copy of one.");
            }
            if (any == nullptr || use.end > any->end) {
                any = &use;
            }
            if (use.is_written && (written == nullptr || use.end > written->end)) {
                written = &use;
            }
        }
    }

   private:
    struct Use {
        std::uintptr_t start;
        std::uintptr_t end;
        const char* list;
        std::size_t index;
        bool is_written;
    };

    static std::string name(const Use& use) { return std::string(use.list) + "[" + std::to_string(use.index) + "]"; }

    std::vector<Use> uses_;
};

}  // namespace bmt
