"""``set_locality``: declare how the parameters of a plain module lie along an axis of the rank
grid.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_params.guards.first_values import FirstValues
from bmt_params.guards.shardable import check_can_be_sharded
from bmt_params.locality import Locality, local_axes_of
from bmt_params.make_distributed import make_distributed
from bmt_params.modules.distributed_module import DistributedModule, extend
from bmt_params.parameter import DistributedParameter
from bmt_params.shard import own_part, whole_tensor_shard
from bmt_params.uninitialized import has_values

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def set_locality(module: ModuleT, locality: Locality) -> ModuleT:
    """Declare ``locality`` for all parameters of ``module``, in place, and return the module.

    For a module of plain torch that every rank along an axis holds whole, such as a norm or a head
    beside layers that are split along ``tp``: ``gradients="whole"`` if each rank computes it from
    the same activations, ``"share"`` if each computes it from rows of its own. The parameters
    become :class:`DistributedParameter`. Those that have a locality along the axis, as the weights
    of parallel layers have, keep it. Call it before the module becomes a Block or is wrapped. In a
    grid without the axis nothing changes. Nothing is communicated.

    Raises :class:`ConfigError`, and changes nothing, if a parameter is sharded already; also for a
    locality that cuts, because a plain module would compute with its slice as with the whole.
    """
    topology = current().topology
    if locality.split_dim is not None:
        raise ConfigError(
            f"set_locality declares modules that every rank along {locality.axis!r} holds whole,"
            f" and got {locality}. To cut a parameter, make it a DistributedParameter(slice,"
            " locality=[...]) in a module that computes with slices."
        )
    if topology.axis_size(locality.axis) == 1:
        return module
    check_can_be_sharded(module)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        _check_is_plain(name, parameter, locality)
    for parameter in parameters.values():
        if not isinstance(parameter, DistributedParameter):
            declare(parameter, locality)
    for part in module.modules():
        if any(
            isinstance(parameter, DistributedParameter) for parameter in part._parameters.values()
        ):
            extend(part, DistributedModule)
    return module


@torch.no_grad()
def declare(parameter: nn.Parameter, locality: Locality) -> DistributedParameter:
    """Turn a plain, whole ``parameter`` into a distributed one with this ``locality``, cut along
    the axis if that says so.
    """
    runtime = current()
    whole = own = parameter.detach()
    topology = runtime.topology
    if locality.split_dim is not None:
        own = locality.cut(
            own, topology.axis_rank(locality.axis), topology.axis_size(locality.axis)
        )
    shard = whole_tensor_shard(
        own.shape, topology.shard_group(local_axes_of([locality])), topology.replica_group
    )
    made = make_distributed(parameter, shard, own_part(own, shard, runtime.device))
    made.locality = (locality,)
    # The whole, because every rank was given it and cuts its slice itself.
    runtime.state(FirstValues).note(
        made, whole, topology.sharing_group(), is_filled=has_values(made)
    )
    return made


def _check_is_plain(name: str, parameter: nn.Parameter, locality: Locality) -> None:
    is_declared = any(other.axis == locality.axis for other in getattr(parameter, "locality", ()))
    if isinstance(parameter, DistributedParameter) and not is_declared:
        raise ConfigError(
            f"{name} is sharded already, and cannot be declared as {locality}. Call set_locality()"
            " on the plain module, before it becomes a Block or is wrapped; give a"
            " DistributedParameter its locality when it is made."
        )
