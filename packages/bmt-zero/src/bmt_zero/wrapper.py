"""``BMTrainModelWrapper``: make a whole plain torch model distributed, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from bmt_core.init.module_init import ModuleInit, initialize_modules, initialize_unsaved_buffers
from bmt_core.modules.distributed_module import DistributedModule, check_can_be_sharded, extend
from bmt_core.params.parameter import DistributedParameter, make_distributed, own_part, whole_tensor_shard
from bmt_core.params.uninitialized import check_values_at_first_call, materialize_buffers
from bmt_core.run.runtime import current
from bmt_zero.adapters import count_whole_parameters, see_whole_adapters
from bmt_zero.block import Block
from bmt_zero.key_value_caches import without_cache_in_recomputation
from bmt_zero.schedule.zero_run import zero_run

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def BMTrainModelWrapper(model: ModuleT, *, init: ModuleInit | bool = True) -> ModuleT:
    """Make ``model`` distributed in place and return it; works on any model of plain torch modules.

    The children of each outermost ``nn.ModuleList`` become Blocks; lists nested in them (experts) are part of the Block. All
    other parameters become :class:`DistributedParameter` and read as whole tensors. A parameter that is tied across blocks,
    or to a module outside of them, stays one parameter. Buffers move to the run's device. Every rank must pass the same
    values, and keeps its part.

    A model that was built under ``torch.device("meta")`` is then initialised, one whole block at a time. ``init(module)`` is
    called for every module, children first; the default is that of :func:`init_parameters`: ``_init_weights`` of Hugging Face
    models, or ``reset_parameters`` of modules. ``init=False`` draws nothing, for a model whose values come from a checkpoint;
    buffers that are in no checkpoint are computed anyway.
    """
    check_can_be_sharded(model)
    zero_run()  # made now, because it observes calls and gathers parameters outside of Blocks together
    # For all modules at once, so that a buffer which several modules share stays one tensor.
    materialize_buffers(model.modules(), current().device)
    blocks = list(_outermost_list_members(model))
    outside = _parameters_outside(model, blocks)
    for parameter in _shared(blocks, outside):
        _shard_alone(parameter)._shared = True
    for block in blocks:
        if not isinstance(block, Block):
            Block(block)
    for parameter in outside:
        _shard_alone(parameter)
    for module in _modules_outside(model):
        if module is model or module._parameters:
            extend(module, DistributedModule)
        without_cache_in_recomputation(module)
        count_whole_parameters(module)
    see_whole_adapters(list(_modules_outside(model)))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DistributedParameter):
            parameter.label = name
    if init is False:
        initialize_unsaved_buffers(model)
        check_values_at_first_call(model)
    else:
        initialize_modules(model, None if init is True else init)
    return model


def _outermost_list_members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each member of the outermost module lists once."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, Block):
                continue
            if isinstance(child, nn.ModuleList):
                yield from (member for member in child if id(member) not in seen and not seen.add(id(member)))  # type: ignore[func-returns-value]
            else:
                yield from walk(child)

    yield from walk(module)


def _modules_outside(model: nn.Module) -> Iterator[nn.Module]:
    pending = [model]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen or isinstance(module, Block):
            continue
        seen.add(id(module))
        yield module
        pending += module.children()


def _parameters_outside(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Parameter]:
    inside = {id(module) for block in blocks for module in block.modules()}
    found: dict[int, nn.Parameter] = {}
    for module in _modules_outside(model):
        if id(module) not in inside:
            found |= {id(p): p for p in module._parameters.values() if p is not None}
    return list(found.values())


def _shared(blocks: list[nn.Module], outside: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that live in several blocks, or in a block and outside."""
    owners: dict[int, int] = {id(parameter): 1 for parameter in outside}
    shared: dict[int, nn.Parameter] = {}
    for block in blocks:
        for parameter in block.parameters():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
            if owners[id(parameter)] > 1:
                shared[id(parameter)] = parameter
    return list(shared.values())


def _shard_alone(parameter: nn.Parameter) -> DistributedParameter:
    if isinstance(parameter, DistributedParameter):
        return parameter
    runtime = current()
    shard = whole_tensor_shard(parameter.shape, runtime.topology.shard_group())
    with torch.no_grad():
        return make_distributed(parameter, shard, own_part(parameter, shard, runtime.device))
