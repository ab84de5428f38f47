"""Checks of tensors before their addresses are passed to compiled code, where a wrong one
corrupts memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BYTE_FLAGS = (torch.uint8, torch.bool)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise :class:`ValueError` unless ``tensor`` is on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, and must be on {device} like the others.")


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise :class:`TypeError` unless the dtype of ``tensor`` is one of ``allowed``."""
    if tensor.dtype not in allowed:
        raise TypeError(
            f"{name} must be of dtype {' or '.join(map(str, allowed))}, not {tensor.dtype}."
        )


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise :class:`ValueError` unless ``tensor`` has ``shape``."""
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}.")


def check_one_element(name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`ValueError` unless ``tensor`` has one element."""
    if tensor.numel() != 1:
        raise ValueError(f"{name} must have one element, not {tensor.numel()}.")


def check_same_length(**lists: Sequence[object]) -> None:
    """Raise :class:`ValueError` unless all lists are equally long."""
    lengths = {name: len(items) for name, items in lists.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(
            f"The lists must have one entry per tensor each; their lengths are {found}."
        )


def number_at(name: str, number: torch.Tensor | None, device: torch.device) -> int:
    """Return the address of a float32 number on ``device``; 0 for None."""
    if number is None:
        return 0
    check_one_element(name, number)
    check_dtype(name, number, torch.float32)
    check_device(name, number, device)
    return number.data_ptr()


def as_flag(name: str, flag: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``flag`` in a dtype that kernels can read, bytes or float32, without waiting for
    its value.
    """
    check_one_element(name, flag)
    check_device(name, flag, device)
    return flag if flag.dtype in (*BYTE_FLAGS, torch.float32) else flag.ne(0)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order of dimensions, and are not
    stored negated.

    >>> x = torch.empty(4, 6)
    >>> is_dense(x), is_dense(x.t()), is_dense(x[:, :5]), is_dense(x[:1].expand(4, 6))
    (True, True, False, False)
    """
    if tensor.is_neg():  # torch's flag that elements are stored with the opposite sign
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def have_one_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the n-th element in memory has the same index in each tensor. The tensors have
    one shape.
    """
    if any(tensor.is_neg() for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    strides = tensors[0].stride()
    return is_dense(tensors[0]) and all(tensor.stride() == strides for tensor in tensors)
