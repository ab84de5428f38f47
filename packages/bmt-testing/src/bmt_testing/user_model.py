"""``UserModel``: a user's functions that make a model and its batches, as ranks call them too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bmt_testing.job import FunctionReference

Batch = Any
"""A tensor, or a tuple, list or dict of tensors, whose dim 0 is the batch; other values are passed
on whole.
"""


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """References to a user's functions, which can be sent to ranks. See
    :func:`assert_matches_single` for what they do.
    """

    model_fn: FunctionReference
    batch_fn: FunctionReference
    loss_fn: FunctionReference | None = None
    parallelize: FunctionReference | None = None
    optimizer_fn: FunctionReference | None = None
    pipeline: str | None = None

    @classmethod
    def of(
        cls,
        model_fn: Callable[..., Any],
        batch_fn: Callable[..., Any],
        loss_fn: Callable[..., Any] | None,
        parallelize: Callable[..., Any] | None,
        optimizer_fn: Callable[..., Any] | None,
        *,
        pipeline: str | None,
    ) -> UserModel:
        """Refer to the functions; ValueError for those that ranks cannot import."""
        return cls(
            model_fn=_reference("model_fn", model_fn),
            batch_fn=_reference("batch_fn", batch_fn),
            loss_fn=_optional_reference("loss_fn", loss_fn),
            parallelize=_optional_reference("parallelize", parallelize),
            optimizer_fn=_optional_reference("optimizer_fn", optimizer_fn),
            pipeline=pipeline,
        )

    def model(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """Return a new model in plain torch, with the values that ``seed`` gives, rounded
        to ``dtype``.
        """
        with seeded(seed):
            model = self.model_fn.resolve()()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{self.model_fn.name}() returned {type(model).__name__}; model_fn must return an"
                " nn.Module of plain torch."
            )
        if not any(True for _ in model.parameters()):
            raise ValueError(f"{self.model_fn.name}() returned a model without parameters.")
        return model.to(dtype)

    def batch(self, seed: int, dtype: torch.dtype, device: torch.device) -> Batch:
        """Return batch number ``seed``, of all ranks, with floating-point tensors in ``dtype``."""
        with seeded(seed):
            batch = self.batch_fn.resolve()(seed)
        return _mapped(batch, lambda tensor: _moved(tensor, dtype, device))

    def parts(self, batch: Batch, count: int) -> list[Batch]:
        """Return ``batch`` divided into ``count`` equal parts along dim 0; ValueError if its rows
        cannot be.
        """
        rows = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
        if len(rows) != 1:
            raise ValueError(
                f"{self.batch_fn.name}(seed) must return tensors whose dim 0 is the batch, and"
                f" returned {'none' if not rows else f'some of {sorted(rows)} rows'}."
            )
        (number,) = rows
        if number == 0 or number % count:
            raise ValueError(
                f"{self.batch_fn.name}(seed) returned a batch of {number} rows, which {count} ranks"
                f" that see different data cannot share equally. Return a multiple of {count}, or"
                " draw fewer ranks: training_settings(ranks=...)."
            )
        size = number // count
        return [
            _mapped(
                batch,
                lambda tensor, i=index: (
                    tensor[i * size : (i + 1) * size] if tensor.dim() else tensor
                ),
            )
            for index in range(count)
        ]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of ``model`` for ``batch``: one number."""
        if isinstance(batch, dict):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        if self.loss_fn is not None:
            loss = self.loss_fn.resolve()(output, batch)
        elif isinstance(output, torch.Tensor):
            loss = output
        else:
            loss = output["loss"] if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(output).__name__
            )
            by = self.model_fn if self.loss_fn is None else self.loss_fn
            raise TypeError(
                f"The model of {by.name}() returned {what} in place of a loss, which is a tensor of"
                " one number. Let the model return its loss, alone or as output.loss, or pass"
                " loss_fn=..., which is called as loss_fn(output, batch)."
            )
        return loss.reshape(())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers of torch's CPU generator and of ``random`` are those of ``seed``."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def _reference(argument: str, function: Callable[..., Any]) -> FunctionReference:
    try:
        return FunctionReference.to(function)
    except (ValueError, AttributeError, KeyError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"{argument}={name} cannot be imported by the ranks: it must be a function or class at"
            " the top level of a module, not a lambda, closure or method, or a functools.partial of"
            " one with positional arguments."
        ) from error


def _optional_reference(
    argument: str, function: Callable[..., Any] | None
) -> FunctionReference | None:
    return None if function is None else _reference(argument, function)


def _mapped(batch: Batch, change: Callable[..., torch.Tensor]) -> Batch:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple | list):
        return tuple(_mapped(part, change) for part in batch)
    if isinstance(batch, dict):
        return {name: _mapped(part, change) for name, part in batch.items()}
    return batch


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, tuple | list | dict):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _moved(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
