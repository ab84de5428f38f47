// Many tensors in one launch: a table that travels with the kernel's parameters, so that nothing is copied or allocated.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cuda/launch.cuh"

namespace bmt {

// Tensors are cut into chunks, which are counted through all of them; `first_chunk[i]` is the first one of entry i.
template <class Entry, int capacity>
struct Table {
    static_assert((sizeof(Entry) + sizeof(std::uint32_t)) * capacity < 32000, "kernel parameters end at 32764 bytes");

    Entry entries[capacity];
    std::uint32_t first_chunk[capacity + 1];
    int count;

    __device__ int entry_of(std::uint32_t chunk) const {
        int low = 0;
        int high = count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_chunk[middle] <= chunk) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// Fills tables with `rows`, which have a member numel above 0, and calls launch(table, number of chunks) for each full one and for
// the last.
template <class AnyTable, class Row, class Fill, class Launch>
void for_tables(const std::vector<Row>& rows, std::size_t chunk, const Fill& fill, const Launch& launch) {
    constexpr std::size_t capacity = sizeof(AnyTable::entries) / sizeof(AnyTable::entries[0]);
    constexpr std::size_t most_chunks = 0x7fffffff;
    AnyTable table{};
    std::size_t chunks = 0;
    const auto flush = [&] {
        if (table.count != 0) {
            table.first_chunk[table.count] = static_cast<std::uint32_t>(chunks);
            launch(table, static_cast<unsigned>(chunks));
        }
        table.count = 0;
        chunks = 0;
    };
    for (const Row& row : rows) {
        const std::size_t own = (row.numel + chunk - 1) / chunk;
        if (own > most_chunks) {
            throw std::invalid_argument("a tensor has more elements than one launch can reach");
        }
        if (static_cast<std::size_t>(table.count) == capacity || chunks + own > most_chunks) {
            flush();
        }
        table.entries[table.count] = fill(row);
        table.first_chunk[table.count] = static_cast<std::uint32_t>(chunks);
        chunks += own;
        ++table.count;
    }
    flush();
}

}  // namespace bmt
