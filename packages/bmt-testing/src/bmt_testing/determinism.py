"""``check_is_deterministic``: whether a user's model computes the same twice, which a
comparison needs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bmt_testing.user_model import UserModel, seeded


@functools.cache
def check_is_deterministic(user: UserModel) -> None:
    """Raise ValueError, which names what differs, unless two plain runs of the model are equal.

    The model and the batch are made twice with one seed, and the model is called with two seeds.
    """
    cpu = torch.device("cpu")
    first, second = user.model(0, torch.float64), user.model(0, torch.float64)
    if name := _first_unlike(_tensors_of(first), _tensors_of(second)):
        raise ValueError(
            f"{user.model_fn.name}() is not deterministic: {name} differs between two calls with"
            " one seed. Draw values from torch's generator or from random, which are seeded."
        )
    batches = [dict(enumerate(tree_leaves(user.batch(0, torch.float64, cpu)))) for _ in range(2)]
    if (place := _first_unlike(*batches)) is not None:
        raise ValueError(
            f"{user.batch_fn.name}(0) is not deterministic: tensor {place} differs between two"
            " calls. Draw values from torch's generator or from random, which are seeded."
        )
    outputs = [_outputs(user, model.train(), seed) for seed, model in enumerate((first, second))]
    if name := _first_unlike(*outputs):
        raise ValueError(
            f"The model of {user.model_fn.name}() is not deterministic: {name} differs between two"
            " runs with the same values and batch, but other random numbers. Ranks draw numbers of"
            " their own, so their results could not be compared: set dropout to 0 in the model."
        )


def _outputs(user: UserModel, model: nn.Module, seed: int) -> dict[Any, Any]:
    """Return what each module of ``model`` gives for one batch, in the order in which they end, and
    the loss.
    """
    found: dict[Any, Any] = {}

    def note(name: str, module: nn.Module, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            found[f"the output of {name} ({type(module).__name__})", len(found), place] = (
                tensor.detach().clone()
            )

    for name, module in model.named_modules():
        label = name or "the model"
        module.register_forward_hook(
            lambda module, _, output, label=label: note(label, module, output)
        )
    batch = user.batch(0, torch.float64, torch.device("cpu"))
    with seeded(seed + 1):
        loss = user.loss(model, batch)
    return {**found, ("the loss", 0, 0): loss.detach()}


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _first_unlike(first: dict[Any, Any], second: dict[Any, Any]) -> Any:
    """Return the name of the first value that differs, None if none does. Equal NaN are equal."""
    for key in [*first, *(key for key in second if key not in first)]:
        one, other = first.get(key), second.get(key)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            is_same = one.shape == other.shape and torch.allclose(
                one, other, rtol=0, atol=0, equal_nan=True
            )
        else:
            is_same = one is not None and one == other
        if not is_same:
            return key[0] if isinstance(key, tuple) else key
    return None
