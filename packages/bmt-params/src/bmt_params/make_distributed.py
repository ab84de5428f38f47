"""``make_distributed``: turns a parameter of a module into a distributed one."""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.torch_internals import set_data, swap_memory
from bmt_params.guards.shardable import check_is_ordinary
from bmt_params.parameter import DistributedParameter
from bmt_params.shard import Shard
from bmt_params.uninitialized import has_values, mark_uninitialized


def make_distributed(
    parameter: torch.nn.Parameter, shard: Shard, part: torch.Tensor
) -> DistributedParameter:
    """Turn ``parameter`` into a :class:`DistributedParameter` that keeps ``part``; the object stays
    the same one.

    So modules, ties and optimizers that refer to it stay valid. A parameter without values
    stays without.
    """
    is_uninitialized = not has_values(parameter)
    if not isinstance(parameter, DistributedParameter):
        check_is_ordinary(parameter)
        if parameter.is_meta or parameter.is_inference():
            _become_ordinary(parameter, part.device)
        # A graph made before may keep the gradient accumulator alive, which expects the old shape;
        # a change of dtype drops it.
        other_dtype = torch.float64 if part.dtype == torch.float32 else torch.float32
        parameter.data = torch.empty(0, dtype=other_dtype, device=part.device)
        parameter.data = part
        parameter.__class__ = DistributedParameter
        made: Any = parameter
        made._set_layout(shard, None, ())
    else:
        made = parameter
        made.owner_reference = None
        set_data(made, part)
        made._shard = shard
        made._sum = None  # of the part that it had
    result: DistributedParameter = made
    # It is the whole parameter's, or another part's.
    if result.grad is not None and result.grad.shape != part.shape:
        result.grad = None
    if is_uninitialized:
        mark_uninitialized(result)
    return result


def _become_ordinary(parameter: torch.nn.Parameter, device: torch.device) -> None:
    # torch does not set a meta tensor's data to another device's, and a tensor of inference mode
    # stays one, but two tensors can be swapped under their Python objects. Not by
    # torch.utils.swap_tensors: it refuses a parameter with weak references, as nn.LSTM has to its
    # own.
    other = torch.nn.Parameter(
        torch.empty(0, dtype=parameter.dtype, device=device), parameter.requires_grad
    )
    swap_memory(parameter, other)
