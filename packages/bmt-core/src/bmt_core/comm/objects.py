"""Python objects exchanged between ranks: pickled, and sent as bytes.

[Note: short objects] A rank does not know the length of the others' objects. So each first sends a
message of fixed length, with the length of its object and the beginning of the object. A short
object fits into this message and needs no second one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError, RemoteError, cause_of

_START, _ROOM = 512, 504
"""Bytes of the first message, and how many of them are for the object: see
[Note: short objects].
"""


def all_gather_object(obj: object, group: Group) -> list[Any]:
    """Return the ``obj`` of every rank of ``group``, in rank order. Collective; objects must
    be picklable.

    Only for runs whose ranks trust each other: what arrives is unpickled.
    """
    if group.size == 1:
        return [obj]
    with _host_exchange():
        return _all_gathered(obj, group)


def _all_gathered(obj: object, group: Group) -> list[Any]:
    payload = bytearray(pickle.dumps(obj))
    starts = torch.empty(group.size * _START, dtype=torch.uint8, device="cpu")
    group.all_gather(starts, _start_of(payload)).wait()
    found = [_length_and_start(start) for start in starts.view(group.size, _START)]
    longest = max(length for length, _ in found) - _ROOM
    if longest <= 0:
        return [pickle.loads(start[:length]) for length, start in found]
    rest = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    if len(payload) > _ROOM:
        rest[: len(payload) - _ROOM] = torch.frombuffer(payload, dtype=torch.uint8, offset=_ROOM)
    rests = torch.empty(group.size * longest, dtype=torch.uint8, device="cpu")
    group.all_gather(rests, rest).wait()
    whole = [
        start + _bytes_of(rest[: length - _ROOM]) if length > _ROOM else start
        for (length, start), rest in zip(found, rests.view(group.size, longest), strict=True)
    ]
    return [pickle.loads(data[:length]) for data, (length, _) in zip(whole, found, strict=True)]


def broadcast_object(obj: object, group: Group, src: int = 0) -> Any:
    """Return the ``obj`` of ``group.ranks[src]`` on every rank; what others pass is ignored.
    Collective.
    """
    if group.size == 1:
        return obj
    with _host_exchange():
        return _broadcasted(obj, group, src)


def _broadcasted(obj: object, group: Group, src: int) -> Any:
    payload = bytearray(pickle.dumps(obj)) if group.rank == src else bytearray()
    message = _start_of(payload)
    group.broadcast(message, src).wait()
    length, start = _length_and_start(message)
    if length <= _ROOM:
        return pickle.loads(start[:length])
    rest = torch.empty(length - _ROOM, dtype=torch.uint8, device="cpu")
    if group.rank == src:
        rest.copy_(torch.frombuffer(payload, dtype=torch.uint8, offset=_ROOM))
    group.broadcast(rest, src).wait()
    return pickle.loads(start + _bytes_of(rest))


class SentObject:
    """The :class:`Work` of sending ``obj`` to the group's rank ``dst``, which calls
    :func:`recv_object`.

    Sending starts at once. Keep this until :meth:`wait` has returned.
    """

    def __init__(self, obj: object, group: Group, dst: int) -> None:
        with _host_exchange():
            payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            size = torch.tensor([payload.numel()], device="cpu")
            self._tensors = size, payload  # kept until they are sent
            self._works = [group.send(tensor, dst) for tensor in self._tensors]

    def wait(self) -> None:
        """Wait until the other rank has the object."""
        for work in self._works:
            work.wait()


def recv_object(group: Group, src: int) -> Any:
    """Return what the group's rank ``src`` sends by :class:`SentObject`."""
    with _host_exchange():
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        group.recv(size, src).wait()
        payload = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        group.recv(payload, src).wait()
        return pickle.loads(_bytes_of(payload))


@contextmanager
def _host_exchange() -> Iterator[None]:
    """Inside, tensors are made on the CPU whatever the default device is, and a lost connection
    raises RemoteError.
    """
    try:
        with torch.device("cpu"):
            yield
    except BmtError:
        raise
    except RuntimeError as error:
        raise RemoteError(f"A rank ended or cannot be reached: {cause_of(error)}.") from None


def _start_of(payload: bytearray) -> torch.Tensor:
    start = len(payload).to_bytes(_START - _ROOM, "little") + payload[:_ROOM]
    return torch.frombuffer(bytearray(start.ljust(_START, b"\0")), dtype=torch.uint8)


def _length_and_start(message: torch.Tensor) -> tuple[int, bytearray]:
    data = _bytes_of(message)
    return int.from_bytes(data[: _START - _ROOM], "little"), data[_START - _ROOM :]


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    # Not .numpy(): numpy is no dependency.
    data = bytearray(tensor.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data
