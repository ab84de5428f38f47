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

_AT_ONCE = 1 << 20  # words: the sum of a large tensor needs some tens of megabytes


def check_equal_values(named: Iterable[tuple[str, torch.Tensor]], group: Group, advice: str) -> None:
    """Raise :class:`ConfigError` on all ranks of ``group`` unless all have tensors of the same
    names, shapes, dtypes and values.

    Values are compared by their bits, so NaN equals NaN, and 0 differs from -0. The error names the
    first tensor that differs. If the values differ, ``advice`` is its last sentence, otherwise
    :data:`DECLARE_LOCAL`. Collective, with one message for all tensors.
    """
    if group.size > 1:
        check_equal_entries(_entries(named), group, advice, compares_names=True)


class Entry(NamedTuple):
    """What is compared of a tensor. ``bits`` is :func:`sum_of_bits`.

    Values are not compared if ``bits`` is None on any rank, and nothing is if ``name`` is None on
    any rank.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    bits: int | None


def check_equal_entries(entries: Sequence[Entry], group: Group, advice: str, *, compares_names: bool) -> None:
    """See :func:`check_equal_values`. Without ``compares_names`` names are for errors only."""
    compared = entries if compares_names else [(entry.name is None, *entry[1:]) for entry in entries]
    digest = hashlib.blake2b(repr(compared).encode(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")], device="cpu")
    digests = torch.empty(group.size, dtype=own.dtype, device="cpu")
    group.all_gather(digests, own).wait()
    if (digests != digests[0]).any():
        of_ranks = all_gather_object(entries, group)
        for rank, others in zip(group.ranks, of_ranks, strict=True):
            for ours, theirs in zip_longest(of_ranks[0], others):
                difference = _difference(ours, theirs, group.ranks[0], rank, advice, compares_names)
                if difference:
                    raise ConfigError(difference)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim int64 tensor on the device of ``tensor`` that depends on every bit of it and
    on their order.

    Tensors of one dtype and shape with equal bits give equal numbers; others give different ones
    but for a chance of 2^-64.

    >>> sum_of_bits(torch.tensor([1.0, 2.0])) == sum_of_bits(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places = torch.arange(min(len(words), _AT_ONCE), device=tensor.device)
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        total += _mixed((places[: len(part)] + start) * _FACTOR + part).sum()
    return total


# Odd 64-bit numbers, as splitmix64 has them (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
# number generators").
_FACTOR, _SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of which each depends on all bits of its own, so that differences do not
    cancel in their sum.
    """
    for shift in (30, 27):
        numbers = (numbers ^ (numbers >> shift)) * _SECOND
    return numbers ^ (numbers >> 31)


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


def _difference(
    ours: Entry | None, theirs: Entry | None, rank: int, other: int, advice: str, compares_names: bool
) -> str:
    """Return how ``theirs``, of the rank ``other``, differs from ``ours``, of ``rank``; empty if it
    does not.
    """
    if ours == theirs or (ours is not None and ours.name is None) or (theirs is not None and theirs.name is None):
        return ""
    first = 0 if compares_names else 1
    if ours is None or theirs is None or ours[first:3] != theirs[first:3]:
        return f"Rank {rank} has {_described(ours)} where rank {other} has {_described(theirs)}. {DECLARE_LOCAL}"
    if ours.bits is None or theirs.bits is None or ours.bits == theirs.bits:
        return ""
    return f"{ours.name} has other values on rank {other} than on rank {rank}. {advice}"


def _described(entry: Entry | None) -> str:
    return "nothing more" if entry is None else f"{entry.name} of shape {entry.shape} and {entry.dtype}"
