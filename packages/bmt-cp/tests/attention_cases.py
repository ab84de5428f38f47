"""Attention over ranks, and in one process by its definition: softmax of products, with a mask that
is computed for each pair of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bmt_core.run.runtime import current
from bmt_cp import attention
from bmt_cp.context_group import own_part


class Case(NamedTuple):
    heads: int = 4
    key_heads: int = 4
    length: int = 48
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    """Lengths of the packed documents of the first row; the second has one document more."""
    transport: Any = None


def tensors(case: Case) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Query, key, value and what the result is multiplied by for a loss; and the documents."""
    draw = torch.Generator().manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, case.length, 8, generator=draw, dtype=torch.float64)

    found = [normal(n) for n in (case.heads, case.key_heads, case.key_heads, case.heads)]
    if not case.documents:
        return found, None
    ids = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents))
    second = ids + (torch.arange(case.length) >= case.length // 3)
    return found, torch.stack([ids, second])


def expected(case: Case) -> list[torch.Tensor]:
    """The result, and the gradients of query, key and value, by the definition."""
    (query, key, value, factor), ids = tensors(case)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    groups = case.heads // case.key_heads
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    row, column = torch.arange(case.length)[:, None], torch.arange(case.length)
    seen = torch.ones(2, 1, case.length, case.length, dtype=torch.bool)
    if case.causal:
        seen &= column <= row
    if case.window is not None:
        seen &= (row - column).abs() < case.window
    if ids is not None:
        seen &= (ids[:, :, None] == ids[:, None])[:, None]
    scores = (query @ key.mT) / 8**0.5
    result = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    return [result, *torch.autograd.grad((result * factor).sum(), leaves)]


def found_on_ranks(case: Case) -> list[torch.Tensor]:
    """The same, from the parts of the ranks along ``cp``: each of this rank's tokens."""
    whole, ids = tensors(case)
    size, rank = current().topology.axis_size("cp"), current().topology.axis_rank("cp")
    leaves = [own_part(x, 2, size, rank).clone().requires_grad_() for x in whole[:3]]
    factor = own_part(whole[3], 2, size, rank)
    result = attention(
        *leaves,
        causal=case.causal,
        window=case.window,
        document_ids=ids,
        transport=case.transport,
    )
    return [result.detach(), *torch.autograd.grad((result * factor).sum(), leaves)]


def differences(case: Case) -> list[float]:
    """How far this rank's results are from those of one process."""
    size, rank = current().topology.axis_size("cp"), current().topology.axis_rank("cp")
    wanted = [own_part(x.detach(), 2, size, rank) for x in expected(case)]
    return [float((a - b).abs().max()) for a, b in zip(found_on_ranks(case), wanted, strict=True)]
