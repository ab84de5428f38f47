// Many tensors of any sizes as one sequence of pieces of bounded size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bmt {

class Chunks {
   public:
    struct Piece {
        std::size_t row;
        std::size_t begin;
        std::size_t end;
    };

    explicit Chunks(std::size_t chunk) : chunk_(chunk) {}

    void add(std::size_t numel) {
        numels_.push_back(numel);
        firsts_.push_back(count_);
        count_ += (numel + chunk_ - 1) / chunk_;
    }

    std::size_t count() const { return count_; }

    Piece operator[](std::size_t index) const {
        // The last row that begins at or before `index`: rows without elements begin where the next one does.
        const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), index);
        const auto row = static_cast<std::size_t>(after - firsts_.begin()) - 1;
        const std::size_t begin = (index - firsts_[row]) * chunk_;
        return {row, begin, std::min(begin + chunk_, numels_[row])};
    }

   private:
    std::size_t chunk_;
    std::size_t count_ = 0;
    std::vector<std::size_t> numels_;
    std::vector<std::size_t> firsts_;
};

}  // namespace bmt
