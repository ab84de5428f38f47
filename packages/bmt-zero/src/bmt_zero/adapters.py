"""PEFT's adapters in a sharded model: they are made for whole weights and merge into whole weights,
models count whole parameters, and generate on all ranks together.

Making adapters, merging and counting read weights outside of a forward, where the parameters are
this rank's 1-D parts. If both parts had the same length, ``B @ A`` would be one number, and PEFT
would add it to the weight without an error. So a class is put in front of the class of modules with
such methods, as for Blocks. They are recognised by the names of their methods; PEFT need not
be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, is_initialized
from bmt_params.modules.distributed_module import extend, reduce_extended
from bmt_params.modules.outermost_call import is_call_under_way, rank_random, reading_parts
from bmt_params.modules.whole_parameters import whole_parameters, whole_shapes
from bmt_params.parameter import DistributedParameter
from bmt_params.uninitialized import has_values
from bmt_params.whole_parameter import WholeParameter


def see_whole_adapters(modules: Iterable[nn.Module]) -> None:
    """Extend those of ``modules`` that add, merge or unload adapters, so that they see
    whole parameters.
    """
    for module in modules:
        _extend(module, [AddsToWhole, MergesWhole, HasWholeDelta, UnloadsParts])


def check_adapters(modules: Iterable[nn.Module]) -> None:
    """Raise :class:`ConfigError` if one of ``modules`` is an adapter that does not fit how its
    layer lies along an axis, or cannot be one of a sharded layer.

    Adapters are made for whole layers: their sizes do not fit a slice. Where each rank computes the
    whole layer, it also computes the adapter's whole gradients, which must not be summed.
    """
    for module in modules:
        if reason := _why_not(module):
            raise ConfigError(reason)
        if _has(type(module), _METHODS[MergesWhole]):
            base = dict.fromkeys(module.get_base_layer().parameters())  # type: ignore[operator]
            trained = [p for p in module.parameters() if p.requires_grad and p not in base]
            for parameter in base:
                if _is_sharded(parameter):
                    _check_adapter(trained, parameter)


def _why_not(module: nn.Module) -> str | None:
    """Return why ``module`` cannot adapt a sharded layer, or its model; None if it can."""
    if hasattr(module, "parameter_name") and _has(type(module), _METHODS[MergesWhole]):
        base: Any = module.get_base_layer()  # type: ignore[operator]
        return (
            f"An adapter of {module.parameter_name!r} of a {type(base).__name__} (target_parameters"
            " of LoraConfig) replaces this parameter in every forward, and a gathered one cannot be"
            " replaced. Name layers in target_modules, such as those of attention, or train the"
            " parameter itself: requires_grad_(True)."
        )
    if _has(type(module), ("update_and_allocate",)):
        return (
            f"{type(module).__name__} (AdaLoRA) computes with the adapters' matrices outside of the"
            " layers, where each rank has parts of them. Take another adapter, such as LoRA."
        )
    return None


def _check_adapter(
    trained: Iterable[torch.Tensor], weight: DistributedParameter | WholeParameter
) -> None:
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


def see_whole_model(model: nn.Module) -> None:
    """If ``model`` has a method that counts parameters, make it count whole ones; if it generates,
    let all ranks do so together; and if it has a property ``dtype`` and parameters that are cast,
    let its forward see what it computes in.
    """
    _extend(model, [CountsWhole, NumbersWhole, GeneratesTogether])
    is_cast = any(_read_dtype(p) != p.dtype for p in model.parameters())
    if is_cast and isinstance(getattr(type(model), "dtype", None), property):
        extend(model, ShowsReadDtype)


def added(parent: nn.Module, child: nn.Module | None) -> None:
    """Extend ``child``, a module that was added to ``parent`` after wrapping, and ``parent`` if it
    is PEFT's outer model.
    """
    if child is None:
        return
    if _why_not(child) is None or _has_sharded(child):
        check_adapters([child])
    see_whole_adapters([child])
    # What adds adapters to ``child``, as its next step.
    _extend(parent, [AddsToWhole])
    # So ``parent`` is PEFT's model around the one with adapters.
    if isinstance(child, UnloadsParts):
        see_whole_model(parent)


def narrow_layers_of_wide_adapters(model: nn.Module) -> torch.dtype | None:
    """Return the dtype, of two bytes, of layers of ``model`` whose adapters a forward reads in
    float32, as PEFT makes them (``autocast_adapter_dtype``); None if there are none.
    """
    for base, adapters in _adapted_layers(model):
        dtypes = {p.dtype for p in base if p.dtype.is_floating_point and p.dtype.itemsize == 2}
        if dtypes and any(_read_dtype(p) == torch.float32 for p in adapters):
            return min(dtypes, key=str)
    return None


def adapters_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``model`` that layers with adapters have beside their own."""
    return {p for _, adapters in _adapted_layers(model) for p in adapters}


