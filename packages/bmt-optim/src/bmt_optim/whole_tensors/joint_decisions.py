"""Finds out whether an optimizer decides something from all of its tensors, by trying it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import rank
from bmt_core.user_warnings import warn_user

_STEPS = 4
# Of the largest update; products of other batches of matrices are rounded otherwise.
_TOLERANCE = 0.02
Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def check_steps_alone(
    factory: Factory, options: Mapping[str, Any], num_dims: Iterable[int], kind: str
) -> None:
    """Raise :class:`ConfigError` if a tensor is stepped otherwise beside others than alone.

    ``factory`` makes optimizers of the class ``kind``. They step two small tensors of each of
    ``num_dims``, with gradients of other sizes: by one optimizer, and by one for each tensor. That
    finds a step size or a norm of all tensors, but not what begins after more steps, or with larger
    gradients. An optimizer that draws random numbers is not compared. One that fails is warned
    about on rank 0. Nothing is communicated.
    """
    shapes = [
        shape
        for dims in sorted(set(num_dims))
        for shape in ((4, 6, 2, 3)[:dims], (6, 3, 4, 2)[:dims])
    ]
    shapes = [shape for shape in shapes if shape] or [(4,), (6,)]
    try:
        with torch.random.fork_rng(devices=[]):
            joint = _updates(factory, options, [shapes], seed=1)
            again = _updates(factory, options, [shapes], seed=2)
            alone = _updates(factory, options, [[shape] for shape in shapes], seed=1)
    except Exception as error:
        if rank() == 0:
            warn_user(
                f"{kind} could not be tried on small tensors ({type(error).__name__}: {error}), to"
                " find out whether it decides something from all of its tensors. If it does (a step"
                " size, a norm of all gradients), pass together=True."
            )
        return
    is_random = not all(map(torch.equal, joint, again))
    if not is_random and not all(map(_is_alike, joint, alone)):
        raise ConfigError(
            f"{kind} steps a tensor otherwise beside others than alone: it decides something from"
            " all of its tensors, such as a step size or a norm. Use bmt.optim.whole(...,"
            " together=True): then one rank steps all tensors."
        )


def _updates(
    factory: Factory,
    options: Mapping[str, Any],
    groups: Sequence[Sequence[tuple[int, ...]]],
    seed: int,
) -> list[torch.Tensor]:
    """Return what steps change in tensors of the shapes in ``groups``, each stepped by
    one optimizer.
    """
    torch.manual_seed(seed)
    numbers = torch.Generator().manual_seed(0)
    made = [
        [
            torch.nn.Parameter(torch.randn(shape, generator=numbers, device="cpu"))
            for shape in shapes
        ]
        for shapes in groups
    ]
    tensors = [tensor for of_group in made for tensor in of_group]
    before = [tensor.detach().clone() for tensor in tensors]
    optimizers = [factory([{**options, "params": of_group}]) for of_group in made]
    for step in range(_STEPS):
        for number, tensor in enumerate(tensors):
            tensor.grad = torch.randn(tensor.shape, generator=numbers, device="cpu") * 10.0 ** (
                number + step - 1
            )
        for optimizer in optimizers:
            optimizer.step()
    return [tensor.detach() - old for tensor, old in zip(tensors, before, strict=True)]


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())
