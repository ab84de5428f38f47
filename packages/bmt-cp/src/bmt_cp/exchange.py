"""Differentiable exchanges of queries, keys and values between the ranks along ``cp``.

[Note: tokens first] What is exchanged for heads lies in memory as (tokens, batch, heads, size).
There the chunks of a rank are contiguous, so that they are sent and received where they lie, and
each tensor is copied once, to divide or join its heads. Torch's attention takes and returns such
tensors, and so do layers of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError
from bmt_core.torch_internals import never_compiled
from bmt_cp.context_group import context_group, in_order, own_part


@torch.library.custom_op("bmt_cp::tokens_to_heads", mutates_args=())
def tokens_to_heads(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """Exchange this rank's tokens with all heads, (batch, heads, tokens / W, size), for all tokens
    with its heads, (batch, heads / W, tokens, size), in order, between the ``ranks`` along ``cp``.
    Collective.

    An all-to-all; backward is the reverse one. Volume: (W - 1)/W of the tensors in each direction.
    """
    group = _group_of(ranks)
    packed = [torch.stack(x.permute(2, 0, 1, 3).chunk(ranks, 2)) for x in tensors]
    found = [_with_heads_of_rank(x, ranks) for x in tensors]
    _exchange(
        [_halves(x) for x in packed], [_chunks(x.permute(2, 0, 1, 3), ranks) for x in found], group
    )
    return found


@torch.library.custom_op("bmt_cp::heads_to_tokens", mutates_args=())
def heads_to_tokens(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """The inverse of :func:`tokens_to_heads`. Collective."""
    group = _group_of(ranks)
    sent = [x.permute(2, 0, 1, 3).contiguous() for x in tensors]
    received = [x.new_empty(ranks, x.shape[0] // ranks, *x.shape[1:]) for x in sent]
    _exchange([_chunks(x, ranks) for x in sent], [_halves(x) for x in received], group)
    joined = [x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in received]
    return [x.permute(1, 2, 0, 3) for x in joined]


@tokens_to_heads.register_fake
def _(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    return [_with_heads_of_rank(x, ranks) for x in tensors]


@heads_to_tokens.register_fake
def _(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    return [_new(x, x.shape[1] * ranks, x.shape[2] // ranks) for x in tensors]


def _with_heads_of_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return _new(x, x.shape[1] // ranks, x.shape[2] * ranks)


def _new(x: torch.Tensor, heads: int, tokens: int) -> torch.Tensor:
    """Return an empty tensor (batch, heads, tokens, size): see [Note: tokens first]."""
    return x.new_empty(tokens, x.shape[0], heads, x.shape[3]).permute(1, 2, 0, 3)


def _note_ranks(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.ranks = inputs[1]


tokens_to_heads.register_autograd(
    lambda ctx, grads: (heads_to_tokens(grads, ctx.ranks), None), setup_context=_note_ranks
)
heads_to_tokens.register_autograd(
    lambda ctx, grads: (tokens_to_heads(grads, ctx.ranks), None), setup_context=_note_ranks
)


def _group_of(ranks: int) -> Group:
    group = context_group()
    if group.size != ranks:
        raise BmtError(f"This run has {group.size} ranks along cp, and compiled code {ranks}.")
    return group


@never_compiled
def gather_tokens(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Gather the tokens of all ranks, (batch, heads, tokens / W, size) -> (batch, heads, tokens,
    size), in order. Backward sums the gradients of all ranks, in float32 for half types, and keeps
    those of this rank's tokens. Collective.
    """
    found: tuple[torch.Tensor, ...] = _GatherTokens.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return found


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        with annotate("to gather keys and values along cp"):
            return tuple(in_order(gather_stacked(tensor, group), 2) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        group: Group = ctx.group
        own = []
        for grad in grads:
            parts = _parts(grad, group).flatten()
            dtype = torch.promote_types(grad.dtype, torch.float32)
            total = torch.empty(parts.numel() // group.size, dtype=dtype, device=grad.device)
            with annotate("to sum gradients of keys and values along cp"):
                group.reduce_scatter(total, parts).wait()
            shape = (*grad.shape[:2], grad.shape[2] // group.size, *grad.shape[3:])
            own.append(total.view(shape).to(grad.dtype))
        return None, *own


def _parts(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return every rank's tokens of ``tensor``, (ranks, batch, heads, tokens / W, size)."""
    return torch.stack([own_part(tensor, 2, group.size, rank) for rank in range(group.size)])


_Chunks = Sequence[Sequence[torch.Tensor]]
"""For the chunk at the head and the one at the tail: what goes to or comes from each rank."""


def _chunks(by_token: torch.Tensor, ranks: int) -> _Chunks:
    """Return every rank's chunks of ``by_token``, whose first dim is the tokens of the sequence."""
    chunks = by_token.chunk(2 * ranks)
    return chunks[:ranks], chunks[: ranks - 1 : -1]


def _halves(by_rank: torch.Tensor) -> _Chunks:
    """Return the chunks in ``by_rank`` (ranks, tokens / W, ...)."""
    head, tail = by_rank.chunk(2, 1)
    return head.unbind(0), tail.unbind(0)


def _exchange(sent: Sequence[_Chunks], received: Sequence[_Chunks], group: Group) -> None:
    """Send ``[r]`` of the chunks of each tensor to rank r, and receive what each rank sends to
    this one.
    """
    with annotate("to exchange tokens for heads along cp"):
        works = [
            group.all_to_all(theirs, ours)
            for tensor, other in zip(sent, received, strict=True)
            for ours, theirs in zip(tensor, other, strict=True)
        ]
        for work in works:
            work.wait()
