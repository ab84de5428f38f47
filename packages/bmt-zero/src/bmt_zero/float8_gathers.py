"""Gathers of weights in float8, for layers of torchao that were converted with
``enable_fsdp_float8_all_gather``: ranks send half of the bytes of bfloat16.

[Note: float8 gathers] Such a layer rounds its whole weight to float8 with one scale, which it finds
from the weight's largest magnitude. Here each rank finds the largest magnitude of its part, ranks
agree on the maximum, and each rounds its part with the scale that follows. So what they gather is,
to the bit, what the layer would have made of the gathered weight. Rounding and agreeing happen once
after each change of the values and each reduction of gradients, in the lane of the gathers, before
the gather.

The layer is given torchao's ``Float8TrainingTensor``, which multiplies as it is. Backward uses the
same numbers. Gradients, parameters and states of optimizers are as without float8.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import vector_norm

from bmt_core.comm.protocols import Group, Work
from bmt_zero.flat_parameters import FlatParameters, SecondaryShard


class Float8Weight(NamedTuple):
    """How a layer of torchao rounds its weight, and multiplies it."""

    dtype: torch.dtype
    rounds_scale: bool
    """Whether scales are powers of two."""
    products: Any
    """torchao's ``LinearMMConfig``."""


def unwrap_float8_weights(modules: Iterable[nn.Module]) -> None:
    """Give converted layers among ``modules`` ordinary parameters in place of torchao's wrappers of
    them, whose elements cannot be sharded. The layers' configuration still asks for gathers
    in float8.
    """
    for module in modules:
        if _asks_for_float8(module) and hasattr(module.weight, "_linear_mm_config"):
            wrapper: Any = module.weight
            weight = wrapper._tensor  # the layer's parameter before it was converted, perhaps tied
            if not isinstance(weight, nn.Parameter):
                weight = nn.Parameter(weight, wrapper.requires_grad)
            # Either may have been frozen since.
            trains = weight.requires_grad and wrapper.requires_grad
            module.weight = weight.requires_grad_(trains)


def float8_weights(block: nn.Module) -> dict[int, Float8Weight]:
    """Return the weights of ``block`` that are to be gathered in float8, by ``id``: those that only
    converted layers use.
    """
    found: dict[int, Float8Weight | None] = {}
    for module in block.modules():
        of_layer = _float8_weight(module) if _asks_for_float8(module) else None
        for name, parameter in module._parameters.items():
            own = of_layer if name == "weight" else None
            if parameter is not None and found.setdefault(id(parameter), own) != own:
                found[id(parameter)] = None
    return {key: weight for key, weight in found.items() if weight is not None}


def _asks_for_float8(module: nn.Module) -> bool:
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return (
        torchao is not None
        and isinstance(module, torchao.Float8Linear)
        and module.config.enable_fsdp_float8_all_gather
    )


def _float8_weight(layer: Any) -> Float8Weight:
    config = layer.config
    dtype = config.cast_config_weight.target_dtype
    return Float8Weight(dtype, config.round_scales_to_power_of_2, layer.linear_mm_config)


class Float8Parameters(FlatParameters):
    """Weights that are gathered in float8: see [Note: float8 gathers]. ``weights`` says how each of
    the ``parameters`` is rounded, all in the same way, and multiplied. Sharded over at least
    two ranks.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        weights: Sequence[Float8Weight],
        *,
        process_group: Group,
        replicas: Group | None,
        device: torch.device,
        secondary: SecondaryShard | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            parameters,
            process_group=process_group,
            replicas=replicas,
            replicated=False,
            device=device,
            secondary=secondary,
            compute_dtype=compute_dtype,
        )
        self.gathers_copies = True
        self.gathered_dtype = weights[0].dtype
        self.full_bytes = self.total * self.gathered_dtype.itemsize
        self._rounds_scales = weights[0].rounds_scale
        self._products = [weight.products for weight in weights]
        self._scales = torch.ones(len(weights), dtype=torch.float32, device=device)
        self._rounded: torch.Tensor | None = None
        self._rounded_version = -1
        self._is_captured = False

    def gather(self, output: torch.Tensor) -> Work:
        rounded = self._up_to_date()
        if self.secondary is not None:
            return self.secondary.gather(output)
        return self.process_group.all_gather(output, rounded)

    def whole_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        return [
            Float8TrainingTensor(view, scale, self.compute_dtype, products, GemmInputRole.WEIGHT)
            for view, scale, products in zip(
                super().whole_of(flat), self._scales.unbind(), self._products, strict=True
            )
        ]

    def refresh_secondary(self) -> Work:
        assert self.secondary is not None
        return self.secondary.refresh(self._up_to_date(), self.gathered_dtype)

    def _up_to_date(self) -> torch.Tensor:
        """Return the rounded shard."""
        if self._rounded is None:
            with torch.inference_mode(False):  # also written outside of that mode
                self._rounded = torch.empty_like(self.shard, dtype=self.gathered_dtype)
        # A graph that is captured runs later, with other values, and may change the parameters
        # without a word.
        self._is_captured |= self.shard.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._is_captured or self._rounded_version != self.version:
            self._round(self._rounded)
            self._rounded_version = self.version
        return self._rounded

    @torch.no_grad()
    def _round(self, output: torch.Tensor) -> None:
        from torchao.float8.float8_utils import amax_to_scale

        parts, rounded = (
            [torch.split(flat, self.pieces)[index] for index in self.indices]
            for flat in (self.shard.to(self.compute_dtype), output)
        )
        # A rank may have no element of a weight.
        zero = self.shard.new_zeros(())
        largest = torch.stack([vector_norm(p, math.inf) if p.numel() else zero for p in parts])
        self.process_group.all_reduce(largest, "max").wait()
        self._scales.copy_(amax_to_scale(largest, self.gathered_dtype, self._rounds_scales))
        # Scales of one dimension, which make the products of half types float32. None is greater
        # than the largest float8 number by more than a rounding, so nothing is to be clamped.
        for part, scale, to in zip(parts, self._scales.view(-1, 1).unbind(), rounded, strict=True):
            torch.mul(part.float() if part.dtype == torch.float64 else part, scale, out=to)
