"""Adapters, as PEFT puts them into a model: layers that are merged into the weights beside them, and models that are counted.

Both read and write weights where no forward runs, so they would meet this rank's parts. Of two parts of one length, ``B @ A`` is a
number, which would be added to the weight without an error. So such modules get a class in front of their own, as Blocks do.
Their methods are known by name; PEFT need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from bmt_core.modules.distributed_module import extend, reduce_extended
from bmt_core.modules.outermost_call import is_call_under_way, reading_parts
from bmt_core.modules.whole_parameters import whole_parameters, whole_shapes


def see_whole_adapters(modules: Iterable[nn.Module | None]) -> None:
    """Let those of ``modules`` that merge or unload adapters do so with whole parameters."""
    for module in modules:
        _extend(module, [MergesWhole, HasWholeDelta, UnloadsParts])


def count_whole_parameters(model: nn.Module) -> None:
    """Let ``model``, if it counts parameters, count whole ones."""
    _extend(model, [CountsWhole, NumbersWhole])


def added(parent: nn.Module, child: nn.Module | None) -> None:
    """Do both for what ``child`` brings into a model that is wrapped already. Called when ``parent`` was given it."""
    see_whole_adapters([child])
    if isinstance(child, UnloadsParts):  # PEFT's model around the one with adapters
        count_whole_parameters(parent)


class _Extended(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


class MergesWhole(_Extended):
    """A layer with adapters, such as PEFT's ``LoraLayer``: it is merged with its parameters whole. Collective."""

    def merge(self, *args: Any, **kwargs: Any) -> Any:
        """Merge the adapters into the weight."""
        with _whole_outside_of_forward(self):
            return super().merge(*args, **kwargs)  # type: ignore[misc]

    def unmerge(self, *args: Any, **kwargs: Any) -> Any:
        """Take the adapters out of the weight."""
        with _whole_outside_of_forward(self):
            return super().unmerge(*args, **kwargs)  # type: ignore[misc]


class HasWholeDelta(_Extended):
    """A layer with adapters that add a matrix to the weight."""

    def get_delta_weight(self, *args: Any, **kwargs: Any) -> Any:
        """Return what merging adds to the weight. Collective."""
        with _whole_outside_of_forward(self):
            return super().get_delta_weight(*args, **kwargs)  # type: ignore[misc]


class UnloadsParts(_Extended):
    """A model with adapters, such as PEFT's ``LoraModel``: it hands weights on as they are, without gathering them."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model without adapters, which were merged. Collective."""
        with reading_parts():
            return super().merge_and_unload(*args, **kwargs)  # type: ignore[misc]

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model without adapters, as it was before them."""
        with reading_parts():
            return super().unload(*args, **kwargs)  # type: ignore[misc]


class CountsWhole(_Extended):
    """A model with adapters, such as PEFT's ``PeftModel``: it counts whole parameters."""

    def get_nb_trainable_parameters(self) -> Any:
        """Return how many numbers are trained, and how many there are."""
        with whole_shapes(self):
            return super().get_nb_trainable_parameters()  # type: ignore[misc]


class NumbersWhole(_Extended):
    """A model of Hugging Face: it counts whole parameters."""

    def num_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return how many numbers the model has."""
        with whole_shapes(self):
            return super().num_parameters(*args, **kwargs)  # type: ignore[misc]


_METHODS: dict[type[nn.Module], tuple[str, ...]] = {
    MergesWhole: ("merge", "unmerge", "get_base_layer"),
    HasWholeDelta: ("get_delta_weight", "get_base_layer"),
    UnloadsParts: ("merge_and_unload", "unload"),
    CountsWhole: ("get_nb_trainable_parameters",),
    NumbersWhole: ("num_parameters",),
}


def _extend(module: nn.Module | None, mixins: Iterable[type[nn.Module]]) -> None:
    for mixin in mixins:
        if module is not None and all(callable(getattr(type(module), name, None)) for name in _METHODS[mixin]):
            extend(module, mixin)


def _whole_outside_of_forward(layer: nn.Module) -> AbstractContextManager[None]:
    # Some layers merge in their forward.
    return nullcontext() if is_call_under_way() else whole_parameters(layer)
