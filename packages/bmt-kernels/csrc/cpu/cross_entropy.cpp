#include "common/chunks.h"
#include "common/operations.h"
#include "cpu/parallel.h"
#include "cpu/processor.h"
#include "cpu/where.h"

namespace bmt {
namespace {

// Rows in a piece of work: some ten thousand logits.
Chunks rows_of(const Logits& logits) {
    const std::int64_t rows = std::max<std::int64_t>(1, (1 << 15) / std::max<std::int64_t>(1, logits.classes));
    Chunks chunks(static_cast<std::size_t>(rows));
    chunks.add(static_cast<std::size_t>(logits.rows));
    return chunks;
}

}  // namespace

void cross_entropy_forward(const Logits& logits, const Targets& targets, const float* weight,
                           const ForwardResult& result, const Where& where) {
    const Chunks chunks = rows_of(logits);
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        kernels().cross_entropy_forward(logits, targets, weight, result, static_cast<std::int64_t>(piece.begin),
                                        static_cast<std::int64_t>(piece.end));
    });
}

void cross_entropy_backward(const Logits& logits, const Targets& targets, const BackwardFactors& factors,
                            const float* weight, const Gradient& gradient, const Where& where) {
    const Chunks chunks = rows_of(logits);
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        kernels().cross_entropy_backward(logits, targets, factors, weight, gradient,
                                         static_cast<std::int64_t>(piece.begin), static_cast<std::int64_t>(piece.end));
    });
}

}  // namespace bmt
