"""``FusedCrossEntropy`` against ``torch.nn.CrossEntropyLoss`` on float32 logits, its memory, and
what it refuses.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.errors import BmtError
from bmt_core.ops.reference.cross_entropy import MAX_ELEMENTS
from bmt_core.run import runtime
from bmt_testing import on_ranks
from bmtrain.loss import FusedCrossEntropy, _function

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]


def data(
    rows: int, classes: int, dtype: torch.dtype, *, seed: int = 0, spread: float = 3.0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * spread).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,), generator=generator)
    return logits, target, torch.rand(classes, generator=generator) + 0.1


def compare(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """Loss and gradient equal those of torch on float32 (float64) logits, the gradient rounded to
    the logits' dtype.
    """
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    if options.get("weight") is not None:
        options["weight"] = options["weight"].to(wide.dtype)
    expected = torch.nn.CrossEntropyLoss(**options)(wide, target.long())
    found = FusedCrossEntropy(**options)(logits, target)
    assert found.dtype == wide.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    upstream = torch.randn(
        expected.shape, dtype=wide.dtype, generator=torch.Generator().manual_seed(7)
    )
    (grad,) = torch.autograd.grad(found, logits, upstream)
    (expected_grad,) = torch.autograd.grad(expected, wide, upstream)
    assert grad.dtype == logits.dtype
    # One rounding to the dtype of the logits, and what float32 arithmetic in another order
    # may move.
    rounding = torch.finfo(logits.dtype).eps / 2
    tolerance = {"rtol": max(rounding, 5e-6), "atol": 1e-6}
    torch.testing.assert_close(grad.to(wide.dtype), expected_grad, equal_nan=True, **tolerance)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    label_smoothing=st.sampled_from([0.0, 0.25, 1.0]),
    ignore_index=st.sampled_from([-100, 0, 3, 1000]),
    is_weighted=st.booleans(),
    is_transposed=st.booleans(),
    chunk=st.sampled_from([1, 50, 1 << 24]),
    seed=st.integers(0, 5),
)
def test_equals_torch_for_all_sizes(
    rows: int,
    classes: int,
    dtype: torch.dtype,
    reduction: str,
    label_smoothing: float,
    ignore_index: int,
    is_weighted: bool,
    is_transposed: bool,
    chunk: int,
    seed: int,
) -> None:
    logits, target, weight = data(rows, classes, dtype, seed=seed)
    if is_transposed:
        logits = logits.detach().t().contiguous().t().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAX_ELEMENTS, "cpu", chunk)
        compare(
            logits,
            target,
            weight=weight if is_weighted else None,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_expanded_logits(dtype: torch.dtype) -> None:
    logits, target, _ = data(24, 20, dtype)
    for view in (
        logits[::2, ::3],
        logits.t()[:20, :17],
        logits[:1].expand(24, 20),
        logits.view(24, 20)[:, 3:4],
    ):
        rows, classes = view.shape
        leaf = view.detach().requires_grad_()
        compare(leaf, target[:rows] % classes, label_smoothing=0.1)
    transposed = logits.detach().t().requires_grad_()
    FusedCrossEntropy()(transposed, target[:20] % 24).backward()
    assert transposed.grad is not None and transposed.grad.shape == (20, 24)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype(dtype: torch.dtype) -> None:
    logits, target, _ = data(9, 4, torch.float32)
    compare(logits, target.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_backward_is_right(dtype: torch.dtype) -> None:
    logits, target, _ = data(10, 6, dtype)
    loss = FusedCrossEntropy(label_smoothing=0.1)(logits, target)
    loss.backward(retain_graph=True)
    assert logits.grad is not None
    first = logits.grad.clone()
    before = logits.detach().clone()
    logits.grad = None
    loss.backward()
    assert torch.equal(logits.grad, first)
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_half_logits_are_never_copied_whole_to_float32(
    dtype: torch.dtype, label_smoothing: float
) -> None:
    logits, target, weight = data(64, 1000, dtype)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.dtype.itemsize >= 4:
                    largest = max(
                        largest, tensor.untyped_storage().nbytes() // tensor.element_size()
                    )
            return result

    with Watch():
        FusedCrossEntropy(weight, label_smoothing=label_smoothing)(logits, target).backward()
    assert 0 < largest <= logits.numel() // 8


@pytest.mark.parametrize("bad", [-1, 7, 10**9, -(10**9)])
def test_target_out_of_range_is_an_error(bad: int) -> None:
    logits, target, weight = data(5, 7, torch.float32)
    target[3] = bad
    with pytest.raises(
        IndexError, match=f"Target {bad} is out of bounds: there are 7 classes, 0 to 6"
    ):
        FusedCrossEntropy(weight)(logits, target)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-1, 7, 10**9])
def test_target_out_of_range_on_a_gpu_is_nan_then_an_error_and_the_device_lives(bad: int) -> None:
    logits, target, weight = (t.detach().cuda() for t in data(5, 7, torch.bfloat16))
    logits.requires_grad_()
    target[3] = bad
    loss = FusedCrossEntropy(weight)
    value = loss(logits, target)
    assert value.isnan()  # this reads the value on the host, so the flag has arrived too
    with pytest.raises(
        IndexError, match="A target in an earlier pass was out of bounds: there are 7 classes"
    ):
        value.backward()
    target[3] = 0
    assert loss(logits, target).isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_it_equals_the_cpu_and_never_waits(dtype: torch.dtype) -> None:
    logits, target, weight = data(50, 33, dtype)
    target[::7] = -100
    loss = FusedCrossEntropy(weight, label_smoothing=0.1)
    expected = loss(logits, target)
    expected.backward()
    moved = logits.detach().cuda().requires_grad_()
    loss, target = loss.cuda(), target.cuda()
    loss(moved, target).backward()  # the first use of a kernel may synchronise while it is loaded
    moved.grad = None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = loss(moved, target)
        found.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert moved.grad is not None and logits.grad is not None
    torch.testing.assert_close(moved.grad.cpu(), logits.grad)


def test_what_it_cannot_take_is_refused_with_words() -> None:
    logits, target, weight = data(5, 7, torch.float32)
    with pytest.raises(ValueError, match="Expected logits \\(N, C\\) and targets \\(N,\\)"):
        FusedCrossEntropy()(logits.view(1, 5, 7), target.view(1, 5))
    with pytest.raises(ValueError, match=r"Expected logits .* not \(5, 7\) and \(4,\)"):
        FusedCrossEntropy()(logits, target[:4])
    with pytest.raises(
        ValueError, match=r"weight must have one entry per class, \(7,\), not \(6,\)"
    ):
        FusedCrossEntropy(weight[:6])(logits, target)
    with pytest.raises(TypeError, match="class indices"):
        FusedCrossEntropy()(logits, target.float())
    with pytest.raises(TypeError, match="floating-point"):
        FusedCrossEntropy()(target.view(5, 1), target)
    with pytest.raises(ValueError, match="reduction"):
        FusedCrossEntropy(reduction="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing"):
        FusedCrossEntropy(label_smoothing=1.5)


def test_module_moves_copies_and_pickles_with_its_weight() -> None:
    logits, target, weight = data(5, 7, torch.float32)
    loss = FusedCrossEntropy(weight)
    assert set(loss.state_dict()) == {"weight"}
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(logits, target), loss(logits, target))
    assert "label_smoothing=0.0" in repr(loss)


def test_parallel_without_tensor_parallelism_is_the_ordinary_loss() -> None:
    logits, target, _ = data(5, 7, torch.bfloat16)
    assert torch.equal(
        FusedCrossEntropy(parallel=True)(logits, target), FusedCrossEntropy()(logits, target)
    )


@on_ranks(4, init={"tp_size": 4})
def test_parallel_equals_the_whole_vocabulary(world_size: int) -> None:
    for label_smoothing, is_weighted in itertools.product([0.0, 0.1], [False, True]):
        logits, target, weight = _parallel_data()
        options: dict[str, Any] = {
            "weight": weight if is_weighted else None,
            "label_smoothing": label_smoothing,
        }
        whole = logits.detach().requires_grad_()
        expected = torch.nn.CrossEntropyLoss(**options)(whole, target)
        (expected_grad,) = torch.autograd.grad(expected, whole)
        own = logits.chunk(world_size, dim=1)[runtime.rank()].clone().requires_grad_()
        value = FusedCrossEntropy(**options, parallel=True)(own, target)
        (grad,) = torch.autograd.grad(value, own)
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=2e-6)
        right = expected_grad.chunk(world_size, dim=1)[runtime.rank()]
        torch.testing.assert_close(grad, right, rtol=5e-6, atol=1e-7)


def _parallel_data() -> tuple[torch.Tensor, ...]:
    logits, target, weight = data(21, 16, torch.float32)
    target[:4] = torch.tensor([0, 7, 15, 3])
    target[5] = -100
    return logits.detach(), target, weight


@on_ranks(2, init={"tp_size": 2})
def test_parallel_communicates_twice_forward_and_never_backward() -> None:
    logits, target, _ = data(6, 8, torch.float32)
    for label_smoothing in (0.0, 0.1):
        loss = FusedCrossEntropy(label_smoothing=label_smoothing, parallel=True)
        for _ in range(2):  # in the first calls the ranks compare their targets
            loss(logits, target)
        with Counting() as forward:
            value = loss(logits, target)
        with Counting() as backward:
            value.backward()
        assert forward == ["all_reduce"] * 2 and backward == []


@on_ranks(4, init={"tp_size": 4})
def test_parallel_is_exact_for_large_logits_and_infinite_where_torch_is(world_size: int) -> None:
    for dtype, label_smoothing in itertools.product([torch.float32, torch.float64], [0.0, 0.1]):
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing}
        logits, target = _extreme_data(dtype)
        whole, eps = logits.clone().requires_grad_(), torch.finfo(dtype).eps
        expected = torch.nn.CrossEntropyLoss(**options)(whole, target)
        (expected_grad,) = torch.autograd.grad(expected.sum(), whole)
        assert not expected[1:].isfinite().all()
        own = logits.chunk(world_size, dim=1)[runtime.rank()].clone().requires_grad_()
        losses = FusedCrossEntropy(**options, parallel=True)(own, target)
        (grad,) = torch.autograd.grad(losses.sum(), own)
        torch.testing.assert_close(losses, expected, equal_nan=True, rtol=8 * eps, atol=0.0)
        # Padding gets no gradient from an infinite loss, as label smoothing makes of it.
        useful = ~expected.isinf()
        right = expected_grad.chunk(world_size, dim=1)[runtime.rank()][useful]
        torch.testing.assert_close(grad[useful], right, equal_nan=True, rtol=16 * eps, atol=eps)


def _extreme_data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of large logits, of which a slice, all, or all but one slice are -inf."""
    logits, target, _ = data(6, 16, dtype)
    logits = logits.detach() + 10_000
    target[:] = torch.tensor([2, 7, 3, 9, 14, -100])
    logits[0, 8:] -= 20_000
    logits[1, 12:] = -math.inf
    logits[2] = -math.inf
    logits[3, :8] = logits[3, 12:] = -math.inf
    logits[4, 4] = -math.inf
    return logits, target


