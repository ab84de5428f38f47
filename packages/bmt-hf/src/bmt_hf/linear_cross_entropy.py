"""``use_linear_cross_entropy``: causal language models of transformers that compute their loss
without the logits.

[Note: deferred logits]
The loss is computed where the model computes it, whatever its class adds to it. While a forward
with labels runs, the head returns a :class:`DeferredLogits` in place of logits, and the model's
loss function computes :func:`bmt_params.losses.linear_cross_entropy.linear_cross_entropy` of the
hidden states in it. Models that scale or cap logits before the loss do so to this object, which
notes it. Whatever else a model does to it computes the logits and is done to them, so no model
computes something wrong.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.loss.loss_utils import ForCausalLMLoss

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import has_module_hooks, never_compiled
from bmt_params.losses.cross_entropy_rows import Vocabulary
from bmt_params.losses.linear_cross_entropy import linear_cross_entropy
from bmt_params.modules.distributed_module import extend, reduce_extended

ModelT = TypeVar("ModelT", bound=nn.Module)
Number = int | float


def use_linear_cross_entropy(model: ModelT) -> ModelT:
    """Have ``model``, a causal language model of transformers, compute its loss without the logits;
    return it.

    ``model(labels=...)`` returns the same ``loss`` and None in place of ``logits``, which the tuple
    of ``return_dict=False`` leaves out; without labels it returns logits as before. Call it before
    or after ``BMTrainModelWrapper`` and ``parallelize``, which may split the head, and with a model
    of PEFT.
    :class:`bmt_hf.Trainer` does it by itself. See
    :func:`bmt_params.losses.linear_cross_entropy.linear_cross_entropy`.

    Raises :class:`ConfigError` for a model with another loss or head.
    """
    reason = why_not(model)
    if reason is not None:
        raise ConfigError(
            f"{type(model).__name__} cannot compute its loss without logits: {reason}. Leave"
            " use_linear_cross_entropy() out, or compute the loss by"
            " bmt.loss.linear_cross_entropy(hidden, model.lm_head.weight, targets) in a forward of"
            " your own."
        )
    extend(_base_of(model), LossWithoutLogits)
    return model


def why_not(model: nn.Module) -> str | None:
    """Return why ``model`` cannot compute its loss without logits, as a clause; None if it can."""
    base = _base_of(model)
    if getattr(base, "loss_function", None) is not ForCausalLMLoss:
        return "its loss is not transformers' ForCausalLMLoss"
    if not isinstance(_head_of(base), nn.Linear):
        return "its head (get_output_embeddings()) is no nn.Linear"
    return None


@contextmanager
def logits_kept(model: nn.Module, keeps: bool) -> Iterator[None]:
    """Inside, ``model(labels=...)`` returns logits as well, if ``keeps``."""
    base = _base_of(model)
    before = base.__dict__.get("_bmt_keeps_logits", False)
    base.__dict__["_bmt_keeps_logits"] = keeps or before
    try:
        yield
    finally:
        base.__dict__["_bmt_keeps_logits"] = before


class LossWithoutLogits(nn.Module):
    """A class in front of a model's own, made by :func:`use_linear_cross_entropy`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        front, *others = cls.__bases__
        if front is LossWithoutLogits:
            # With the signature of the model's own, by which Trainers choose columns.
            cls.forward = _deferring(others[0].forward)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


