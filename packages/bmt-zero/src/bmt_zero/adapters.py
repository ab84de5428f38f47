"""PEFT's adapters in a sharded model: they merge into whole weights, and models count whole parameters.

Merging and counting read weights outside of a forward, where the parameters are this rank's 1-D parts. If both parts had the same
length, ``B @ A`` would be one number, and PEFT would add it to the weight without an error. So a class is put in front of the class
of modules with such methods, as for Blocks. They are recognised by the names of their methods; PEFT need not be installed.
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
    """Extend those of ``modules`` that merge or unload adapters, so that they merge whole parameters."""
    for module in modules:
        _extend(module, [MergesWhole, HasWholeDelta, UnloadsParts])


def count_whole_parameters(model: nn.Module) -> None:
    """If ``model`` has a method that counts parameters, make it count whole ones."""
    _extend(model, [CountsWhole, NumbersWhole])


def added(parent: nn.Module, child: nn.Module | None) -> None:
    """Extend ``child``, a module that was added to ``parent`` after wrapping, and ``parent`` if it is PEFT's outer model."""
    see_whole_adapters([child])
    if isinstance(child, UnloadsParts):  # so ``parent`` is PEFT's model around the one with adapters
        count_whole_parameters(parent)


class _Extended(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


class MergesWhole(_Extended):
    """A layer with adapters, such as PEFT's ``LoraLayer``: its parameters are whole while adapters are merged. Collective."""

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
    """A model with adapters, such as PEFT's ``LoraModel``: unloading moves the sharded weights without gathering them."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Merge the adapters and return the model without them. Collective."""
        with reading_parts():
            return super().merge_and_unload(*args, **kwargs)  # type: ignore[misc]

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model without adapters and without merging them."""
        with reading_parts():
            return super().unload(*args, **kwargs)  # type: ignore[misc]


class CountsWhole(_Extended):
    """A model with adapters, such as PEFT's ``PeftModel``: it counts whole parameters."""

    def get_nb_trainable_parameters(self) -> Any:
        """Return the number of trainable elements and of all elements."""
        with whole_shapes(self):
            return super().get_nb_trainable_parameters()  # type: ignore[misc]


class NumbersWhole(_Extended):
    """A model of Hugging Face: it counts whole parameters."""

    def num_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number of elements of the model."""
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
    # Some layers merge in their forward, where parameters are whole already.
    return nullcontext() if is_call_under_way() else whole_parameters(layer)
