"""The rules for kernels: each test is one.

What an operation does is the docstring of its reference in ``bmt_core.ops.reference``. Kernels are
compared with its formula in double precision. The tests of operations that a provider does not have
are skipped.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, TypeAlias

import pytest
import torch

from bmt_core.errors import PluginError
from bmt_core.ops import Kernels, reference, split_master
from bmt_testing.conformance.kernel_calls import (
    ADAM,
    FLOATS,
    FORMS,
    HALVES,
    POWERS,
    SHAPES,
    WRONG_ROWS,
    AdamRows,
    Logits,
    Rooms,
    alternating,
    calls,
    crossed,
    device_of,
    gapped,
    masters_of_any_bits,
    masters_of_written_parameters,
    numbers_of,
    numbers_of_all_kinds,
    on_gpu,
    plain,
    spaced,
)
from bmt_testing.conformance.kernel_comparison import (
    assert_close,
    assert_equal,
    assert_near,
    assert_refused,
    assert_same_results,
)
from bmt_testing.conformance.offer import Offer

OfferedKernels: TypeAlias = Any  # a KernelProvider with the operations that it happens to have
DECAYS = ((False, 0.0), (False, 0.1), (True, 0.1))  # decoupled, weight_decay
FLAGS = (torch.uint8, torch.bool, torch.float32, torch.int64)
# Rows and classes of logits.
CLASSES = ((1, 1), (3, 2), (5, 17), (4, 33), (2, 1000), (3, 2049), (2, 20003), (0, 5))
MANY = 1000  # tensors, more than the arguments of one launch hold


def _of_types(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return pytest.mark.parametrize("dtype", dtypes, ids=names)


OF_EACH_TYPE = _of_types(*FLOATS)
OF_COMPLEX_TOO = _of_types(*FLOATS, torch.complex64)


# The underscore keeps it out of a file that imports all rules, for kernels of its own.
@pytest.fixture(name="kernels", scope="module")
def _kernels(offer: Offer) -> OfferedKernels:
    """The kernels under test; skipped where they cannot run."""
    kernels = offer.find()()
    if (reason := kernels.available()) is not None:
        pytest.skip(f"they cannot run here: {reason}")
    return kernels


def test_methods_take_the_parameters_of_their_references(kernels: OfferedKernels) -> None:
    try:
        Kernels(kernels)
    except PluginError as error:
        raise AssertionError(str(error)) from error


@pytest.mark.parametrize("form", FORMS)
def test_adam_step_is_its_formula(kernels: OfferedKernels, form: str) -> None:
    device = _device(kernels, "adam_step")
    grads = (torch.float64,) if form == "float64" else (torch.float32, *HALVES)
    for grad, (decoupled, weight_decay) in itertools.product(grads, DECAYS):
        rows = AdamRows(form, [*SHAPES, (4099,)], grad=grad, device=device)
        options = {"decoupled": decoupled, "weight_decay": weight_decay}
        expected = rows.by_formula(**options)
        kernels.adam_step(*rows.columns, **{**ADAM, **options})
        assert_close(rows.numbers(), expected, f"{grad} {options}")


def test_adam_step_rounds_masters_to_nearest(kernels: OfferedKernels) -> None:
    device = _device(kernels, "adam_step")
    for form in ("float16", "bfloat16"):
        rows = AdamRows(form, SHAPES, device=device)
        kernels.adam_step(*rows.columns, **ADAM)
        assert_equal(rows.params, [w.to(rows.params[0].dtype) for w in rows.weights()], form)


def test_adam_step_keeps_every_bit_of_masters_in_two_parts(kernels: OfferedKernels) -> None:
    device = _device(kernels, "adam_step")
    in_parts = AdamRows("two parts", [(5000,)], device=device)
    whole = AdamRows("bfloat16", [(5000,)], device=device)
    for step in range(1, 20):
        for rows in (in_parts, whole):
            kernels.adam_step(*rows.columns, **{**ADAM, "step": step})
        assert_equal(in_parts.numbers(), whole.numbers(), f"after step {step}")
    still = {**ADAM, "lr": 0.0, "weight_decay": 0.0}
    for start in (masters_of_any_bits(), masters_of_written_parameters()):
        rows = AdamRows("two parts", [start[0].shape], device=device)
        rows.params, rows.masters = ([tensor.to(device)] for tensor in start)
        rows.grads[0].zero_()  # a zero minus a zero may have another sign
        rows.exp_avgs[0].zero_()
        expected = split_master(rows.weights()[0])
        kernels.adam_step(*rows.columns, **still)
        assert_equal([rows.params[0], rows.masters[0]], list(expected), "a step of 0")


def test_adam_step_equals_torchs_adam_in_every_bit(kernels: OfferedKernels) -> None:
    device = _device(kernels, "adam_step")
    if on_gpu(kernels):
        pytest.skip("only on the CPU: torch has several kernels for GPUs, which differ")
    shapes = [shape for shape in SHAPES if shape != (0,)]
    for dtype, (decoupled, weight_decay) in itertools.product(
        (torch.float32, torch.float64), DECAYS
    ):
        rows = AdamRows(str(dtype).removeprefix("torch."), shapes, device=device)
        theirs = [torch.nn.Parameter(p.clone()) for p in rows.params]
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay)
        for tensor in (*rows.exp_avgs, *rows.exp_avg_sqs):
            tensor.zero_()
        for step in range(1, 6):
            rows.grads = numbers_of(dtype, device, shapes=shapes)
            for p, grad in zip(theirs, rows.grads, strict=True):
                p.grad = grad.mul_(step % 3 + 0.3).clone()
            optimizer.step()
            options = {"step": step, "decoupled": decoupled, "weight_decay": weight_decay}
            kernels.adam_step(*rows.columns, **{**ADAM, **options})
            state = [optimizer.state[p] for p in theirs]
            expected = [each[name] for name in ("exp_avg", "exp_avg_sq") for each in state]
            found = [*rows.exp_avgs, *rows.exp_avg_sqs, *rows.params]
            assert_equal(found, [*expected, *[p.detach() for p in theirs]], f"{dtype} {options}")


@pytest.mark.parametrize("form", FORMS)
def test_adam_step_changes_nothing_where_skip_is_set(kernels: OfferedKernels, form: str) -> None:
    device = _device(kernels, "adam_step")
    for dtype in FLAGS:
        skipped, taken, usual = (AdamRows(form, SHAPES, device=device) for _ in range(3))
        before = [tensor.clone() for tensor in skipped.written]
        skipped.grads[3][2] = math.nan
        kernels.adam_step(*skipped.columns, **ADAM, skip=torch.ones(1, dtype=dtype, device=device))
        assert_equal(skipped.written, before, f"skip of {dtype} is set")
        kernels.adam_step(*taken.columns, **ADAM, skip=torch.zeros(1, dtype=dtype, device=device))
        kernels.adam_step(*usual.columns, **ADAM)
        assert_equal(taken.written, usual.written, f"skip of {dtype} is not set")


@pytest.mark.parametrize("form", FORMS)
def test_adam_step_clips_gradients_and_divides_them_by_the_scale(
    kernels: OfferedKernels, form: str
) -> None:
    device = _device(kernels, "adam_step")
    clip = torch.tensor(0.375, device=device)
    for scale in (7.0, torch.tensor([7.0], device=device), torch.tensor(7.0, device=device)):
        rows = AdamRows(form, SHAPES, device=device)
        expected = rows.by_formula(clip=0.375, scale=7.0)
        kernels.adam_step(*rows.columns, **ADAM, scale=scale, clip=clip)
        assert_close(rows.numbers(), expected, f"scale is {scale!r}", least=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_adam_step_with_hold_moves_moments_alone(kernels: OfferedKernels, form: str) -> None:
    device = _device(kernels, "adam_step")
    held, free = (AdamRows(form, SHAPES, device=device) for _ in range(2))
    before = [tensor.clone() for tensor in (*held.params, *held.weights())]
    kernels.adam_step(*held.columns, **ADAM, hold=True)
    kernels.adam_step(*free.columns, **ADAM)
    assert_equal([*held.params, *held.weights()], before, "parameters")
    moments = [[*rows.exp_avgs, *rows.exp_avg_sqs] for rows in (held, free)]
    assert_equal(moments[0], moments[1], "moments")


def test_adam_step_keeps_infinities_nan_and_tiny_numbers(kernels: OfferedKernels) -> None:
    device = _device(kernels, "adam_step")
    for form in ("float32", "float16", "bfloat16", "two parts"):
        rows = AdamRows(form, [(64,)], grad=torch.float32, device=device)
        special = [math.inf, -math.inf, math.nan, 1e-40, -1e-44, 0.0, 3e38]
        rows.grads[0][:7] = torch.tensor(special, device=device)
        tiny = slice(7, 14)
        rows.exp_avgs[0][tiny], rows.exp_avg_sqs[0][tiny] = 1e-41, 1e-42
        rows.grads[0][tiny] = 1e-42
        expected = rows.by_formula(weight_decay=0.0)
        kernels.adam_step(*rows.columns, **{**ADAM, "weight_decay": 0.0})
        means, squares, weights = rows.numbers()
        is_usual = torch.ones(64, dtype=torch.bool, device=device)
        is_usual[:3] = is_usual[6] = False
        assert_close([means[is_usual], weights[is_usual]], [e[is_usual] for e in expected[::2]])
        for found, exact in zip((means, squares), expected[:2], strict=True):
            torch.testing.assert_close(found[tiny].double(), exact[tiny], rtol=0.0, atol=2e-45)
        # Infinity, or NaN: either shows that the gradient was no number.
        assert not torch.isfinite(torch.stack([squares[:2], means[:2]])).any(), form
        assert weights[:3].isnan().all() and not torch.isfinite(squares[6]), form


def test_adam_step_takes_complex_numbers_as_pairs(kernels: OfferedKernels) -> None:
    device = _device(kernels, "adam_step")
    for dtype in (torch.complex64, torch.complex128):
        param, grad, mean, square = numbers_of(dtype, device, shapes=[(9,)] * 4)
        square = torch.view_as_complex(torch.view_as_real(square).abs())
        row = [param, grad, mean, square]
        expected = [tensor.clone() for tensor in row]
        kernels.adam_step(*[[tensor] for tensor in row], [None], **ADAM)
        pairs = AdamRows("float64", [(9, 2)], device=device)
        for column, tensor in zip(pairs.columns, expected, strict=False):
            column[0] = torch.view_as_real(tensor).double()
        found = [torch.view_as_real(tensor) for tensor in (mean, square, param)]
        assert_close(found, pairs.by_formula(), str(dtype))


@OF_EACH_TYPE
def test_cross_entropy_forward_is_its_definition(
    kernels: OfferedKernels, dtype: torch.dtype
) -> None:
    device = _device(kernels, "cross_entropy_forward")
    for (rows, classes), first, is_weighted in itertools.product(CLASSES, (0, 3), (False, True)):
        data = Logits(rows, classes, dtype, device)
        options: dict[str, Any] = {
            "first_class": first,
            "weight": data.weight if is_weighted else None,
        }
        found = kernels.cross_entropy_forward(
            data.logits, data.target + first, **options, with_sum=True
        )
        log_prob = torch.log_softmax(data.logits.double(), dim=1)
        weight = data.weight.double() if is_weighted else 1.0
        expected = [
            data.row_max,
            data.log_sum,
            log_prob.gather(1, data.target.unsqueeze(1)).squeeze(1),
            (log_prob * weight).sum(1),
        ]
        title = f"{rows} x {classes}"
        assert torch.equal(found[0], expected[0]), f"row_max of {title}"
        assert_near(found[1], expected[1], f"log_sum of {title}")
        assert_near(found[2], expected[2], f"target_log_prob of {title}")
        assert_near(found[3], expected[3], f"log_prob_sum of {title}", least=1e-5)
        short = kernels.cross_entropy_forward(data.logits, data.target + first, **options)
        assert short[3] is None, "log_prob_sum without with_sum"
        assert_equal(short[:3], found[:3], f"without with_sum: {title}")


@OF_EACH_TYPE
def test_cross_entropy_backward_is_its_definition(
    kernels: OfferedKernels, dtype: torch.dtype
) -> None:
    device = _device(kernels, "cross_entropy_backward")
    for (rows, classes), has_spread, is_weighted in itertools.product(
        CLASSES, (False, True), (False, True)
    ):
        data = Logits(rows, classes, dtype, device)
        total, hit, spread = (f.double().unsqueeze(1) for f in data.factors[2:])
        expected = data.logits.double().softmax(1) * total
        if has_spread:
            expected -= spread * (data.weight.double() if is_weighted else 1.0)
        expected.scatter_add_(1, data.target.unsqueeze(1), -hit)
        found = kernels.cross_entropy_backward(
            data.logits,
            data.target,
            *data.factors[:4],
            data.spread if has_spread else None,
            weight=data.weight if is_weighted else None,
        )
        assert_near(found, expected, f"{rows} x {classes}", dtype=dtype)


def test_the_gradient_of_logits_has_their_type_and_layout(kernels: OfferedKernels) -> None:
    device = _device(kernels, "cross_entropy_backward")
    for dtype, layout in itertools.product(FLOATS, (plain, crossed, gapped)):
        data = Logits(20, 24, dtype, device, layout)
        found = kernels.cross_entropy_backward(data.logits, data.target, *data.factors)
        expected = torch.empty_like(data.logits)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        version, place = data.logits._version, data.logits
        written = kernels.cross_entropy_backward(place, data.target, *data.factors, out=place)
        assert written is place and place._version > version and torch.equal(place, found), "out"


def test_targets_of_other_classes_are_not_looked_up(kernels: OfferedKernels) -> None:
    device = _device(kernels, "cross_entropy_forward", "cross_entropy_backward")
    logits, ones = torch.zeros(7, 4, device=device), torch.ones(7, device=device)
    target = torch.tensor([-(2**63), 2**63 - 1, -1, 10, 9, 7, 11], device=device)
    for first in (7, 0, -(2**62), 2**62):
        is_here = [first <= number < first + 4 for number in target.tolist()]
        largest, log_sum, found, _ = kernels.cross_entropy_forward(
            logits, target, first_class=first
        )
        expected = torch.tensor([math.log(0.25) if here else 0.0 for here in is_here])
        torch.testing.assert_close(found.cpu(), expected)
        gradient = kernels.cross_entropy_backward(
            logits, target, largest, log_sum, ones, ones, None, first_class=first
        )
        sums = torch.tensor([0.0 if here else 1.0 for here in is_here])
        torch.testing.assert_close(gradient.sum(1).cpu(), sums, rtol=0.0, atol=1e-6)


EXTREMES = {
    "few of many": [-math.inf] * 2048 + [-500.0] * 5,
    "all -inf": [-math.inf] * 3000,
    "inf": [math.inf] + [0.0] * 3000,
    "NaN": [0.0] * 2500 + [math.nan],
    "NaN and inf": [math.nan] + [math.inf] * 30,
    "one of many": [3.0] * 2048 + [-math.inf] * 2048 + [1000.0] * 7,
    "large": [30000.0 + i for i in range(9)],
    "tiny": [-(2.0**-24)] * 5,
    "far apart": [60000.0, -60000.0],
}


@pytest.mark.parametrize("case", EXTREMES)
def test_cross_entropy_of_extreme_rows_is_the_references(
    kernels: OfferedKernels, case: str
) -> None:
    device = _device(kernels, "cross_entropy_forward", "cross_entropy_backward")
    target, ones = torch.tensor([1, 3, 0], device=device), torch.ones(3, device=device)
    for dtype in (torch.float32, torch.float16):
        logits = torch.tensor([EXTREMES[case]] * 3, device=device).to(dtype)
        found = kernels.cross_entropy_forward(logits, target, with_sum=True)
        expected = reference.cross_entropy_forward(logits, target, with_sum=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        factors = (*expected[:2], ones, ones, None)
        torch.testing.assert_close(
            kernels.cross_entropy_backward(logits, target, *factors),
            reference.cross_entropy_backward(logits, target, *factors),
            rtol=1e-3,
            atol=1e-6,
            equal_nan=True,
        )


@OF_EACH_TYPE
def test_every_element_that_is_not_finite_is_found(
    kernels: OfferedKernels, dtype: torch.dtype
) -> None:
    device = _device(kernels, "has_non_finite")
    info = torch.finfo(dtype)
    for size in (1, 17, 33, 4097):
        clean = torch.full((size,), info.max, dtype=dtype, device=device)
        clean[1::2] = -info.smallest_normal / 4
        assert not _is_found(kernels, [clean, clean]), f"{size} finite numbers"
        for index, bad in itertools.product(
            {0, size // 2, size - 1}, (math.inf, -math.inf, math.nan)
        ):
            spoiled = clean.clone()
            spoiled[index] = bad
            assert _is_found(kernels, [clean, spoiled, clean]), f"{bad} at {index} of {size}"


def test_has_non_finite_does_not_clear_the_flag(kernels: OfferedKernels) -> None:
    device = _device(kernels, "has_non_finite")
    clean, empty = torch.ones(5, device=device), torch.empty(0, device=device)
    spoiled = torch.tensor([1.0, complex(0.0, math.nan)], device=device)
    for dtype in (torch.uint8, torch.bool, torch.int32):
        flag = torch.zeros(1, dtype=dtype, device=device)
        for tensors, expected in (
            ([], 0),
            ([empty], 0),
            ([clean], 0),
            ([clean, spoiled], 1),
            ([clean], 1),
            ([], 1),
        ):
            kernels.has_non_finite(tensors, flag)
            assert flag.item() == expected, dtype


@OF_COMPLEX_TOO
def test_powers_sum_is_that_of_all_elements_in_float32(
    kernels: OfferedKernels, dtype: torch.dtype
) -> None:
    device = _device(kernels, "powers_sum")
    # Their sum in bfloat16 would stall at 256.
    tensors = [*numbers_of(dtype, device), torch.ones(600, dtype=dtype, device=device)]
    weights = [1.0 / (1 + i % 3) for i in range(len(tensors))]
    for p in POWERS:
        found = kernels.powers_sum(tensors, p, weights, device)
        sizes = [tensor.abs().double() for tensor in tensors]
        if p == math.inf:
            expected = max(size.max().item() for size in sizes if size.numel())
        else:
            powers = [float(size.pow(p).sum()) for size in sizes]
            expected = sum(w * power for w, power in zip(weights, powers, strict=True))
        assert (found.dtype, found.shape, found.device) == (torch.float32, (), device), p
        assert found.item() == pytest.approx(expected, rel=2e-6), p


def test_powers_sum_of_nothing_is_zero(kernels: OfferedKernels) -> None:
    device = _device(kernels, "powers_sum")
    for p, tensors in itertools.product(POWERS, ([], [torch.empty(0, device=device)])):
        found = kernels.powers_sum(tensors, p, [1.0] * len(tensors), device)
        assert (found.item(), found.dtype, found.shape) == (0.0, torch.float32, ()), p


def test_powers_sum_keeps_infinities_nan_and_tiny_numbers(kernels: OfferedKernels) -> None:
    device = _device(kernels, "powers_sum")
    for dtype, p, index in itertools.product(FLOATS, POWERS, (0, 20, 36)):
        for bad in (math.inf, -math.inf, math.nan):
            tensor = torch.ones(37, dtype=dtype, device=device)
            tensor[index] = bad
            lists = ([tensor, torch.ones_like(tensor)], [torch.ones_like(tensor), tensor])
            for tensors in lists:
                found = kernels.powers_sum(tensors, p, [1.0, 1.0], device).item()
                assert found == math.inf or (math.isnan(found) and math.isnan(bad)), (dtype, p, bad)
                assert math.isnan(found) == math.isnan(bad), (dtype, p, bad)
    tiny = torch.full((1000,), 1e-42, device=device)
    assert kernels.powers_sum([tiny], math.inf, [1.0], device).item() == tiny[0].item()
    found = kernels.powers_sum([tiny], 1.0, [1.0], device).item()
    assert found == pytest.approx(1e-39, rel=1e-2)


@OF_COMPLEX_TOO
def test_scale_multiplies_in_float32_and_rounds_once(
    kernels: OfferedKernels, dtype: torch.dtype
) -> None:
    device = _device(kernels, "scale_")
    wide = torch.promote_types(dtype, torch.float32)
    for number in (1 / 3, 1.0, 2.0**-9, 1000.0, -0.0):
        factor = torch.tensor(number, device=device)
        tensors = [*numbers_of(dtype, device), numbers_of_all_kinds(dtype).to(device)]
        expected = [(tensor.to(wide) * factor).to(dtype) for tensor in tensors]
        kernels.scale_(tensors, factor)
        for own, exact in zip(tensors, expected, strict=True):
            torch.testing.assert_close(own, exact, rtol=0.0, atol=0.0, equal_nan=True)


def test_zero_if_clears_everything_where_the_flag_is_set(kernels: OfferedKernels) -> None:
    device = _device(kernels, "zero_if_")
    for dtype, kind in itertools.product((*FLOATS, torch.complex64), FLAGS):
        tensors = numbers_of(dtype, device)
        tensors[5][:3] = torch.tensor([math.nan, math.inf, -math.inf], device=device)
        before = [tensor.clone() for tensor in tensors]
        kernels.zero_if_(tensors, torch.zeros(1, dtype=kind, device=device))
        assert_equal(tensors, before, f"{dtype}, the flag of {kind} is not set")
        kernels.zero_if_(tensors, torch.full((), 1, dtype=kind, device=device))
        assert not any(bool(tensor.any()) for tensor in tensors), f"{dtype}, {kind}"


def test_lists_may_be_long_and_mix_types(kernels: OfferedKernels) -> None:
    device = device_of(kernels)
    operations = kernels.operations()
    if "adam_step" in operations:
        mixed = AdamRows(FORMS[0], [], device=device)
        for number in range(MANY):
            form, size = FORMS[number % len(FORMS)], number % 40
            grad = (*HALVES, torch.float32)[number % 3]
            row = AdamRows(form, [(size,)], device=device, grad=grad, seed=number)
            for column, new in zip(mixed.columns, row.columns, strict=True):
                column += new
        expected = mixed.by_formula()
        kernels.adam_step(*mixed.columns, **ADAM)
        assert_close(mixed.numbers(), expected)
    shapes = [(number % 50,) for number in range(MANY // len(FLOATS))]
    columns = [numbers_of(dtype, device, shapes=shapes) for dtype in FLOATS]
    tensors = [tensor for row in zip(*columns, strict=True) for tensor in row]
    if "powers_sum" in operations:
        found = kernels.powers_sum(tensors, 2.0, [1.0] * len(tensors), device)
        squares = sum(float(tensor.double().square().sum()) for tensor in tensors)
        assert found.item() == pytest.approx(squares, rel=1e-6)
    if "has_non_finite" in operations:
        assert not _is_found(kernels, tensors)
        for tensor in (tensors[5], tensors[-1], tensors[-2]):
            tensor[-1] = math.nan
            assert _is_found(kernels, tensors)
            tensor[-1] = 1.0
    if "scale_" in operations:
        factor = torch.tensor(0.3, device=device)
        twins = [tensor.clone() for tensor in tensors]
        kernels.scale_(tensors, factor)
        reference.scale_(twins, factor)
        assert_same_results(tensors, twins, "scale_")
    if "zero_if_" in operations:
        kernels.zero_if_(tensors, torch.ones(1, dtype=torch.uint8, device=device))
        assert not any(bool(tensor.any()) for tensor in tensors)


@pytest.mark.parametrize("offset", [1, 3])
def test_tensors_may_begin_at_any_address(kernels: OfferedKernels, offset: int) -> None:
    # NaN around them shows in a result if it is read.
    for usual, moved in zip(
        calls(kernels, lambda: plain),
        calls(kernels, lambda: Rooms(offset, math.nan)),
        strict=True,
    ):
        assert_same_results(moved.run(kernels), usual.run(kernels), usual.title)


def test_tensors_may_have_any_strides(kernels: OfferedKernels) -> None:
    for layout in (crossed, gapped, spaced):
        for usual, strided, mixed in zip(
            calls(kernels, lambda: plain),
            calls(kernels, lambda layout=layout: layout),  # type: ignore[misc]
            calls(kernels, alternating),
            strict=True,
        ):
            expected = usual.run(kernels)
            assert_same_results(strided.run(kernels), expected, usual.title)
            assert_same_results(mixed.run(kernels), expected, usual.title)
    if "cross_entropy_forward" in kernels.operations():
        row = torch.randn(1, 24, device=device_of(kernels))
        target = torch.zeros(20, dtype=torch.int64, device=row.device)
        found, expected = (
            kernels.cross_entropy_forward(logits, target, with_sum=True)
            for logits in (row.expand(20, 24), row.repeat(20, 1))
        )
        assert_same_results([*found], [*expected], "cross_entropy_forward of one row 20 times")


def test_memory_beside_the_tensors_stays_as_it_is(kernels: OfferedKernels) -> None:
    rooms: list[Rooms] = []

    def new_rooms() -> Rooms:
        rooms.append(Rooms(before=3))
        return rooms[-1]

    for call in calls(kernels, new_rooms):
        call.run(kernels)
        assert all(room.are_as_they_were() for room in rooms), call.title
        rooms.clear()


def test_what_is_only_read_stays_as_it_is(kernels: OfferedKernels) -> None:
    for layout in (plain, crossed):
        for call in calls(kernels, lambda layout=layout: layout):  # type: ignore[misc]
            before = [tensor.clone() for tensor in call.read]
            call.run(kernels)
            assert_equal(call.read, before, call.title)


def test_what_is_written_and_nothing_else_has_a_new_version(kernels: OfferedKernels) -> None:
    for call in calls(kernels, lambda: plain):
        tensors = [tensor for tensor in (*call.read, *call.written) if tensor.numel()]
        before = [tensor._version for tensor in tensors]
        # Nobody differentiates through Adam's states, so their versions may stay.
        states = call.written if call.operation == "adam_step" else []
        states = [each for each in states if not any(each is p for p in call.arguments[0])]
        call.run(kernels)
        for tensor, version in zip(tensors, before, strict=True):
            if any(tensor is each for each in states):
                continue
            is_written = any(tensor is each for each in call.written)
            assert (tensor._version > version) == is_written, (
                f"{call.title}: the version of a tensor that is"
                f" {'written' if is_written else 'only read'} went from {version} to"
                f" {tensor._version}"
            )
    if "adam_step" in kernels.operations():
        rows = AdamRows("bfloat16", [(5,)], device=device_of(kernels))
        version = rows.params[0]._version
        kernels.adam_step(*rows.columns, **ADAM, hold=True)
        assert rows.params[0]._version == version, "the version of a parameter that is held"


def test_arguments_that_do_not_fit_are_errors_and_nothing_is_written(
    kernels: OfferedKernels,
) -> None:
    device, operations = device_of(kernels), kernels.operations()
    one, two, flags = (
        torch.ones(n, device=device, dtype=dtype)
        for n, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.uint8))
    )
    ones, logits = torch.ones(10, device=device), torch.zeros(5, 7, device=device)
    whole = torch.ones(10, device=device, dtype=torch.int64)
    target, flag = torch.zeros(5, device=device, dtype=torch.int64), flags[:1]
    flag.zero_()
    if "adam_step" in operations:
        for case, spoil in WRONG_ROWS.items():
            rows = AdamRows("bfloat16", [(6,), (5,)], device=device)
            before = [tensor.clone() for tensor in rows.written]
            assert_refused(case, kernels.adam_step, *spoil(rows.columns), **ADAM)
            assert_equal(rows.written, before, f"{case}: something was written before the error")
        for name in ("clip", "scale", "skip"):
            rows = AdamRows("float32", [(2,)], device=device)
            assert_refused(
                f"{name} of two elements", kernels.adam_step, *rows.columns, **ADAM, **{name: two}
            )
    cases: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
        "has_non_finite": [
            ("whole numbers", ([whole], flag)),
            ("a flag of two elements", ([ones], flags)),
            ("a flag of float32", ([ones], one)),
        ],
        "powers_sum": [("fewer weights", ([ones, ones], 2.0, [1.0], device))],
        "scale_": [("whole numbers", ([whole], one)), ("two factors", ([ones], two))],
        "zero_if_": [("a flag of two elements", ([ones], flags))],
        "cross_entropy_forward": [
            ("logits of one dimension", (logits.view(-1), target)),
            ("logits of whole numbers", (logits.long(), target)),
            ("fewer targets", (logits, target[:4])),
            ("targets of int32", (logits, target.int())),
        ],
        "cross_entropy_backward": [
            ("a factor of another size", (logits, target, *[ones[:5]] * 3, ones[:7], None)),
            ("fewer targets", (logits, target[:4], *[ones[:5]] * 4, None)),
        ],
    }
    for operation, wrong in cases.items():
        for case, arguments in wrong if operation in operations else []:
            assert_refused(f"{operation} of {case}", getattr(kernels, operation), *arguments)
    assert ones.eq(1).all() and whole.eq(1).all() and logits.eq(0).all() and flags[0] == 0


def test_the_host_does_not_wait_for_the_gpu(kernels: OfferedKernels) -> None:
    if not on_gpu(kernels):
        pytest.skip("they are not for GPUs")
    for call in calls(kernels, lambda: plain):
        # The first call may load code and reserve memory.
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                call.run(kernels)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def _device(kernels: OfferedKernels, *operations: str) -> torch.device:
    """Return the device of ``kernels``; skip a test of operations that they do not have."""
    for operation in operations:
        if operation not in kernels.operations():
            pytest.skip(f"they have no {operation}")
    return device_of(kernels)


def _is_found(kernels: OfferedKernels, tensors: list[torch.Tensor]) -> bool:
    flag = torch.zeros(1, dtype=torch.uint8, device=tensors[0].device)
    kernels.has_non_finite(tensors, flag)
    return bool(flag)
