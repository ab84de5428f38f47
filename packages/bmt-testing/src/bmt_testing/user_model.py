"""``UserModel``: a user's functions that make a model and its batches, as ranks call them too."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bmt_params.modules.outermost_call import rank_seed
from bmt_testing.job import FunctionReference

Batch = Any
"""A tensor, or a tuple, list or dict of tensors, of which one dim, mostly 0, is the batch; other
values are passed on whole.
"""


@dataclass(frozen=True)
class BatchLoss:
    """The loss of one batch: a mean, or with a ``count`` the sum over so many tokens."""

    total: torch.Tensor
    count: torch.Tensor | float | None = None

    @property
    def mean(self) -> torch.Tensor:
        """The mean loss of the batch."""
        return self.total if self.count is None else self.total / self.count


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
    train: FunctionReference | None = None
    pipeline: str | None = None
    batch_dim: int = 0
    of_parts: bool = False
    """Whether ranks are compared with one process that takes their parts one by one."""
    noise: bool = False
    """Whether forward draws random numbers, which are then those of the rank's part."""
    counts: bool = False
    """Whether losses are sums with counts."""

    @classmethod
    def of(
        cls,
        *,
        pipeline: str | None,
        batch_dim: int,
        of_parts: bool,
        noise: bool,
        **functions: Callable[..., Any] | None,
    ) -> UserModel:
        """Refer to the functions; ValueError for those that ranks cannot import."""
        references: dict[str, Any] = {
            name: None if function is None else _reference(name, function)
            for name, function in functions.items()
        }
        return cls(
            pipeline=pipeline, batch_dim=batch_dim, of_parts=of_parts, noise=noise, **references
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
        """Return ``batch`` divided into ``count`` equal parts along :attr:`batch_dim`; ValueError
        if its rows cannot be. Tensors without this dim are passed on whole.
        """
        dim = self.batch_dim
        rows = {tensor.shape[dim] for tensor in _tensors(batch) if tensor.dim() > dim}
        if len(rows) != 1:
            raise ValueError(
                f"{self.batch_fn.name}(seed) must return tensors whose dim {dim} is the batch, and"
                f" returned {'none' if not rows else f'some of {sorted(rows)} rows'}. If another"
                " dim is the batch, say which: batch_dim=1."
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
                    tensor.narrow(dim, i * size, size) if tensor.dim() > dim else tensor
                ),
            )
            for index in range(count)
        ]

    @contextmanager
    def noise_of(self, micro_batch: str, part: int) -> Iterator[None]:
        """Inside, random numbers are those of ``part`` of ``micro_batch``, if there is noise: by a
        seed as a wrapped model gives itself, which lets it alone.
        """
        if not self.noise:
            yield
            return
        with seeded(rank_seed(zlib.crc32(micro_batch.encode()), part)):
            yield

    def loss(self, model: nn.Module, batch: Batch) -> BatchLoss:
        """Return the loss of ``model`` for ``batch``."""
        if isinstance(batch, dict):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        if self.loss_fn is not None:
            loss = self.loss_fn.resolve()(output, batch)
        elif isinstance(output, dict):
            loss = output.get("loss")
        else:
            loss = getattr(output, "loss", output)
        count = None
        if isinstance(loss, tuple) and len(loss) == 2 and _is_number(loss[1]):
            loss, count = loss
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
                " loss_fn=..., which is called as loss_fn(output, batch). A loss over tokens of"
                " which ranks have different numbers is a pair: the sum, and the number of tokens."
            )
        return BatchLoss(loss.reshape(()), count)


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


def _mapped(batch: Batch, change: Callable[..., torch.Tensor]) -> Batch:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, tuple | list):
        return tuple(_mapped(part, change) for part in batch)
    if isinstance(batch, dict):
        return {name: _mapped(part, change) for name, part in batch.items()}
    return batch


def _is_number(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad
    return is_tensor or isinstance(value, int | float)


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, tuple | list | dict):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _moved(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