def _adapted_layers(model: nn.Module) -> Iterator[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    for module in model.modules():
        if _has(type(module), _METHODS[MergesWhole]):
            base = dict.fromkeys(module.get_base_layer().parameters())  # type: ignore[operator]
            yield list(base), [p for p in module.parameters() if p not in base]


def _read_dtype(parameter: nn.Parameter) -> torch.dtype:
    found: torch.dtype | None = getattr(parameter, "_compute_dtype", None)
    return found or parameter.dtype


class _Extended(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


class AddsToWhole(_Extended):
    """A model that gets adapters, such as PEFT's ``LoraModel``: a layer is whole while it gets one,
    whose first values or sizes may depend on the weight. Collective.
    """

    def _create_and_replace(
        self, config: Any, name: str, target: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        has_whole = _has_sharded(target) and all(map(has_values, target.parameters()))
        with whole_parameters(target) if has_whole else nullcontext():
            return super()._create_and_replace(config, name, target, *args, **kwargs)  # type: ignore[misc]


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

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Make an adapter of several, which are whole meanwhile. Collective."""
        with ExitStack() as whole:
            for layer in self.modules():
                for name, child in layer.named_children() if isinstance(layer, MergesWhole) else ():
                    if name != "base_layer":
                        whole.enter_context(whole_parameters(child))
            return super().add_weighted_adapter(*args, **kwargs)  # type: ignore[misc]


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


class ShowsReadDtype(_Extended):
    """A model with a property ``dtype``, such as those of Hugging Face, by which its forward makes
    masks. There it is the dtype in which parameters are read; outside it is that of the parts.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's first floating parameter."""
        own: torch.dtype = super().dtype  # type: ignore[misc]
        if not is_call_under_way():
            return own
        read = map(_read_dtype, self.parameters())
        return next((dtype for dtype in read if dtype.is_floating_point), own)


class GeneratesTogether(_Extended):
    """A model that writes, such as those of Hugging Face with a head for language.

    Each token gathers weights from all ranks, so a rank that has finished goes on until all have.
    As in a forward, random numbers are the rank's own: see [Note: random streams] in
    :mod:`bmt_params.modules.outermost_call`.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate. Collective."""
        generate: Any = super().generate  # type: ignore[misc]
        if not is_initialized():
            return generate(*args, **kwargs)
        if current().world_size > 1 and "synced_gpus" in inspect.signature(generate).parameters:
            kwargs["synced_gpus"] = True  # which transformers does by itself for FSDP
        with rank_random(current()):
            return generate(*args, **kwargs)


_METHODS: dict[type[nn.Module], tuple[str, ...]] = {
    AddsToWhole: ("inject_adapter", "_create_and_replace"),
    MergesWhole: ("merge", "unmerge", "get_base_layer"),
    HasWholeDelta: ("get_delta_weight", "get_base_layer"),
    UnloadsParts: ("merge_and_unload", "unload"),
    CountsWhole: ("get_nb_trainable_parameters",),
    NumbersWhole: ("num_parameters",),
    GeneratesTogether: ("generate", "prepare_inputs_for_generation"),
}


def _extend(module: nn.Module, mixins: Iterable[type[nn.Module]]) -> None:
    for mixin in mixins:
        if _has(type(module), _METHODS[mixin]):
            extend(module, mixin)


def _has_sharded(module: nn.Module) -> bool:
    return any(map(_is_sharded, module.parameters()))


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` is one of bmt's, also where it is whole for a while."""
    is_lent = isinstance(parameter, WholeParameter) and parameter.is_lent
    return is_lent or isinstance(parameter, DistributedParameter)


def _has(kind: type[nn.Module], methods: Iterable[str]) -> bool:
    return all(callable(getattr(kind, name, None)) for name in methods)


def _whole_outside_of_forward(layer: nn.Module) -> AbstractContextManager[None]:
    # Some layers merge in their forward, where parameters are whole already.
    return nullcontext() if is_call_under_way() else whole_parameters(layer)
