"""``check_is_deterministic``: whether a user's model computes the same twice, which a
comparison needs.
"""

from __future__ import annotations

import functools
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_testing.user_model import BatchLoss, UserModel, seeded


@functools.cache
def check_is_deterministic(user: UserModel) -> bool:
    """Return whether the model's loss comes with a count. ValueError, which names what differs,
    unless two plain runs of the model are equal.

    The model and the batch are made twice with one seed, and the model is called with two seeds, or
    with one if its noise is declared. A user's loop is not called.
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
    if user.train is not None:
        return False
    seeds = (0, 0 if user.noise else 1)
    pairs = zip((first, second), seeds, strict=True)
    outputs = [_outputs(user, model.train(), seed) for model, seed in pairs]
    if name := _first_unlike(*outputs):
        operation = _first_unlike_operation(user)
        by = f", first in the operation {operation}" if operation else ""
        raise ValueError(
            f"The model of {user.model_fn.name}() is not deterministic: {name} differs between two"
            f" runs with the same values and batch, but other random numbers{by}. Set dropout to 0"
            " in the model, or if its noise is to be compared, declare it: noise=True."
        )
    return ("the count", 0, 0) in outputs[0]


def _outputs(user: UserModel, model: nn.Module, seed: int) -> dict[Any, Any]:
    """Return what each module of ``model`` gives for one batch, in the order in which they end, the
    loss and the gradients.
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
    loss = _train_once(user, model, seed)
    found["the loss", 0, 0] = loss.total.detach()
    if loss.count is not None:
        found["the count", 0, 0] = torch.as_tensor(loss.count)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}", 0, 0] = parameter.grad
    return found


def _train_once(user: UserModel, model: nn.Module, seed: int) -> BatchLoss:
    batch = user.batch(0, torch.float64, torch.device("cpu"))
    with seeded(seed + 1):
        loss = user.loss(model, batch)
        if loss.total.requires_grad:
            loss.total.backward()  # type: ignore[no-untyped-call]
    return loss


def _first_unlike_operation(user: UserModel) -> str | None:
    """Return torch's name of the first operation whose result differs between two runs with other
    random numbers; None if it is none of torch's.
    """
    runs = []
    for seed in range(2):
        model = user.model(0, torch.float64).train()
        with _Operations() as operations:
            _train_once(user, model, seed)
        runs.append(operations.results)
    for first, second in zip_longest(*runs):
        if first is None or second is None or first[0] != second[0]:
            return None
        if _first_unlike(*(dict(enumerate(tensors)) for _, tensors in (first, second))) is not None:
            name: str = first[0]
            return name
    return None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name and the results of each operation of torch that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name: str = func.name()
        if "empty" not in name:  # memory without values
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.results.append((name, [tensor.detach().clone() for tensor in tensors]))
        return output


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
