"""``whole``: declare a plain module that every rank along ``tp`` computes whole."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from bmt_params import Locality, set_locality
from bmt_tp.tensor_group import AXIS

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def whole(module: ModuleT) -> ModuleT:
    """Declare that every rank along ``tp`` computes ``module`` whole, from the same activations,
    and return it.

    For plain modules beside parallel layers: a value head, an adapter of the head, the norms and
    embeddings of a model that passes whole activations from layer to layer
    (``RowParallelLinear(all_reduce_output=True)``). Each of these ranks has the whole gradient of
    such a module, so gradients are not summed over ``tp``. Call it before the module becomes a
    Block or is wrapped. Modules inside of ``module`` are included. With ``tp_size=1`` nothing
    changes. Errors: see :func:`bmt_params.set_locality`.
    """
    return set_locality(module, Locality(AXIS, gradients="whole"))
