"""``parallelize``: split a plain torch model over the ranks along ``tp``."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from bmt_core.run.runtime import current
from bmt_params import DistributedModule, DistributedParameter
from bmt_params.guards.same_data import LossComparison
from bmt_params.modules.declared_locality import declare
from bmt_params.modules.distributed_module import extend
from bmt_tp.plans.activations import ActivationChange
from bmt_tp.plans.hugging_face import generates, plan_for
from bmt_tp.plans.matching import match
from bmt_tp.plans.plan import Plan
from bmt_tp.plans.same_inputs import TakesSameInputs
from bmt_tp.plans.split_layers import RefusesGeneration
from bmt_tp.tensor_group import AXIS, tensor_size

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def parallelize(model: ModuleT, plan: Plan | None = None) -> ModuleT:
    """Split ``model`` over the ranks along ``tp`` as ``plan`` says, in place, and return it.

    Every rank must pass a model with the same values, or one on the meta device; each keeps its
    slices. Modules stay the same objects with the same names, and ``save`` and ``load`` use the
    plain model's names and shapes. All parameters become :class:`DistributedParameter`: split ones
    are sharded over the other ranks, all others over all ranks. Afterwards wrap the model, or put
    its layers into Blocks, which gather a layer at once. Nothing is communicated.

    Ranks along ``tp`` must call the model with the same inputs, and compute the same loss from what
    it returns. Both are compared in the first steps and now and then afterwards: ``ValueError`` on
    all of these ranks.

    ``plan`` is by default that of :func:`plan_for` for the model's class. With ``tp_size=1``
    nothing changes.

    Raises :class:`ConfigError`, and leaves the model as it was, if the plan does not fit it.
    """
    size = tensor_size()
    if size == 1:
        return model
    found = match(model, plan_for(model) if plan is None else plan, size)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, claim in found.claims.items():
        if not isinstance(parameters[name], DistributedParameter):
            declare(parameters[name], claim.locality).label = name
        extend(model.get_submodule(name.rpartition(".")[0]), DistributedModule)
    for name, style in found.styles.items():
        module = model.get_submodule(name)
        extend(module, style.layer_class(module))
        module.__dict__["_bmt_style"] = style
    for name, change in found.changes.items():
        module = model.get_submodule(name)
        extend(module, ActivationChange)
        module.__dict__["_bmt_change"] = change
    for module in filter(generates, list(model.modules())):
        extend(module, RefusesGeneration)
    for name, attributes in found.divided.items():
        module = model.get_submodule(name)
        for attribute in attributes:
            setattr(module, attribute, getattr(module, attribute) // size)
    extend(model, TakesSameInputs)
    current().state(LossComparison).axes.add(AXIS)
    return model
