"""``parallelize``: split a plain torch model over the ranks along ``tp``."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from bmt_core import DistributedParameter, Locality
from bmt_core.modules.distributed_module import extend
from bmt_core.params.parameter import local_axes_of, make_distributed, own_part, whole_tensor_shard
from bmt_core.run.runtime import current
from bmt_tp.plans.activations import ActivationChange
from bmt_tp.plans.hugging_face import plan_for
from bmt_tp.plans.matching import match
from bmt_tp.plans.plan import Plan
from bmt_tp.tensor_group import AXIS, tensor_size

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def parallelize(model: ModuleT, plan: Plan | None = None) -> ModuleT:
    """Split ``model`` over the ranks along ``tp`` as ``plan`` says, in place, and return it.

    Every rank must pass a model with the same values, or one on the meta device; each keeps its slices. Modules stay the same
    objects with the same names, and ``save`` and ``load`` use the plain model's names and shapes. Afterwards wrap the model, or put
    its layers into Blocks: split parameters are then sharded over the other ranks, and all others over all ranks. Nothing is
    communicated.

    ``plan`` is by default that of :func:`plan_for` for the model's class. With ``tp_size=1`` nothing changes.

    Raises :class:`ConfigError`, and leaves the model as it was, if the plan does not fit it.
    """
    size = tensor_size()
    if size == 1:
        return model
    found = match(model, plan_for(model) if plan is None else plan, size)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, claim in found.claims.items():
        if claim.place is not None and not isinstance(parameters[name], DistributedParameter):
            _distribute(parameters[name], claim.place)
    for name, style in found.styles.items():
        module = model.get_submodule(name)
        extend(module, style.layer_class(module))
        module.__dict__["_bmt_style"] = style
    for name, change in found.changes.items():
        module = model.get_submodule(name)
        extend(module, ActivationChange)
        module.__dict__["_bmt_change"] = change
    for name, attributes in found.divided.items():
        module = model.get_submodule(name)
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // size)
    return model


@torch.no_grad()
def _distribute(parameter: nn.Parameter, place: Locality) -> None:
    runtime = current()
    own = parameter.detach()
    if place.split_dim is not None:
        own = place.cut(own, runtime.topology.axis_rank(AXIS), runtime.topology.axis_size(AXIS))
    shard = whole_tensor_shard(own.shape, runtime.topology.shard_group(local_axes_of([place])))
    make_distributed(parameter, shard, own_part(own, shard, runtime.device)).locality = (place,)
