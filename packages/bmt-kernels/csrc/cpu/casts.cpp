#include "common/casts.h"

#include "common/chunks.h"
#include "common/operations.h"
#include "cpu/parallel.h"
#include "cpu/processor.h"
#include "cpu/where.h"

namespace bmt {

static constexpr std::size_t cast_chunk = 1 << 16;

void cast(const std::vector<Cast>& casts, const Where& where) {
    Chunks chunks(cast_chunk);
    for (const Cast& one : casts) {
        chunks.add(one.numel);
    }
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        kernels().cast(casts[piece.row], piece.begin, piece.end);
    });
}

}  // namespace bmt
