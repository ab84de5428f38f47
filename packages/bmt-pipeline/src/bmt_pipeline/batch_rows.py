"""``move_rows``: move batch rows (dim 0) to a pipeline's first stage, and results back to the ranks
that the rows came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.autograd import materialized
from bmt_core.comm.protocols import Group
from bmt_pipeline.wait_errors import waiting_for_all


def move_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> torch.Tensor:
    """Send the first ``sent[0]`` rows of ``x`` to the first rank of ``group``, the next to the
    second, and so on.

    Returns the rows from all ranks, ``received[i]`` of rank i, in the order of ranks. Collective;
    so is backward, which moves gradients back.
    """
    moved: torch.Tensor = _MoveRows.apply(x, tuple(sent), tuple(received), group)  # type: ignore[no-untyped-call]
    return moved


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Group
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _moved(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _moved(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _moved(
    x: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Group
) -> torch.Tensor:
    x = materialized(x.detach())
    output = x.new_empty((sum(received), *x.shape[1:]))
    outgoing, incoming = torch.split(x, list(sent)), torch.split(output, list(received))
    incoming[group.rank].copy_(outgoing[group.rank])
    others = [rank for rank in range(group.size) if rank != group.rank]
    sends = [(outgoing[rank], rank) for rank in others if outgoing[rank].numel()]
    with waiting_for_all("to exchange rows of the batch"):
        group.exchange(
            sends, [(incoming[rank], rank) for rank in others if incoming[rank].numel()]
        ).wait()
    return output