def _deferring(forward: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def forward_without_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        has_labels = any(given.get(name) is not None for name in ("labels", "shift_labels"))
        head = _head_of(self)
        if not has_labels or self.__dict__.get("_bmt_keeps_logits") or not _can_defer(self, head):
            return forward(self, *args, **kwargs)
        loss_function = self.__dict__.get("_loss_function")
        head.__dict__["forward"] = MethodType(_defer, head)
        self._loss_function = _loss_of_deferred
        try:
            return _without_deferred(forward(self, *args, **kwargs))
        finally:
            del head.__dict__["forward"], self._loss_function
            if loss_function is not None:
                self._loss_function = loss_function

    return never_compiled(forward_without_logits, recursive=False)


def _base_of(model: nn.Module) -> Any:
    """Return the model of transformers inside of PEFT's, or ``model`` itself."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model


def _head_of(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def _can_defer(model: Any, head: Any) -> bool:
    """Whether the head just multiplies by its weight, or by its slice of it, and nobody else looks
    at what it returns.
    """
    if not isinstance(head, nn.Linear) or model.loss_function is not ForCausalLMLoss:
        return False
    forward = type(head).forward
    is_linear = forward is nn.Linear.forward or forward.__module__.startswith("bmt_tp.plans.")
    return (
        is_linear
        and not has_module_hooks(head)
        and not head.__dict__.keys() & {"forward", "_bmt_block"}
    )


@dataclass
class _Use:
    """What became of the logits of one call of the head."""

    has_loss: bool = False


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """The logits that ``head`` computes of ``hidden``, until something reads them: see
    [Note: deferred logits].

    They are ``factor * x``, or ``cap * tanh(factor * x)``, of the head's output x. ``steps`` are
    the operations that made them of it.
    """

    head: Any
    hidden: torch.Tensor
    use: _Use
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
    factor: Number = 1.0
    cap: Number | None = None
    _computed: list[torch.Tensor] = field(default_factory=list)

    def computed(self) -> torch.Tensor:
        """Return the logits themselves, computed by the first call."""
        if not self._computed:
            logits = type(self.head).forward(self.head, self.hidden)
            for step in self.steps:
                logits = step(logits)
            self._computed.append(logits)
        return self._computed[0]

    def loss(self, targets: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor | None:
        """Return their cross entropy without them; None if it must be computed from them."""
        weight, bias = self.head.weight, self.head.bias
        is_slice = len(weight) != vocab_size
        is_whole = Vocabulary.of(len(weight), parallel=is_slice).size == vocab_size
        if self._computed or not is_whole or (self.cap is not None and self.cap <= 0):
            return None
        self.use.has_loss = True
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        scale = self.factor if self.cap is None else self.factor * self.cap
        if abs(scale - 1) > 1e-6:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return linear_cross_entropy(
            hidden, weight, targets, bias=bias, soft_cap=self.cap, parallel=is_slice, **options
        )

    def float(self) -> DeferredLogits:
        return self._after(torch.Tensor.float)

    def contiguous(self) -> DeferredLogits:
        return self

    def tanh(self) -> Any:
        return self.computed().tanh() if self.cap is not None else self._after(torch.tanh, cap=1.0)

    def __mul__(self, number: Any) -> Any:
        if not isinstance(number, Number):
            return self.computed() * number
        times: Callable[[torch.Tensor], torch.Tensor] = functools.partial(operator.mul, number)
        if self.cap is None:
            return self._after(times, factor=self.factor * number)
        return self._after(times, cap=self.cap * number)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Any:
        return self * (1 / number) if isinstance(number, Number) else self.computed() / number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.tanh and not kwargs:
            return args[0].tanh()
        args, kwargs = tree_map_only(cls, cls.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _after(
        self, step: Callable[[torch.Tensor], torch.Tensor], **changes: Any
    ) -> DeferredLogits:
        return replace(self, steps=(*self.steps, step), _computed=[], **changes)


def _computing(name: str) -> Callable[..., Any]:
    def operate(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.computed(), name)(*others)

    return operate


# Python looks operators up in the class.
for _operator in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__rtruediv__", "__pow__"),
    *("__matmul__", "__getitem__", "__setitem__", "__len__", "__iter__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(DeferredLogits, _operator, _computing(_operator))


@never_compiled
def _defer(head: Any, hidden: torch.Tensor) -> DeferredLogits:
    return DeferredLogits(head, hidden, _Use())


@never_compiled
def _loss_of_deferred(
    logits: Any,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """ForCausalLMLoss, which shifts labels and divides a sum if it is given the number."""
    found = None
    if isinstance(logits, DeferredLogits):
        targets = shift_labels
        if targets is None:
            assert labels is not None, "models call it with one of the two"
            targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        found = logits.loss(
            targets.reshape(-1).to(logits.hidden.device),
            vocab_size,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
    if found is None:
        logits = logits.computed() if isinstance(logits, DeferredLogits) else logits
        numbers = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        return ForCausalLMLoss(
            logits, labels, vocab_size, shift_labels=shift_labels, **numbers, **options
        )
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(found.device)
    return found if num_items_in_batch is None else found / num_items_in_batch


def _without_deferred(output: Any) -> Any:
    """Return a model's ``output`` without the logits whose loss was computed, and with others
    computed.
    """
    if isinstance(output, dict):
        kept = {key: _kept(value) for key, value in output.items()}
        return type(output)(**{key: value for key, value in kept.items() if value is not None})
    if isinstance(output, tuple):
        return tuple(kept for value in output if (kept := _kept(value)) is not None)
    return _kept(output)


def _kept(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    return None if value.use.has_loss and not value._computed else value.computed()
