"""Collectives for users: differentiable, on any tensor, over any group.

See ``[Note: what is differentiated]`` in :mod:`bmt_core.comm.autograd`. ``comm=None`` means all
ranks. Every function is collective over its group and raises :class:`NotInitializedError` (a
``RuntimeError``) before ``init_distributed()``. In compiled code it runs between two
graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.comm.autograd import AllGather, AllReduce, Broadcast, ReduceScatter, materialized
from bmt_core.comm.protocols import REDUCE_OPS, Group, ReduceOp
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.torch_internals import never_compiled


@never_compiled
def all_gather(
    x: torch.Tensor, comm: Group | None = None, *, sum_gradients: bool = False
) -> torch.Tensor:
    """Return the ``x`` of every rank, of shape ``(W, *x.shape)``.

    Backward: this rank's part of its own gradient. With ``sum_gradients=True``, for losses in which
    the rows of several ranks meet, backward is collective, too, and returns this rank's part of the
    sum of all ranks' gradients.
    """
    group = _group(x, comm)
    gathered: torch.Tensor = AllGather.apply(x, group, sum_gradients)  # type: ignore[no-untyped-call]
    return gathered


@never_compiled
def all_reduce(x: torch.Tensor, op: ReduceOp = "sum", comm: Group | None = None) -> torch.Tensor:
    """Return the reduction of ``x`` over the ranks, the same on all; ``op`` is sum, avg, max, min
    or prod.

    Backward: sum passes the gradient on, avg divides it by W, max and min pass it where the input
    equals the output, prod multiplies it by the product of the other ranks' inputs.
    """
    group = _group(x, comm)
    _check_op(op, x)
    reduced: torch.Tensor = AllReduce.apply(x, op, group)  # type: ignore[no-untyped-call]
    return reduced


@never_compiled
def reduce_scatter(
    x: torch.Tensor, op: ReduceOp = "sum", comm: Group | None = None
) -> torch.Tensor:
    """Reduce ``x`` over the ranks and return this rank's slice of dim 0, which W must divide;
    ``op`` as in :func:`all_reduce`.

    Backward of sum: the gathered gradients of all ranks; of avg: these divided by W. Other
    operations have no backward.
    """
    group = _group(x, comm)
    _check_op(op, x)
    if x.dim() == 0 or x.shape[0] % group.size:
        raise ValueError(
            f"reduce_scatter cuts dim 0 into {group.size} equal parts, and the tensor has shape"
            f" {tuple(x.shape)}. Pad dim 0 to a multiple of the number of ranks."
        )
    scattered: torch.Tensor = ReduceScatter.apply(x, op, group)  # type: ignore[no-untyped-call]
    return scattered


@never_compiled
def broadcast(src: torch.Tensor, root: int, comm: Group | None = None) -> torch.Tensor:
    """Return the ``src`` of the group's rank ``root`` on every rank; all pass the same shape
    and dtype.

    Backward: the gradients of all ranks, summed, on the root; zero on the others.
    """
    group = _group(src, comm)
    _check_rank(root, group)
    sent: torch.Tensor = Broadcast.apply(src, root, group)  # type: ignore[no-untyped-call]
    return sent


@never_compiled
def send_activations(hidden_state: torch.Tensor, next_rank: int, comm: Group | None = None) -> None:
    """Send a tensor, with its shape and dtype, to the group's rank ``next_rank``, which calls
    :func:`recv_activations`.
    """
    group = _group(hidden_state, comm)
    _check_rank(next_rank, group, is_other=True)
    tensor = materialized(hidden_state.detach())
    group.send(_header_of(tensor), next_rank).wait()
    if tensor.numel():
        group.send(tensor, next_rank).wait()


@never_compiled
def recv_activations(prev_rank: int, comm: Group | None = None) -> torch.Tensor:
    """Return the tensor that the group's rank ``prev_rank`` sends by :func:`send_activations`.

    It is on the CPU if it is there on the sender, else on this rank's device.
    """
    group = _group(None, comm)
    _check_rank(prev_rank, group, is_other=True)
    header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
    group.recv(header, prev_rank).wait()
    on_host, dtype, dims, *sizes = header.tolist()
    device = torch.device("cpu") if on_host else current().device
    tensor = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=device)
    if tensor.numel():
        group.recv(tensor, prev_rank).wait()
    return tensor


# The dtypes that can be sent; the index is sent. New ones go to the end.
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_MOST_DIMS = 64  # torch's own limit
_HEADER_LENGTH = 3 + _MOST_DIMS


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    # One message of fixed length in host memory, which the receiver must read before it
    # can allocate.
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"send_activations cannot send {tensor.dtype}. Convert the tensor first.")
    numbers = [
        int(tensor.device.type == "cpu"),
        _DTYPES.index(tensor.dtype),
        tensor.dim(),
        *tensor.shape,
    ]
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)), device="cpu")


def _group(x: Any, comm: Any) -> Group:
    runtime = current()
    if comm is not None and not isinstance(comm, Group):
        raise TypeError(
            "comm must be a group, such as current().world, or None for all ranks, not"
            f" {type(comm).__name__}."
        )
    if x is not None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"A collective moves tensors, not {type(x).__name__}.")
        if x.device.type != "cpu" and x.device != runtime.device:
            raise ValueError(
                f"The tensor is on {x.device}, and rank {runtime.rank} runs on {runtime.device}."
                f" Move it there: .to({str(runtime.device)!r})."
            )
    return runtime.world if comm is None else comm


def _check_op(op: str, x: torch.Tensor) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(f"No reduction is named {op!r}. Known: {', '.join(REDUCE_OPS)}.")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"The average of {x.dtype} tensors is no {x.dtype} tensor. Convert to a floating"
            " type first."
        )


def _check_rank(rank: int, group: Group, *, is_other: bool = False) -> None:
    if not 0 <= rank < group.size:
        raise ConfigError(
            f"Rank {rank} is outside of the group, which has {group.size} rank(s): {group.ranks}."
        )
    if is_other and rank == group.rank and group.size > 1:
        raise ConfigError(f"Rank {rank} is this rank itself. Take another one of {group.ranks}.")
