"""``block_uses``: the :class:`BlockUse` of each forward and backward in a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from bmt_params.modules.block_use import BlockUse
from bmt_pipeline.schedules import Action, Kind

_GRADIENTS_END = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
_BACKWARD_BEGINS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


def block_uses(order: Sequence[Action], chunk: int) -> dict[int, BlockUse]:
    """Return, by micro-batch, the :class:`BlockUse` of the blocks of ``chunk`` in a
    stage's ``order``.

    Parameters stay gathered from the first to the last use of a step, so communication does not
    grow with the number of micro-batches. Only if all forwards come before all backwards, they are
    freed in between.

    >>> from bmt_pipeline.schedules import make_schedule
    >>> block_uses(make_schedule("gpipe", stages=2, micro_batches=2).orders[0], chunk=0)[1]
    BlockUse(first_forward=False, last_forward=True, first_backward=False, last_backward=True)
    """
    own = [action for action in order if action.chunk == chunk]
    forwards = [action.micro_batch for action in own if action.kind is Kind.FORWARD]
    backwards = [action.micro_batch for action in own if action.kind in _BACKWARD_BEGINS]
    ends = [action.micro_batch for action in own if action.kind in _GRADIENTS_END]
    is_apart = all(action.kind is Kind.FORWARD for action in own[: len(forwards)])
    return {
        micro_batch: BlockUse(
            first_forward=micro_batch == forwards[0],
            last_forward=is_apart and micro_batch == forwards[-1],
            first_backward=is_apart and micro_batch == backwards[0],
            last_backward=micro_batch == ends[-1],
        )
        for micro_batch in forwards
    }