@on_ranks(2, init={"tp_size": 2})
def test_parallel_with_a_padded_vocabulary_and_targets_out_of_range() -> None:
    expected = torch.nn.CrossEntropyLoss()(torch.ones(3, 4), torch.tensor([0, 3, 1]))
    # The whole slice of rank 1 is padding.
    own = torch.full((3, 4), 1.0 if runtime.rank() == 0 else -math.inf)
    loss = FusedCrossEntropy(parallel=True)
    torch.testing.assert_close(loss(own, torch.tensor([0, 3, 1])), expected)
    with pytest.raises(IndexError, match=r"^Target 8 is out of bounds: there are 8 classes, 0 to"):
        loss(own, torch.tensor([0, 8, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_has_inf_nan_sets_and_never_clears(dtype: torch.dtype) -> None:
    out = torch.zeros(1, dtype=torch.uint8)
    _function.has_inf_nan(torch.ones(4, 3, dtype=dtype), out)
    assert out.item() == 0
    for bad in (math.inf, -math.inf, math.nan):
        out.zero_()
        _function.has_inf_nan(torch.tensor([1.0, bad, 2.0], dtype=dtype), out)
        assert out.item() == 1
    _function.has_inf_nan(torch.ones(4, dtype=dtype), out)
    assert out.item() == 1


def test_has_inf_nan_refuses_what_is_no_flag() -> None:
    with pytest.raises(ValueError, match="uint8"):
        _function.has_inf_nan(torch.ones(2), torch.zeros(1))
    with pytest.raises(TypeError, match="floating-point"):
        _function.has_inf_nan(torch.ones(2, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8))


def test_second_derivatives_are_refused_where_a_term_would_be_missing() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    with pytest.raises(BmtError, match="no second derivatives"):
        torch.autograd.grad(FusedCrossEntropy()(logits, torch.arange(3)), logits, create_graph=True)
