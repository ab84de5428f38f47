"""The ranks along ``cp``, and which tokens of a sequence each of them has.

[Note: order of tokens] A sequence is divided into ``2 * cp_size`` equal chunks. Rank r has chunk r,
from the head, and chunk ``2 * cp_size - 1 - r``, from the tail. With a causal mask a token costs
the more the later it is, so these two cost the same on every rank together. Attention without a
mask does not depend on the order of tokens, so there is this order only.
"""

from __future__ import annotations

import torch

from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.run.runtime import current, is_initialized

AXIS = "cp"


def context_group() -> Group:
    """Return the group of the ranks that have parts of this rank's sequences; of this rank alone
    without ``cp_size``, and before ``init_distributed()``.
    """
    return current().topology.group((AXIS,)) if is_initialized() else SingleGroup(0)


def check_halves(tokens: int, ranks: int, subject: str) -> None:
    """Raise ``ValueError``, which begins with ``subject``, if ``tokens`` are not two chunks."""
    if ranks > 1 and (tokens % 2 or tokens == 0):
        raise ValueError(
            f"{subject} {tokens} tokens, and each rank along cp has an even number, half from the"
            " head of the sequence and half from its tail: all that bmt.cp.split returned."
        )


def own_part(x: torch.Tensor, dim: int, size: int, rank: int) -> torch.Tensor:
    """Return the tokens that ``rank`` of ``size`` ranks has of ``x``, whose ``dim`` is a whole
    sequence; it must be a multiple of ``2 * size``. See [Note: order of tokens].

    >>> own_part(torch.arange(8), 0, size=2, rank=1)
    tensor([2, 3, 4, 5])
    """
    if size == 1:
        return x
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def in_order(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Return whole sequences from ``parts`` (ranks, ...), the own parts of all ranks: the inverse
    of :func:`own_part`. ``dim`` is that of the sequence in the result.

    >>> in_order(torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]]), 0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    halves = [part.chunk(2, dim) for part in parts.unbind(0)]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)
