#include "common/chunks.h"
#include "common/operations.h"
#include "cpu/flag.h"
#include "cpu/parallel.h"
#include "cpu/processor.h"
#include "cpu/square_root.h"
#include "cpu/where.h"

namespace bmt {

// Elements in a piece of work: about a megabyte, so that handing it out costs nothing beside doing it.
static constexpr std::size_t adam_chunk = 1 << 15;

void adam_step(Form form, Element grad, const std::vector<AdamRow>& rows, const AdamSettings& given,
               const Where& where) {
    if (is_set(given.skip)) {
        return;
    }
    AdamSettings settings = given;
    if (given.scale_at != nullptr) {
        settings.scale = *given.scale_at;
    }
    Chunks chunks(adam_chunk);
    for (const AdamRow& row : rows) {
        chunks.add(row.numel);
    }
    parallel(where.threads, chunks.count(), [&](std::size_t index) {
        const Chunks::Piece piece = chunks[index];
        kernels().adam(form, grad, rows[piece.row], piece.begin, piece.end, settings, square_root());
    });
}

}  // namespace bmt
