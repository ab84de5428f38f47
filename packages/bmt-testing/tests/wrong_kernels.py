"""Kernels that break one rule of the conformance kit each, and a plugin that offers them.

All call the references in plain torch but for the mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from wrong_plugins import Named

from bmt_core.ops import KernelProvider, reference
from bmt_core.plugins.hookspecs import hookimpl

Options = Mapping[str, Any]


class Right(Named, KernelProvider):
    """Breaks no rule."""

    device_type = "cpu"
    breaks = ""

    def available(self) -> str | None:
        return None

    def adam_step(
        self,
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        masters: Any,
        *,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        hold: bool = False,
        scale: Any = 1.0,
        clip: Any = None,
        skip: Any = None,
    ) -> None:
        options: dict[str, Any] = {
            "step": step,
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "hold": hold,
            "scale": scale,
            "clip": clip,
            "skip": skip,
        }
        self.adam([params, grads, exp_avgs, exp_avg_sqs, masters], options)

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        reference.adam_step(*columns, **options)

    def cross_entropy_forward(
        self,
        logits: Any,
        target: Any,
        *,
        first_class: int = 0,
        weight: Any = None,
        with_sum: bool = False,
    ) -> Any:
        options = {"first_class": first_class, "weight": weight, "with_sum": with_sum}
        return self.forward(logits, target, options)

    def forward(self, logits: torch.Tensor, target: torch.Tensor, options: Options) -> Any:
        return reference.cross_entropy_forward(logits, target, **options)

    def cross_entropy_backward(
        self,
        logits: Any,
        target: Any,
        row_max: Any,
        log_sum: Any,
        total: Any,
        hit: Any,
        spread: Any,
        *,
        first_class: int = 0,
        weight: Any = None,
        out: Any = None,
    ) -> torch.Tensor:
        options = {"first_class": first_class, "weight": weight, "out": out}
        return self.backward(logits, target, [row_max, log_sum, total, hit, spread], options)

    def backward(self, logits: Any, target: Any, factors: Any, options: Options) -> torch.Tensor:
        return reference.cross_entropy_backward(logits, target, *factors, **options)

    def has_non_finite(self, tensors: Any, flag: torch.Tensor) -> None:
        reference.has_non_finite(tensors, flag)

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        return reference.powers_sum(tensors, p, weights, device)

    def scale_(self, tensors: Any, factor: torch.Tensor) -> None:
        reference.scale_(tensors, factor)

    def zero_if_(self, tensors: Any, flag: torch.Tensor) -> None:
        reference.zero_if_(tensors, flag)


class ScalesAlone(Named, KernelProvider):
    """Has one operation, and breaks no rule."""

    device_type = "cpu"
    breaks = ""

    def available(self) -> str | None:
        return None

    def scale_(self, tensors: Any, factor: torch.Tensor) -> None:
        reference.scale_(tensors, factor)


class OtherNames(Right):
    """Names a parameter in its own way."""

    breaks = "methods_take_the_parameters_of_their_references"

    def scale_(self, tensors: Any, by: torch.Tensor) -> None:
        reference.scale_(tensors, by)


class CouplesHalves(Right):
    """Adds the decay to gradients of half types whatever is asked for."""

    breaks = "adam_step_is_its_formula"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        is_half = any(grad.dtype.itemsize == 2 for grad in columns[1])
        super().adam(columns, {**options, "decoupled": options["decoupled"] and not is_half})


class Truncates(Right):
    """Cuts the low half of a master off."""

    breaks = "adam_step_rounds_masters_to_nearest"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        super().adam(columns, options)
        if options["hold"] or (options["skip"] is not None and bool(options["skip"])):
            return
        for param, master in zip(columns[0], columns[4], strict=True):
            if param.dtype == torch.bfloat16 and master.dtype == torch.float32:
                param.copy_((master.view(torch.int32) & -(1 << 16)).view(torch.float32))


class RoundsToEven(Right):
    """Splits a master as bfloat16 usually rounds."""

    breaks = "adam_step_keeps_every_bit_of_masters_in_two_parts"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        super().adam(columns, options)
        for param, master in zip(columns[0], columns[4], strict=True):
            if master is not None and master.dtype == torch.int16:
                bits = param.view(torch.int16)
                is_odd_half = (master == -(1 << 15)) & (bits % 2 == 1)
                if bool(is_odd_half.any()):
                    bits.sub_(is_odd_half.to(torch.int16))


class InDoublePrecision(Right):
    """Computes float32 more exactly than torch does."""

    breaks = "adam_step_equals_torchs_adam_in_every_bit"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        if any(param.dtype != torch.float32 for param in columns[0]):
            super().adam(columns, options)
            return
        exact = [[None if each is None else each.double() for each in c] for c in columns]
        super().adam(exact, options)
        for i in (0, 2, 3):
            for tensor, value in zip(columns[i], exact[i], strict=True):
                tensor.copy_(value)


class SkipsParametersAlone(Right):
    """Lets moments take in the gradients of a step that is skipped."""

    breaks = "adam_step_changes_nothing_where_skip_is_set"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        is_set = options["skip"] is not None and bool(options["skip"])
        super().adam(columns, {**options, **({"hold": True, "skip": None} if is_set else {})})


class IgnoresClip(Right):
    """Has no clipping."""

    breaks = "adam_step_clips_gradients_and_divides_them_by_the_scale"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        clip = options["clip"]
        is_one = clip is None or clip.numel() == 1
        super().adam(columns, {**options, "clip": None if is_one else clip})


class MovesHeldFloats(Right):
    """Holds parameters of half types alone."""

    breaks = "adam_step_with_hold_moves_moments_alone"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        is_half = all(param.dtype.itemsize == 2 for param in columns[0])
        super().adam(columns, {**options, "hold": options["hold"] and is_half})


class ClearsNan(Right):
    """Takes 0 for a gradient that is no number."""

    breaks = "adam_step_keeps_infinities_nan_and_tiny_numbers"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        grads = [torch.where(grad.isnan(), 0, grad) for grad in columns[1]]
        super().adam([columns[0], grads, *columns[2:]], options)


class TakesAbsoluteValues(Right):
    """Takes the absolute value of a complex gradient."""

    breaks = "adam_step_takes_complex_numbers_as_pairs"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        grads = [g.abs().to(g.dtype) if g.is_complex() else g for g in columns[1]]
        super().adam([columns[0], grads, *columns[2:]], options)


class ForgetsClassWeights(Right):
    """Sums all classes alike."""

    breaks = "cross_entropy_forward_is_its_definition"

    def forward(self, logits: torch.Tensor, target: torch.Tensor, options: Options) -> Any:
        return super().forward(logits, target, {**options, "weight": None})


class SpreadsEvenly(Right):
    """Spreads over all classes alike."""

    breaks = "cross_entropy_backward_is_its_definition"

    def backward(self, logits: Any, target: Any, factors: Any, options: Options) -> torch.Tensor:
        return super().backward(logits, target, factors, {**options, "weight": None})


class RowByRow(Right):
    """Returns a gradient that is contiguous, whatever the logits are."""

    breaks = "the_gradient_of_logits_has_their_type_and_layout"

    def backward(self, logits: Any, target: Any, factors: Any, options: Options) -> torch.Tensor:
        return super().backward(logits, target, factors, options).contiguous()


class WritesElsewhere(Right):
    """Returns a new gradient also where it is given the memory for it."""

    breaks = "the_gradient_of_logits_has_their_type_and_layout"

    def backward(self, logits: Any, target: Any, factors: Any, options: Options) -> torch.Tensor:
        return super().backward(logits, target, factors, {**options, "out": None})


class CountsFromBehind(Right):
    """Takes the target -1 for the last class, as lists in Python do."""

    breaks = "targets_of_other_classes_are_not_looked_up"

    def forward(self, logits: torch.Tensor, target: torch.Tensor, options: Options) -> Any:
        if options["first_class"] == 0 and logits.dim() == 2:
            target = torch.where(target == -1, logits.shape[1] - 1, target)
        return super().forward(logits, target, options)


class NoMaximum(Right):
    """Forms exponentials of the logits as they are."""

    breaks = "cross_entropy_of_extreme_rows_is_the_references"

    def forward(self, logits: torch.Tensor, target: torch.Tensor, options: Options) -> Any:
        largest, log_sum, *others = super().forward(logits, target, options)
        found = logits.double().exp().sum(1).log() - largest
        return largest, found.to(log_sum.dtype), *others


class SumsSquares(Right):
    """Looks whether the sum of squares is finite."""

    breaks = "every_element_that_is_not_finite_is_found"

    def has_non_finite(self, tensors: Any, flag: torch.Tensor) -> None:
        super().has_non_finite([tensor.square().sum() for tensor in tensors], flag)


class ClearsTheFlag(Right):
    """Writes 0 where all is finite."""

    breaks = "has_non_finite_does_not_clear_the_flag"

    def has_non_finite(self, tensors: Any, flag: torch.Tensor) -> None:
        if flag.numel() == 1 and not flag.is_floating_point() and bool(flag):
            flag.zero_()
        super().has_non_finite(tensors, flag)


class AddsHalves(Right):
    """Adds in the type of the tensors."""

    breaks = "powers_sum_is_that_of_all_elements_in_float32"

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        total = super().powers_sum(tensors, p, weights, device)
        is_long = any(t.numel() == 600 and t.dtype.itemsize == 2 for t in tensors)
        return total.to(torch.bfloat16).float() if is_long else total


class LooksAtTheFirst(Right):
    """Takes the type of the first tensor, which there may not be."""

    breaks = "powers_sum_of_nothing_is_zero"

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        assert tensors[0].dtype.itemsize
        return super().powers_sum(tensors, p, weights, device)


class PassesOverNan(Right):
    """Looks for the largest by comparisons, which are false for NaN."""

    breaks = "powers_sum_keeps_infinities_nan_and_tiny_numbers"

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        if p == float("inf"):
            tensors = [torch.where(tensor.isnan(), 0, tensor) for tensor in tensors]
        return super().powers_sum(tensors, p, weights, device)


class RoundsTheFactor(Right):
    """Multiplies in the type of the tensors."""

    breaks = "scale_multiplies_in_float32_and_rounds_once"

    def scale_(self, tensors: Any, factor: torch.Tensor) -> None:
        for tensor in tensors:
            is_half = tensor.dtype.itemsize == 2
            super().scale_([tensor], factor.to(tensor.dtype).float() if is_half else factor)


class MultipliesByZero(Right):
    """Clears by a product, which is NaN where a tensor is."""

    breaks = "zero_if_clears_everything_where_the_flag_is_set"

    def zero_if_(self, tensors: Any, flag: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.mul_(flag.reshape(()) == 0)


class TakesOneLaunch(Right):
    """Takes as many tensors as one launch does."""

    breaks = "lists_may_be_long_and_mix_types"

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        return super().powers_sum(tensors[:512], p, weights[:512], device)


class LoadsInLines(Right):
    """Begins with the first element that is aligned."""

    breaks = "tensors_may_begin_at_any_address"

    def powers_sum(self, tensors: Any, p: float, weights: Any, device: Any) -> torch.Tensor:
        aligned = [t.reshape(-1)[-t.storage_offset() % 4 :] for t in tensors]
        return super().powers_sum(aligned, p, weights, device)


class InOrderOfMemory(Right):
    """Pairs elements of gradients and parameters as they lie in memory."""

    breaks = "tensors_may_have_any_strides"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        grads = [
            grad.t().reshape(grad.shape)
            if grad.dim() == 2 and grad.stride() != param.stride() and not grad.is_complex()
            else grad
            for param, grad in zip(columns[0], columns[1], strict=False)
        ]
        super().adam([columns[0], grads, *columns[2:]], options)


class WritesBehind(Right):
    """Writes whole lines."""

    breaks = "memory_beside_the_tensors_stays_as_it_is"

    def scale_(self, tensors: Any, factor: torch.Tensor) -> None:
        super().scale_(tensors, factor)
        for tensor in tensors:
            end = tensor.storage_offset() + tensor.numel()
            has_room = end < tensor.untyped_storage().nbytes() // tensor.itemsize
            if tensor.is_contiguous() and tensor.numel() and has_room:
                tensor.as_strided((1,), (1,), end).mul_(2)


class ScalesGradients(Right):
    """Divides the gradients in place."""

    breaks = "what_is_only_read_stays_as_it_is"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        scale = options["scale"]
        if isinstance(scale, torch.Tensor) and scale.numel() == 1 and float(scale) == 2:
            for grad in columns[1]:
                grad.data.div_(2)
            options = {**options, "scale": 1.0}
        super().adam(columns, options)


class KeepsVersions(Right):
    """Writes past autograd."""

    breaks = "what_is_written_and_nothing_else_has_a_new_version"

    def zero_if_(self, tensors: Any, flag: torch.Tensor) -> None:
        super().zero_if_([tensor.data for tensor in tensors], flag)


class RepeatsOneElement(Right):
    """Repeats a gradient of one element, as torch does."""

    breaks = "arguments_that_do_not_fit_are_errors_and_nothing_is_written"

    def adam(self, columns: list[Any], options: dict[str, Any]) -> None:
        grads = [
            grad.expand_as(param) if grad.numel() == 1 else grad
            for param, grad in zip(*columns[:2], strict=True)
        ]
        super().adam([columns[0], grads, *columns[2:]], options)


class WaitsForTheGpu(Right):
    """Reads a flag on the host."""

    breaks = "the_host_does_not_wait_for_the_gpu"
    device_type = "cuda"

    def has_non_finite(self, tensors: Any, flag: torch.Tensor) -> None:
        super().has_non_finite(tensors, flag)
        assert flag.item() in (0, 1)


WRONG = [*Right.plugins, *ScalesAlone.plugins]


@hookimpl
def bmt_kernel_providers() -> list[type[KernelProvider]]:
    return WRONG
