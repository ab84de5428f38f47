"""Python objects exchanged between ranks: pickled, and sent as bytes."""

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
    with _reachable():
        return _all_gathered(obj, group)


def _all_gathered(obj: object, group: Group) -> list[Any]:
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
    with _reachable():
        return _broadcasted(obj, group, src)


def _broadcasted(obj: object, group: Group, src: int) -> Any:
    payload = bytearray(pickle.dumps(obj)) if group.rank == src else bytearray(1)
    size = torch.tensor([len(payload)])
    group.broadcast(size, src).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    if group.rank == src:
        data.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    group.broadcast(data, src).wait()
    return pickle.loads(_bytes_of(data))


def send_object(obj: object, group: Group, dst: int) -> None:
    """Send ``obj`` to the group's rank ``dst``, which calls :func:`recv_object`."""
    payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    group.send(torch.tensor([payload.numel()]), dst).wait()
    group.send(payload, dst).wait()


def recv_object(group: Group, src: int) -> Any:
    """Return what the group's rank ``src`` sends by :func:`send_object`."""
    size = torch.zeros(1, dtype=torch.int64)
    group.recv(size, src).wait()
    payload = torch.empty(int(size), dtype=torch.uint8)
    group.recv(payload, src).wait()
    return pickle.loads(_bytes_of(payload))


@contextmanager
def _reachable() -> Iterator[None]:
    """Raise torch's error of a connection that broke as :class:`RemoteError`."""
    try:
        yield
    except BmtError:
        raise
    except RuntimeError as error:
        raise RemoteError(f"A rank ended or cannot be reached any more: {error}") from error


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    # Not .numpy(): numpy is no dependency.
    data = bytearray(tensor.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data
