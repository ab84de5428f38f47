"""The modules of a model that are in no Block: their parameters are sharded one by one, when the
model is wrapped and when more are put into it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bmt_core.run.runtime import current
from bmt_params.make_distributed import make_distributed
from bmt_params.modules.distributed_module import DistributedModule, extend
from bmt_params.parameter import DistributedParameter, note_first_values
from bmt_params.shard import own_part, whole_tensor_shard
from bmt_params.uninitialized import has_values


def modules_outside(model: nn.Module) -> Iterator[nn.Module]:
    """Yield ``model`` and the modules in it, each once, without Blocks and what is in them."""
    pending = [model]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen or "_bmt_block" in module.__dict__:
            continue
        seen.add(id(module))
        yield module
        pending += module.children()


def shard_outside(model: nn.Module) -> None:
    """Make the modules of ``model`` that are in no Block read whole parameters, and their ordinary
    parameters distributed.
    """
    for module in modules_outside(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                shard_alone(parameter)
        # The model in any case, because its call is the outermost one.
        if module is model or module._parameters:
            extend(module, DistributedModule)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DistributedParameter):
            parameter.label = name


def shard_alone(parameter: nn.Parameter) -> DistributedParameter:
    """Make ``parameter`` distributed, unless it is so: each rank keeps an equal part of it."""
    if isinstance(parameter, DistributedParameter):
        return parameter
    runtime = current()
    topology = runtime.topology
    shard = whole_tensor_shard(parameter.shape, topology.shard_group(), topology.replica_group)
    with torch.no_grad():
        whole = parameter.detach()
        sharded = make_distributed(parameter, shard, own_part(parameter, shard, runtime.device))
    note_first_values(sharded, whole, is_filled=has_values(sharded))
    return sharded
