"""Checks of arguments before they are passed to NCCL, which would write to a wrong address, or wait
for ever.
"""

from __future__ import annotations

import torch

from bmt_core.comm.protocols import REDUCE_OPS, ReduceOp

# Numbers of ncclRedOp_t.
_OPS: dict[ReduceOp, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
# Numbers of ncclDataType_t, and how many of them make one element.
_ELEMENTS = {
    torch.int8: (0, 1),
    torch.uint8: (1, 1),
    torch.bool: (1, 1),
    torch.int32: (2, 1),
    torch.uint32: (3, 1),
    torch.int64: (4, 1),
    torch.uint64: (5, 1),
    torch.float16: (6, 1),
    torch.float32: (7, 1),
    torch.float64: (8, 1),
    torch.bfloat16: (9, 1),
    torch.complex32: (6, 2),
    torch.complex64: (7, 2),
    torch.complex128: (8, 2),
}


def check_tensor(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise :class:`ValueError` unless ``tensor`` is contiguous and on ``device``."""
    if tensor.device != device:
        raise ValueError(
            f"{what} is on {tensor.device}, and must be on {device} (or all tensors on the CPU)."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous, and has shape {tuple(tensor.shape)} and strides"
            f" {tensor.stride()}. Call .contiguous() first."
        )


def check_same_dtype(operation: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Raise :class:`TypeError` unless both have one dtype."""
    if output.dtype != input.dtype:
        raise TypeError(
            f"{operation}: output is of dtype {output.dtype}, and input of {input.dtype}. They must"
            " be equal."
        )


def check_widening(output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> None:
    """Raise unless slices of ``input`` can be summed in the dtype of ``output``."""
    if op not in ("sum", "avg"):
        raise ValueError(f"reduce_scatter into a wider dtype knows sum and avg, not {op}.")
    is_wider = (
        input.is_floating_point() and torch.promote_types(input.dtype, output.dtype) == output.dtype
    )
    if not is_wider or not output.is_floating_point():
        raise TypeError(
            f"reduce_scatter: output is of dtype {output.dtype}, and input of {input.dtype}."
            " They must be equal, or the output float32 (float64) and the input a narrower float."
        )


def check_whole_and_part(
    operation: str,
    whole_name: str,
    whole: torch.Tensor,
    part_name: str,
    part: torch.Tensor,
    size: int,
) -> None:
    """Raise :class:`ValueError` unless ``whole`` has ``size`` times the elements of ``part``."""
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{operation}: {whole_name} has {whole.numel()} elements, and must have"
            f" {size * part.numel()}: those of {part_name} ({part.numel()}) for each of"
            f" {size} ranks."
        )


def check_apart(operation: str, whole: torch.Tensor, part: torch.Tensor, rank: int) -> None:
    """Raise :class:`ValueError` if ``part`` shares memory with ``whole``, unless it is its
    slice ``rank``.
    """
    offset = part.data_ptr() - whole.data_ptr()
    if -part.nbytes < offset < whole.nbytes and offset != rank * part.nbytes:
        raise ValueError(
            f"{operation}: input and output share memory, {offset} bytes after the beginning of the"
            f" larger one. Only this rank's own slice, {rank * part.nbytes} bytes after it, may"
            " be shared."
        )


def check_member(
    operation: str, name: str, member: int, ranks: tuple[int, ...], *, other_than: int | None = None
) -> None:
    """Raise :class:`ValueError` unless ``member`` is an index of ``ranks``, and
    not ``other_than``.
    """
    if not 0 <= member < len(ranks):
        raise ValueError(
            f"{operation}: {name} must be an index of the group's ranks {ranks}, not {member}."
        )
    if member == other_than:
        raise ValueError(f"{operation}: {name} {member} is this rank itself.")


def reduction(operation: str, tensor: torch.Tensor, op: ReduceOp) -> tuple[int, int, int]:
    """Return NCCL's numbers for the element type and the operation, and the number of elements;
    TypeError if it knows none.
    """
    if op not in _OPS:
        raise ValueError(f"{operation}: op must be one of {', '.join(REDUCE_OPS)}, not {op!r}.")
    if tensor.dtype not in _ELEMENTS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ELEMENTS)
        raise TypeError(f"{operation} cannot reduce {tensor.dtype}. NCCL reduces {known}.")
    if tensor.dtype.is_complex and op not in ("sum", "avg"):
        raise TypeError(
            f"{operation}: numbers of {tensor.dtype} have a sum and an average, no {op}."
        )
    number = _OPS[op]
    if tensor.dtype == torch.bool:
        if op == "avg":
            raise TypeError(f"{operation}: truth values (torch.bool) have no average.")
        # As in torch, the sum of truth values is whether any is true. Summed as bytes they would
        # give other values than 0 and 1.
        number = _OPS["max"] if op == "sum" else number
    element, times = _ELEMENTS[tensor.dtype]
    return element, number, times * tensor.numel()
