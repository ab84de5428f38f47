"""A model's tensors by name, each with the shape that it has in plain torch, whichever part of it
this rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from bmt_core.torch_internals import unsaved_buffers
from bmt_params.parameter import DistributedParameter
from bmt_params.state.index import EXTRA_STATE


def whole_shape(value: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter or buffer. Communicates nothing."""
    return value.whole_shape if isinstance(value, DistributedParameter) else value.shape


def write_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` to ``target``, in its dtype. Communicates nothing."""
    with torch.no_grad():
        if not isinstance(target, DistributedParameter):
            target.copy_(whole)
            return
        target.wait_for_updates(despite_errors=True)
        target.copy_(target.local_part(target.own_slice(whole)))


def named_targets(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor | None]]:
    """Yield (name, module, tensor) for every key that ``load_state_dict`` sets: every name of a
    tie; extra state with None.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        persistent = [name for name in module._buffers if name not in unsaved_buffers(module)]
        buffers = ((name, module._buffers[name]) for name in persistent)
        for name, tensor in chain(module._parameters.items(), buffers):
            if tensor is not None:
                yield prefix + name, module, tensor
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            yield prefix + EXTRA_STATE, module, None


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tied tensors: those that are the same view of the
    same memory.
    """
    # 0: a quantized tensor of torchao, for example, which has its elements in other tensors.
    address = tensor.data_ptr() or id(tensor)
    return address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device
