"""What differs between two checkpoints, line by line: tensors, and the plain values of a
training's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from bmt_checkpoint import CheckpointReader
from bmt_checkpoint.format_choice import open_checkpoint
from bmt_checkpoint.manager_state import OPTIMIZER, rank_file
from bmt_checkpoint.torch_file import read_torch_file
from bmt_checkpoint.training_folder import format_of, part_of, read_training
from bmt_params.state.index import TensorEntry

_STATE = ("step", "extra", "optimizer", "optimizer_state")
"""The entries of ``training.pt`` that are compared one by one; the random generators are compared
as a whole.
"""


def tensor_differences(
    first: CheckpointReader, second: CheckpointReader, folders: tuple[Path, Path], prefix: str = ""
) -> Iterator[str]:
    """Yield a line for each name that only one has, and for each tensor or extra state whose values
    differ. ``prefix`` begins each line.
    """
    names = [list(reader.index.entries) for reader in (first, second)]
    for own, other, folder in ((names[0], second, folders[0]), (names[1], first, folders[1])):
        yield from (
            f"{prefix}{name}: only in {folder}" for name in own if name not in other.index.entries
        )
    for name in names[0]:
        if name not in second.index.entries:
            continue
        entries = first.index.entries[name], second.index.entries[name]
        if all(isinstance(entry, TensorEntry) for entry in entries):
            yield from (f"{prefix}{name}: {text}" for text in _compare(*entries, first, second))
        else:  # a module's extra state
            yield from value_differences(f"{prefix}{name}", *entries)


def training_differences(one: Path, other: Path) -> Iterator[str]:
    """Yield a line for each difference between the states of two trainings besides their models:
    ``step-N`` directories.
    """
    folders = one, other
    states = [read_training(folder) for folder in folders]
    for name in _STATE:
        yield from value_differences(name, states[0][name], states[1][name])
    if any(value_differences("random", states[0]["random"], states[1]["random"])):
        yield "random: the states of random generators differ"
    forms = [format_of(state) for state in states]
    tensors = [part_of(f, OPTIMIZER, form) for f, form in zip(folders, forms, strict=True)]
    if all(path.exists() for path in tensors):
        first, second = map(open_checkpoint, tensors, forms)
        with closing(first), closing(second):
            yield from tensor_differences(first, second, folders, "optimizer: ")
    files = [{path.name for path in folder.glob(rank_file("*"))} for folder in folders]
    for name in sorted(files[0] & files[1]):
        yield from value_differences(name, *(read_torch_file(folder / name) for folder in folders))
    for own, rest, folder in ((files[0], files[1], one), (files[1], files[0], other)):
        yield from (f"{name}: only in {folder}" for name in sorted(own - rest))


def value_differences(path: str, one: Any, other: Any) -> Iterator[str]:
    """Yield a line for each difference between nested values; ``path`` is their name.

    >>> list(value_differences("state", {"lr": 0.1, "groups": [1]}, {"lr": 0.2, "groups": [1]}))
    ['state.lr: 0.1 and 0.2']
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from value_differences(
                f"{path}.{key}", one.get(key, _Missing), other.get(key, _Missing)
            )
    elif (
        isinstance(one, (list, tuple))
        and isinstance(other, (list, tuple))
        and len(one) == len(other)
    ):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from value_differences(f"{path}.{number}", *pair)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        yield from (f"{path}: {text}" for text in _compare_values(one, other))
    elif type(one) is not type(other) or repr(one) != repr(other):
        # The texts, because NaN is not equal to itself.
        yield f"{path}: {_shown(one)} and {_shown(other)}"


class _Missing:
    """Stands for the value of a key that only the other one has."""


def _shown(value: Any) -> str:
    text = (
        "nothing"
        if value is _Missing
        else f"a {_kind(value)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compare(
    one: TensorEntry, other: TensorEntry, first: CheckpointReader, second: CheckpointReader
) -> Iterator[str]:
    if _kind(one) != _kind(other):
        yield f"{_kind(one)} and {_kind(other)}"
    else:
        yield from _compare_values(first.read(one.source), second.read(other.source))


def _compare_values(one: torch.Tensor, other: torch.Tensor) -> Iterator[str]:
    if _kind(one) != _kind(other):
        yield f"{_kind(one)} and {_kind(other)}"
        return
    as_bytes = [value.contiguous().view(-1).view(torch.uint8) for value in (one, other)]
    if not torch.equal(*as_bytes):
        wide = [
            value.to(torch.complex128 if value.is_complex() else torch.float64)
            for value in (one, other)
        ]
        yield f"differs by up to {(wide[0] - wide[1]).abs().max().item():.3g}"


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"
