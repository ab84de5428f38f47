#include <cstring>

#include "common/chunks.h"
#include "common/operations.h"
#include "cpu/flag.h"
#include "cpu/parallel.h"
#include "cpu/processor.h"
#include "cpu/where.h"

namespace bmt {
namespace {

constexpr std::size_t gradient_chunk = 1 << 16;

Chunks chunks_of(const std::vector<Tensor>& tensors) {
    Chunks chunks(gradient_chunk);
    for (const Tensor& tensor : tensors) {
        chunks.add(tensor.numel);
    }
    return chunks;
}

}  // namespace

void has_non_finite(const std::vector<Tensor>& tensors, std::uint8_t* flag, const Where& where) {
    const Chunks chunks = chunks_of(tensors);
    std::atomic<bool> found{false};
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        const Tensor& tensor = tensors[piece.row];
        if (!found.load(std::memory_order_relaxed) &&
            kernels().has_non_finite(tensor.element, tensor.address, piece.begin, piece.end)) {
            found.store(true, std::memory_order_relaxed);
        }
    });
    if (found.load()) {
        *flag = 1;
    }
}

const std::size_t powers_sum_workspace = 0;

void powers_sum(const std::vector<Tensor>& tensors, Power kind, double p, float* result, double* /* workspace */,
                const Where& where) {
    const Chunks chunks = chunks_of(tensors);
    std::vector<double> parts(chunks.count());
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        const Tensor& tensor = tensors[piece.row];
        parts[index] = kernels().power_sum(tensor.element, tensor.address, piece.begin, piece.end, kind, p);
        if (kind != Power::largest) {
            parts[index] *= tensor.weight;
        }
    });
    double total = 0;
    for (const double part : parts) {
        if (kind != Power::largest) {
            total += part;
        } else if (part > total || part != part) {
            total = part;
        }
    }
    *result = static_cast<float>(total);
}

void scale(const std::vector<Tensor>& tensors, const float* factor, const Where& where) {
    const Chunks chunks = chunks_of(tensors);
    const float value = *factor;
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        const Tensor& tensor = tensors[piece.row];
        kernels().scale(tensor.element, tensor.address, piece.begin, piece.end, value);
    });
}

void zero_if(const std::vector<Tensor>& tensors, const Flag& flag, const Where& where) {
    if (!is_set(flag)) {
        return;
    }
    const Chunks chunks = chunks_of(tensors);
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        const Tensor& tensor = tensors[piece.row];
        const std::size_t size = size_of(tensor.element);
        std::memset(static_cast<char*>(tensor.address) + piece.begin * size, 0, (piece.end - piece.begin) * size);
    });
}

}  // namespace bmt
