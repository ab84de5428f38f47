"""BMTrain's low-level collectives, on the backend of the run (NCCL or gloo).

They write into ``dst``, return nothing and are not differentiable. They take tensors or storages
(``tensor.storage()``, ``tensor.untyped_storage()``). An untyped storage holds bytes, which can be
moved and not reduced.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_core import Group, ReduceOp, current

Memory = torch.Tensor | torch.TypedStorage | torch.UntypedStorage

# BMTrain's nccl is a package: who imports its internals is told what they are, by bmtrain._lazy.
__path__: list[str] = []

# Sends and receives since the outermost groupStart(): group, tensor, peer.
_sends: list[tuple[Group, torch.Tensor, int]] = []
_recvs: list[tuple[Group, torch.Tensor, int]] = []
_depth = 0


def allReduce(src: Memory, dst: Memory, op: ReduceOp, comm: Group) -> None:
    """Write the reduction of every rank's ``src`` to ``dst``."""
    reduce(src, dst, op, comm.rank, comm)


def allGather(src: Memory, dst: Memory, comm: Group) -> None:
    """Write the ``src`` of all ranks, one after the other, to ``dst``."""
    part = _flat(_tensor(src))
    gathered = part.new_empty(comm.size * part.numel())
    comm.all_gather(gathered, part).wait()
    _write(dst, gathered)


def reduceScatter(src: Memory, dst: Memory, op: ReduceOp, comm: Group) -> None:
    """Reduce every rank's ``src`` and write this rank's equal part of it to ``dst``."""
    whole = _flat(_tensor(src, op))
    if whole.numel() % comm.size:
        raise ValueError(
            f"reduceScatter cuts {whole.numel()} elements into {comm.size} equal parts, which is"
            " not possible."
        )
    part = whole.new_empty(whole.numel() // comm.size)
    comm.reduce_scatter(part, whole, op).wait()
    _write(dst, part)


def broadcast(src: Memory, dst: Memory, root: int, comm: Group) -> None:
    """Write the ``src`` of rank ``root`` to every ``dst``; other ranks' ``src`` is ignored."""
    sent = _tensor(src if comm.rank == root else dst).clone(memory_format=torch.contiguous_format)
    comm.broadcast(sent, root).wait()
    _write(dst, sent)


def reduce(src: Memory, dst: Memory, op: ReduceOp, root: int, comm: Group) -> None:
    """Write the reduction of every rank's ``src`` to ``dst`` of rank ``root``; other ranks' ``dst``
    stays as it is.
    """
    total = _tensor(src, op).clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, op).wait()
    if comm.rank == root:
        _write(dst, total)


def send(src: Memory, peer: int, comm: Group) -> None:
    """Send ``src`` to rank ``peer`` of the group."""
    tensor = _flat(_tensor(src))
    if _depth:
        _sends.append((comm, tensor, peer))
    else:
        comm.send(tensor, peer).wait()


def recv(dst: Memory, peer: int, comm: Group) -> None:
    """Receive into ``dst`` (contiguous) from rank ``peer`` of the group."""
    tensor = _tensor(dst)
    if not tensor.is_contiguous():
        raise ValueError(
            f"recv needs contiguous memory, and this tensor has strides {tensor.stride()}."
        )
    if _depth:
        _recvs.append((comm, tensor, peer))
    else:
        comm.recv(tensor, peer).wait()


def groupStart() -> None:
    """Postpone the sends and receives that follow until the matching :func:`groupEnd`. Calls may
    be nested.
    """
    global _depth
    current()
    _depth += 1


def groupEnd() -> None:
    """Start all sends and receives since the outermost :func:`groupStart` as one, and wait
    for them.
    """
    global _depth
    if _depth == 0:
        raise RuntimeError("groupEnd() without groupStart().")
    _depth -= 1
    if _depth == 0:
        sends, recvs = _sends[:], _recvs[:]
        _sends.clear()
        _recvs.clear()
        groups = list(dict.fromkeys(group for group, _, _ in sends + recvs))
        works = [
            group.exchange(
                [(tensor, peer) for other, tensor, peer in sends if other is group],
                [(tensor, peer) for other, tensor, peer in recvs if other is group],
            )
            for group in groups
        ]
        for work in works:
            work.wait()


def commCount(comm: Group) -> int:
    """Number of ranks in the group."""
    return comm.size


def commRank(comm: Group) -> int:
    """This process's rank in the group."""
    return comm.rank


def _tensor(memory: Any, op: str | None = None) -> torch.Tensor:
    current()
    if isinstance(memory, torch.Tensor):
        return memory.detach()
    if isinstance(memory, torch.TypedStorage):
        untyped = memory._untyped_storage
        tensor = torch.empty(0, dtype=memory.dtype, device=untyped.device)
        return tensor.set_(untyped, 0, (untyped.nbytes() // memory.dtype.itemsize,), (1,))
    if not isinstance(memory, torch.UntypedStorage):
        raise TypeError(f"Expected a tensor or a storage, not {type(memory).__name__}.")
    if op is not None:
        raise TypeError("An untyped storage is bytes, which cannot be reduced. Pass the tensor.")
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1)


def _write(dst: Memory, values: torch.Tensor) -> None:
    target = _tensor(dst)
    if target.numel() != values.numel():
        raise ValueError(f"dst has {target.numel()} elements, and the result has {values.numel()}.")
    target.copy_(values.view(target.shape))
