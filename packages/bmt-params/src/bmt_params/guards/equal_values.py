"""``check_equal_values``: compares tensors that all ranks of a group must hold alike, bit by
bit.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError

DECLARE_LOCAL = (
    "Make the same modules on every rank. If each rank along an axis is to have modules of its own,"
    " make Blocks with"
    ' local_axes=("axis",), or parameters with locality=[Locality("axis")].'
)
"""The last sentences of errors about ranks that have other parameters."""

_UNNAMED = "a parameter"
_PIECE = 1 << 15
"""Words of 4 bytes whose products are formed at once: on a CPU they stay in its cache."""


def check_equal_values(
    named: Iterable[tuple[str, torch.Tensor]], group: Group, advice: str
) -> None:
    """Raise :class:`ConfigError` on all ranks of ``group`` unless all have tensors of the same
    names, shapes, dtypes and values.

    Values are compared by their bits, so NaN equals NaN, and 0 differs from -0. The error names the
    first tensor that differs. If the values differ, ``advice`` is its last sentence, otherwise
    :data:`DECLARE_LOCAL`. Collective, with one message for all tensors.
    """
    if group.size > 1:
        check_equal_entries(entries_of(named), group, advice)


class Entry(NamedTuple):
    """What is compared of a tensor. ``bits`` is :func:`sum_of_bits`.

    Values are not compared if ``bits`` is None on any rank, and nothing is if ``name`` is None on
    any rank. A name may lack its first words, or be empty, on some ranks: ``0.weight`` is
    ``layers.0.weight``, too.
    """

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    bits: int | None


def check_equal_entries(entries: Sequence[Entry], group: Group, advice: str) -> None:
    """See :func:`check_equal_values`."""
    # One number in the usual case; entries are sent only to tell what differs.
    own = torch.tensor([digest_of(repr(entries))], device="cpu")
    digests = torch.empty(group.size, dtype=own.dtype, device="cpu")
    group.all_gather(digests, own).wait()
    # All ranks see the same digests, so all send their entries, or none.
    if (digests != digests[0]).any():
        of_ranks = all_gather_object(entries, group)
        for rank, others in zip(group.ranks, of_ranks, strict=True):
            for ours, theirs in zip_longest(of_ranks[0], others):
                difference = _difference(ours, theirs, group.ranks[0], rank, advice)
                if difference:
                    raise ConfigError(difference)


def entries_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
    """Return what is compared of tensors, with their values."""
    tensors = list(named)
    sums = [sum_of_bits(tensor) for _, tensor in tensors]
    # One read from each device, not one per tensor.
    on_host = {
        device: iter(_stacked(sums, device).tolist()) for device in {total.device for total in sums}
    }
    return [
        Entry(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            next(on_host[total.device]),
        )
        for (name, tensor), total in zip(tensors, sums, strict=True)
    ]


def digest_of(text: str) -> int:
    """Return a number of 56 bits that stands for ``text`` where ranks compare theirs."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def first_difference(text: str, other: str) -> tuple[str, str]:
    """Return the first lines in which two texts differ.

    >>> first_difference("name\\nsize 3", "name\\nsize 4")
    ('size 3', 'size 4')
    """
    pairs = zip_longest(text.split("\n"), other.split("\n"), fillvalue="nothing more")
    return next((one, two) for one, two in pairs if one != two)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim int64 tensor on the device of ``tensor`` that depends on every bit of it and
    on their order.

    Tensors of one dtype and shape with equal bits give equal numbers; others give different ones
    but for a chance of 2^-32. It is the sum of words of 4 bytes, each times an odd random number of
    its place.

    >>> sum_of_bits(torch.tensor([1.0, 2.0])) == sum_of_bits(torch.tensor([2.0, 1.0]))
    tensor(False)
    """
    words, factors = _words(tensor), _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = words[: len(words) // _PIECE * _PIECE].view(-1, _PIECE)
    of_pieces = _mixed(torch.arange(len(whole) + 1, device=tensor.device)) | 1
    # On GPUs more at once, so that there are fewer kernels.
    at_once = 1 if tensor.device.type == "cpu" else 64
    for rows, of_rows in zip(
        torch.split(whole, at_once), torch.split(of_pieces[:-1], at_once), strict=True
    ):
        total += ((rows * factors).sum(1) * of_rows).sum()
    rest = words[whole.numel() :]
    return total + (rest * factors[: len(rest)]).sum() * of_pieces[-1]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``tensor`` as int32, with zeros after the last one."""
    bits = tensor.int_repr() if tensor.is_quantized else tensor.detach()
    flat = bits.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    # torch views bytes as words only where these begin at a multiple of 4.
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd random numbers, which are the same on every rank and in every run."""
    # On the CPU, because other devices draw other numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (_PIECE,), generator=generator, device="cpu")
    return (drawn | 1).to(device)


# An odd 64-bit number of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators").
_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of which each depends on all bits of its own."""
    for shift in (30, 27):
        numbers = (numbers ^ (numbers >> shift)) * _FACTOR
    return numbers ^ (numbers >> 31)


def _stacked(sums: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack([total for total in sums if total.device == device])


def _difference(
    ours: Entry | None, theirs: Entry | None, rank: int, other: int, advice: str
) -> str:
    """Return how ``theirs``, of the rank ``other``, differs from ``ours``, of ``rank``; empty if it
    does not.
    """
    if (
        ours == theirs
        or (ours is not None and ours.name is None)
        or (theirs is not None and theirs.name is None)
    ):
        return ""
    if (
        ours is None
        or theirs is None
        or ours[1:3] != theirs[1:3]
        or not _is_one_name(ours.name, theirs.name)
    ):
        return (
            f"Rank {rank} has {_described(ours)} where rank {other} has {_described(theirs)}."
            f" {DECLARE_LOCAL}"
        )
    if ours.bits is None or theirs.bits is None or ours.bits == theirs.bits:
        return ""
    return f"{ours.name or _UNNAMED} has other values on rank {other} than on rank {rank}. {advice}"


def _is_one_name(name: str | None, other: str | None) -> bool:
    """Whether one name ends with the other: a layer that a stage leaves to another one keeps the
    name it had, if any.
    """
    shorter, longer = sorted((name or "", other or ""), key=len)
    return not shorter or f".{longer}".endswith(f".{shorter}")


def _described(entry: Entry | None) -> str:
    return (
        "nothing more"
        if entry is None
        else f"{entry.name or _UNNAMED} of shape {entry.shape} and {entry.dtype}"
    )
