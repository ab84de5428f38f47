"""``check_equal_values``: compares tensors that all ranks of a group must hold alike, bit by
bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError

DECLARE_LOCAL = (
    "Make the same modules on every rank. If each rank along an axis is to have modules of its own, make Blocks with"
    ' local_axes=("axis",), or parameters with locality=[Locality("axis")].'
)
"""The last sentences of errors about ranks that have other parameters."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
"""By the bytes of an element, the integers that its bits are read as."""

# Words. As 64-bit numbers they fit into a processor's cache, where their sum takes a tenth of the time.
_ROW = 1 << 14
_ROWS_AT_ONCE_ON_GPU = 256  # the sum of a large tensor needs some tens of megabytes


def check_equal_values(named: Iterable[tuple[str, torch.Tensor]], group: Group, advice: str) -> None:
    """Raise :class:`ConfigError` on all ranks of ``group`` unless all have tensors of the same
    names, shapes, dtypes and values.

    Values are compared by their bits, so NaN equals NaN, and 0 differs from -0. The error names the
    first tensor that differs. If the values differ, ``advice`` is its last sentence, otherwise
    :data:`DECLARE_LOCAL`. Collective, with one message for all tensors.
    """
    if group.size > 1:
        check_equal_entries(_entries(named), group, advice)


class Entry(NamedTuple):
    """What is compared of a tensor. ``bits`` is :func:`sum_of_bits`.

    Values are not compared if ``bits`` is None on any rank, and nothing is if ``name`` is None on
    any rank.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    bits: int | None


def check_equal_entries(entries: Sequence[Entry], group: Group, advice: str) -> None:
    """See :func:`check_equal_values`."""
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")], device="cpu")
    digests = torch.empty(group.size, dtype=own.dtype, device="cpu")
    group.all_gather(digests, own).wait()
    if (digests != digests[0]).any():
        of_ranks = all_gather_object(entries, group)
        for rank, others in zip(group.ranks, of_ranks, strict=True):
            for ours, theirs in zip_longest(of_ranks[0], others):
                difference = _difference(ours, theirs, group.ranks[0], rank, advice)
                if difference:
                    raise ConfigError(difference)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim int64 tensor on the device of ``tensor`` that depends on every bit of it and
    on their order.

    Tensors of one dtype and shape with equal bits give equal numbers; others give different ones
    but for a chance of about 2^-32. It is the sum of all words, each times an odd number that
    belongs to its place, modulo 2^64.

    >>> sum_of_bits(torch.tensor([1.0, 2.0])) == sum_of_bits(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    words = flat.view(_WORDS[flat.element_size()])
    factors = _odd_numbers(min(len(words), _ROW), tensor.device)
    rest = words[len(words) // _ROW * _ROW :]
    of_rows = [(rest * factors[: len(rest)]).sum(0, keepdim=True)]
    if len(words) > len(rest):
        rows = words[: len(words) - len(rest)].view(-1, _ROW)
        at_once = 1 if rows.device.type == "cpu" else _ROWS_AT_ONCE_ON_GPU
        of_rows += [(piece * factors).sum(1) for piece in torch.split(rows, at_once)]
    sums = torch.cat(of_rows)
    return (sums * torch.full_like(sums, _FACTOR).cumprod(0)).sum()


# Odd 64-bit numbers, as splitmix64 has them (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
# number generators").
_FACTOR, _SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` numbers of 64 random bits, always the same ones."""
    numbers = torch.arange(1, count + 1, device=device) * _FACTOR
    for shift in (30, 27):
        numbers = (numbers ^ (numbers >> shift)) * _SECOND
    return (numbers ^ (numbers >> 31)) | 1


def _entries(named: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
    tensors = list(named)
    sums = [sum_of_bits(tensor) for _, tensor in tensors]
    # One read from each device, not one per tensor.
    on_host = {device: iter(_stacked(sums, device).tolist()) for device in {total.device for total in sums}}
    return [
        Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), next(on_host[total.device]))
        for (name, tensor), total in zip(tensors, sums, strict=True)
    ]


def _stacked(sums: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack([total for total in sums if total.device == device])


def _difference(ours: Entry | None, theirs: Entry | None, rank: int, other: int, advice: str) -> str:
    """Return how ``theirs``, of the rank ``other``, differs from ``ours``, of ``rank``; empty if it
    does not.
    """
    if ours == theirs or (ours is not None and ours.name is None) or (theirs is not None and theirs.name is None):
        return ""
    if ours is None or theirs is None or ours[:3] != theirs[:3]:
        return f"Rank {rank} has {_described(ours)} where rank {other} has {_described(theirs)}. {DECLARE_LOCAL}"
    if ours.bits is None or theirs.bits is None:
        return ""
    return f"{ours.name} has other values on rank {other} than on rank {rank}. {advice}"


def _described(entry: Entry | None) -> str:
    return "nothing more" if entry is None else f"{entry.name} of shape {entry.shape} and {entry.dtype}"
