"""Models of PEFT: what is saved of them are the adapters, not the frozen model below."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bmt_core import DistributedParameter, rank
from bmt_core.comm.objects import broadcast_object
from bmt_core.run.runtime import current
from bmt_core.state.model_tensors import named_targets


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a ``PeftModel``."""
    peft = sys.modules.get("peft")  # a program with such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """Return what PEFT saves of ``model`` and what is trained, by name: this rank's parts.
    Collective.
    """
    from peft import get_peft_model_state_dict

    state = {name: tensor for name, _, tensor in named_targets(model) if tensor is not None}
    saved: set[int] = set()
    for adapter in model.peft_config:
        saved |= {
            id(tensor)
            for tensor in get_peft_model_state_dict(model, state, adapter_name=adapter).values()
        }
    own = {name for name, tensor in state.items() if id(tensor) in saved or tensor.requires_grad}
    # PEFT may have asked the hub, which may answer one rank only.
    names = broadcast_object(own, current().world)
    return {name: tensor for name, tensor in state.items() if name in names}


@torch.no_grad()
def save_adapters(model: Any, directory: str) -> None:
    """Write the adapters as PEFT's ``save_pretrained`` does. Collective; rank 0 holds them whole
    for it.
    """
    state: dict[str, Any] = {
        name: tensor.gather_on(0) if isinstance(tensor, DistributedParameter) else tensor.detach()
        for name, tensor in adapter_state(model).items()
    }
    model.save_pretrained(directory, state_dict=state, is_main_process=rank() == 0)


class PartOfModel(nn.Module):
    """A module with some tensors of another one, under the names that they have there: to save and
    load them alone.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            if isinstance(tensor, nn.Parameter):
                module._parameters[last] = tensor
            else:
                module._buffers[last] = tensor
