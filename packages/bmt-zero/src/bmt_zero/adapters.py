"""PEFT's adapters in a sharded model: they merge into whole weights, and models count
whole parameters.

Merging and counting read weights outside of a forward, where the parameters are this rank's 1-D
parts. If both parts had the same length, ``B @ A`` would be one number, and PEFT would add it to
the weight without an error. So a class is put in front of the class of modules with such methods,
as for Blocks. They are recognised by the names of their methods; PEFT need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.modules.distributed_module import extend, reduce_extended
from bmt_core.modules.outermost_call import is_call_under_way, reading_parts
from bmt_core.modules.whole_parameters import whole_parameters, whole_shapes
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current


def see_whole_adapters(modules: Iterable[nn.Module]) -> None:
    """Extend those of ``modules`` that merge or unload adapters, so that they merge
    whole parameters.
    """
    for module in modules:
        _extend(module, [MergesWhole, HasWholeDelta, UnloadsParts])


def check_adapters(modules: Iterable[nn.Module]) -> None:
    """Raise :class:`ConfigError` if one of ``modules`` is an adapter that does not fit how its
    layer lies along an axis.

    Adapters are made for whole layers: their sizes do not fit a slice. Where each rank computes the
    whole layer, it also computes the adapter's whole gradients, which must not be summed.
    """
    for module in modules:
        if _has(type(module), _METHODS[MergesWhole]):
            base = dict.fromkeys(module.get_base_layer().parameters())  # type: ignore[operator]
            trained = [p for p in module.parameters() if p.requires_grad and p not in base]
            for parameter in base:
                if isinstance(parameter, DistributedParameter):
                    _check_adapter(trained, parameter)


def _check_adapter(trained: Iterable[torch.Tensor], weight: DistributedParameter) -> None:
    for locality in weight.locality:
        if current().topology.sizes.get(locality.axis, 1) == 1:
            continue
        way_out = (
            f"Train adapters in a run without {locality.axis!r}, which shards the model all the"
            " same, or merge them first."
        )
        if locality.split_dim is not None:
            raise ConfigError(
                f"An adapter (LoRA) was added to {weight.description}, of which each rank along"
                f" {locality.axis!r} has a slice. Adapters are made for whole layers. {way_out}"
            )
        if locality.gradients == "whole" and any(
            locality not in getattr(p, "locality", ()) for p in trained
        ):
            raise ConfigError(
                f"An adapter (LoRA) was added to {weight.description}, of which each rank along"
                f" {locality.axis!r} computes the whole gradient, after this was declared: the"
                " adapter's gradients would be summed over these ranks. Add it before the model is"
                f" split along {locality.axis!r}. {way_out}"
            )


def count_whole_parameters(model: nn.Module) -> None:
    """If ``model`` has a method that counts parameters, make it count whole ones."""
    _extend(model, [CountsWhole, NumbersWhole])


def added(parent: nn.Module, child: nn.Module | None) -> None:
    """Extend ``child``, a module that was added to ``parent`` after wrapping, and ``parent`` if it
    is PEFT's outer model.
    """
    if child is None:
        return
    check_adapters([child])
    see_whole_adapters([child])
    # So ``parent`` is PEFT's model around the one with adapters.
    if isinstance(child, UnloadsParts):
        count_whole_parameters(parent)


class _Extended(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


class MergesWhole(_Extended):
    """A layer with adapters, such as PEFT's ``LoraLayer``: its parameters are whole while adapters
    are merged. Collective.
    """

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
    """A model with adapters, such as PEFT's ``LoraModel``: unloading moves the sharded weights
    without gathering them.
    """

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


def _extend(module: nn.Module, mixins: Iterable[type[nn.Module]]) -> None:
    for mixin in mixins:
        if _has(type(module), _METHODS[mixin]):
            extend(module, mixin)


def _has(kind: type[nn.Module], methods: Iterable[str]) -> bool:
    return all(callable(getattr(kind, name, None)) for name in methods)


def _whole_outside_of_forward(layer: nn.Module) -> AbstractContextManager[None]:
    # Some layers merge in their forward, where parameters are whole already.
    return nullcontext() if is_call_under_way() else whole_parameters(layer)
