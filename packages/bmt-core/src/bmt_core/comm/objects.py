"""Python objects between ranks, and sections that all ranks leave together."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError, RemoteError


def all_gather_object(obj: object, group: Group) -> list[Any]:
    """Return the ``obj`` of every rank of ``group``, in rank order. Collective; objects must be picklable.

    Only for runs whose ranks trust each other: what arrives is unpickled.
    """
    if group.size == 1:
        return [obj]
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([payload.numel()])).wait()
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    gathered = torch.empty(group.size * longest, dtype=torch.uint8)
    group.all_gather(gathered, padded).wait()
    parts = gathered.view(group.size, longest)
    return [pickle.loads(_bytes_of(parts[i, : int(size)])) for i, size in enumerate(sizes)]


def broadcast_object(obj: object, group: Group, src: int = 0) -> Any:
    """Return the ``obj`` of ``group.ranks[src]`` on every rank; what others pass is ignored. Collective."""
    if group.size == 1:
        return obj
    payload = bytearray(pickle.dumps(obj)) if group.rank == src else bytearray(1)
    size = torch.tensor([len(payload)])
    group.broadcast(size, src).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    if group.rank == src:
        data.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    group.broadcast(data, src).wait()
    return pickle.loads(_bytes_of(data))


@contextmanager
def together(group: Group, what: str) -> Iterator[None]:
    """Leave the section on every rank of ``group`` in the same way.

    When a rank raises inside, it re-raises its own error and the others raise one that names it; when the cause is
    one of bmt's errors they raise the same class, otherwise :class:`RemoteError`. A section must not contain a
    collective after a point where a single rank can fail. Collective at its end.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    reports = all_gather_object(None if error is None else _describe(error), group)
    if error is not None:
        raise error
    for index, report in enumerate(reports):
        if report is not None:
            raise _remote_error(report, f"Rank {group.ranks[index]} failed in {what}: ")


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    # Not .numpy(): numpy is no dependency.
    data = bytearray(tensor.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


def _describe(error: Exception) -> tuple[type[BmtError] | None, str, str]:
    kind = type(error) if isinstance(error, BmtError) else None
    return kind, type(error).__name__, str(error)


def _remote_error(report: tuple[type[BmtError] | None, str, str], where: str) -> BmtError:
    kind, name, message = report
    return kind(where + message) if kind is not None else RemoteError(f"{where}{name}: {message}")
