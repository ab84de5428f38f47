"""Hooks on the tensors that autograd saves inside a block whose parameters are freed after forward.

Autograd saves views of whole parameters. The buffer must be gathered when such a view is unpacked, because reading a freed buffer
would crash the process. Ordinarily ``Leave`` gathers it. But backward can also reach a block without passing its outputs, from an
auxiliary loss kept on the module or a hook on an inner feature. So unpacking a view gathers the buffer if nobody has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from bmt_core.errors import BmtError
from bmt_zero.schedule.block_call import BlockCall


class _Saved(NamedTuple):
    tensor: torch.Tensor
    version: int
    is_parameter: bool


def saved_for_backward(call: BlockCall) -> saved_tensors_hooks:
    """Return the context manager for the forward of a block at level 3 without recomputation."""

    def pack(tensor: torch.Tensor) -> _Saved:
        # Detached: an operation that saves its own result must not keep itself alive.
        kept = tensor.detach()
        return _Saved(kept, kept._version, call.block.may_free_memory_of(kept))

    def unpack(saved: _Saved) -> torch.Tensor:
        if saved.is_parameter:
            call.begin_backward()
        else:
            check_version(saved.tensor, saved.version)
        return saved.tensor

    return saved_tensors_hooks(pack, unpack)


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise if ``tensor`` was modified since it had this version. torch does not check tensors that pass through hooks."""
    if tensor._version != version:
        raise BmtError(
            "A tensor that a block needs for its backward was modified by an in-place operation"
            f" (shape {tuple(tensor.shape)}, version {tensor._version} where {version} was saved)."
            " Use the out-of-place operation, or clone before it."
        )
