"""``linear_cross_entropy`` against ``torch.nn.functional.cross_entropy`` of whole logits: values,
gradients, rounding and memory, on one rank and on several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmt_core.errors import BmtError
from bmt_core.run import runtime
from bmt_params.losses import linear_cross_entropy as module
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks
from bmt_tp import Head, PerPosition, Plan, VocabularyEmbedding, parallelize
from bmtrain.loss import linear_cross_entropy

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 3},
    "label_smoothing": {"label_smoothing": 0.1},
    "only smoothing": {"label_smoothing": 1.0, "reduction": "none"},
    "z_loss": {"z_loss": 0.01},
    "soft_cap": {"soft_cap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "soft_cap": 1.5, "ignore_index": 0},
    "all, none": {"label_smoothing": 0.2, "z_loss": 0.1, "soft_cap": 1.5, "reduction": "none"},
}
CHUNK = 4 * 19 * 8
"""Bytes of four rows of float64 logits over 19 classes."""


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """What it replaces: the whole logits, in float32 for the loss as transformers has them."""
    logits = linear(hidden, weight, bias).flatten(0, -2)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(
        logits,
        targets.flatten(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    counts = targets.flatten() != ignore_index
    losses = losses + (z_loss * logits.logsumexp(1).square()).where(counts, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


def data(rows: int = 26, classes: int = 19, width: int = 7, *, seed: int = 0) -> list[torch.Tensor]:
    """Hidden states, weight and bias in float64, and targets, some of them ignored."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = (rows, width), (classes, width), (classes,)
    values = [torch.randn(shape, generator=drawn, dtype=torch.float64) for shape in shapes]
    targets = torch.randint(classes, (rows,), generator=drawn)
    targets[::5] = -100
    return [*values, targets]


def results(
    loss: Any, tensors: list[torch.Tensor], dtype: torch.dtype, **options: Any
) -> list[torch.Tensor]:
    """The loss and the gradients of hidden states, weight and bias."""
    *values, targets = tensors
    targets = targets.masked_fill(targets == -100, options.get("ignore_index", -100))
    hidden, weight, bias = (value.to(dtype).detach().requires_grad_() for value in values)
    found = loss(hidden, weight, targets, bias=bias, **options)
    upstream = torch.linspace(-0.3, 0.7, found.numel(), dtype=found.dtype).view(found.shape)
    found.backward(upstream)
    grads = [hidden.grad, weight.grad, bias.grad]
    assert all(g is not None and g.dtype == dtype for g in grads)
    return [found.detach(), *(g for g in grads if g is not None)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    yield


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    classes=st.integers(1, 30),
    width=st.integers(1, 9),
    options=st.sampled_from(list(OPTIONS.values())),
    chunk=st.sampled_from([1, 500, 1 << 20]),
    seed=st.integers(0, 5),
)
def test_loss_and_gradients_are_torchs_for_all_sizes(
    rows: int, classes: int, width: int, options: dict[str, Any], chunk: int, seed: int
) -> None:
    tensors = data(rows, classes, width, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        found = results(linear_cross_entropy, tensors, torch.float64, **options)
    expected = results(plain, tensors, torch.float64, **options)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rounding_is_not_larger_than_torchs(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 600 * 300 * dtype.itemsize // 8)
    tensors = [v.to(dtype).double() if v.is_floating_point() else v for v in data(600, 300, 64)]
    tensors[1] /= 8
    exact = results(plain, tensors, torch.float64, **options)
    found = results(linear_cross_entropy, tensors, dtype, **options)
    torchs = results(plain, tensors, dtype, **options)
    # The gradient at most targets is about -(1 - label_smoothing), whose rounding is the same in
    # all rows: more or less than that of torch's, which is divided by the number of rows before.
    # In float32 the order of sums is another.
    slack = 1.5 if options.get("label_smoothing") or dtype == torch.float32 else 1.05
    for one, other, right in zip(found, torchs, exact, strict=True):
        error, most = ((each.double() - right).norm() for each in (one, other))
        assert error <= slack * most + 1e-7 * right.norm()


def test_hidden_states_of_more_dimensions_have_their_targets() -> None:
    hidden, weight, bias, targets = data(24)
    rows = results(linear_cross_entropy, [hidden, weight, bias, targets], torch.float64)
    tensors = [hidden.view(2, 3, 4, 7), weight, bias, targets.view(2, 3, 4)]
    found = results(linear_cross_entropy, tensors, torch.float64)
    assert torch.equal(found[1].view(24, 7), rows[1]) and torch.equal(found[0], rows[0])
    losses = linear_cross_entropy(
        hidden.view(4, 6, 7), weight, targets.view(4, 6), reduction="none"
    )
    assert losses.shape == (4, 6)


class Made(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation has made, and its products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.mm)
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_more_logits_than_a_chunk_exist(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, classes, width = 512, 256, 8
    monkeypatch.setattr(module, "CHUNK_BYTES", rows * classes * dtype.itemsize // 16)
    with Made() as made:
        results(linear_cross_entropy, data(rows, classes, width), dtype, **options)
    assert made.largest <= max(rows * classes // 16, rows * width, classes * width)
    with Made() as whole:
        results(plain, data(rows, classes, width), dtype, **options)
    assert whole.largest == rows * classes


def test_only_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, bias, targets = data(8)
    chunks = 2
    with Made() as made:
        linear_cross_entropy(hidden, weight, targets)
    assert made.products == chunks  # the logits
    hidden.requires_grad_()
    with Made() as made, torch.no_grad():
        linear_cross_entropy(hidden, weight.clone().requires_grad_(), targets)
    assert made.products == chunks
    with Made() as made:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert made.products == 2 * chunks and weight.grad is None and hidden.grad is not None
    grad = hidden.grad.clone()
    loss = linear_cross_entropy(hidden.detach(), weight, targets, bias=bias.requires_grad_())
    loss.backward()
    assert bias.grad is not None and torch.equal(hidden.grad, grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_graph_that_is_retained_gives_the_same_again(reduction: Any) -> None:
    hidden, weight, _, targets = data(8)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    first, second = (
        torch.autograd.grad(loss * factor, (hidden, weight), retain_graph=True) for factor in (2, 1)
    )
    torch.testing.assert_close(first, tuple(2 * grad for grad in second))


def test_autocast_computes_in_its_dtype() -> None:
    tensors = data(40)
    hidden, weight, bias = (value.float().requires_grad_() for value in tensors[:3])
    losses = []
    for loss in (linear_cross_entropy, plain):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss(hidden.bfloat16(), weight, tensors[3], bias=bias))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    grads = [torch.autograd.grad(loss, (hidden, weight, bias)) for loss in losses]
    assert all(grad.dtype == torch.float32 for grad in grads[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=1e-4)


def test_operands_of_other_layouts_give_the_same() -> None:
    hidden, weight, bias, targets = data()
    expected = results(linear_cross_entropy, [hidden, weight, bias, targets], torch.float64)
    turned = [tensor.t().contiguous().t() for tensor in (hidden, weight)]
    found = results(linear_cross_entropy, [*turned, bias, targets], torch.float64)
    torch.testing.assert_close(found, expected)


def test_it_runs_inside_of_a_compiled_model() -> None:
    head = nn.Linear(7, 19)
    hidden, _, _, targets = data(26)
    hidden = hidden.float()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        states = torch.tanh(x) * 2
        return linear_cross_entropy(states, head.weight, targets, bias=head.bias) * 3

    expected = torch.autograd.grad(loss_of(hidden), head.weight)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden), head.weight), expected)


def test_wrong_arguments_are_errors_that_say_what_to_do() -> None:
    hidden, weight, bias, targets = data(4)
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "hidden .* and weight", (hidden, weight.t(), targets), {}),
        (ValueError, "whole where it is read", (hidden, weight.view(-1), targets), {}),
        (ValueError, "one target for each", (hidden, weight, targets[:3]), {}),
        (ValueError, r"bias \(19,\)", (hidden, weight, targets), {"bias": bias[:3]}),
        (
            ValueError,
            "soft_cap must be positive and finite",
            (hidden, weight, targets),
            {"soft_cap": 0.0},
        ),
        (ValueError, "None caps nothing", (hidden, weight, targets), {"soft_cap": math.inf}),
        (ValueError, "weight on meta", (hidden, weight.to("meta"), targets), {}),
        (ValueError, "reduction must be", (hidden, weight, targets), {"reduction": "max"}),
        (ValueError, "label_smoothing must", (hidden, weight, targets), {"label_smoothing": 2.0}),
        (TypeError, "under torch.autocast", (hidden.float(), weight, targets), {}),
        (TypeError, "class indices", (hidden, weight, targets.double()), {}),
        (IndexError, "Target 19 is out of bounds", (hidden, weight, targets * 0 + 19), {}),
    ]
    for kind, message, arguments, options in cases:
        with pytest.raises(kind, match=message):
            linear_cross_entropy(*arguments, **options)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    with pytest.raises(BmtError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@on_ranks(4, init={"tp_size": 4})
def test_parallel_is_the_loss_of_the_whole_vocabulary(world_size: int) -> None:
    rank, tensors = runtime.rank(), data(26, 20)
    hidden, weight, bias, targets = tensors
    own = [hidden, weight.chunk(world_size)[rank], bias.chunk(world_size)[rank], targets]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        for name, options in OPTIONS.items():
            expected = results(plain, tensors, torch.float64, **options)
            expected[2:] = [grad.chunk(world_size)[rank] for grad in expected[2:]]
            found = results(linear_cross_entropy, own, torch.float64, parallel=True, **options)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2, init={"tp_size": 2})
def test_targets_that_differ_between_ranks_of_one_vocabulary_are_an_error() -> None:
    hidden, weight, _, targets = data(4)
    with pytest.raises(ValueError, match="must have the same targets of linear_cross_entropy"):
        linear_cross_entropy(hidden, weight, targets.abs() % 2 + runtime.rank(), parallel=True)


WIDTH, TOKENS = 4, 8


class Model(nn.Module):
    """Embedding, layers and head. ``parallel`` is None for torch's loss of whole logits."""

    def __init__(self, is_tied: bool, has_bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=has_bias)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.parallel: bool | None = None

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        hidden, targets = self.norm(hidden), tokens.roll(1, 1).masked_fill(tokens == 3, -100)
        count = (targets != -100).sum()
        if self.parallel is None:
            logits = self.head(hidden).flatten(0, 1)
            return cross_entropy(logits, targets.flatten(), reduction="sum"), count
        head, options = self.head, {"parallel": self.parallel, "reduction": "sum"}
        loss = linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, **options)
        return loss, count


def tied() -> Model:
    return Model(is_tied=True)


def untied() -> Model:
    return Model(is_tied=False, has_bias=True)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (4, 6))


def without_logits(model: Any) -> nn.Module:
    model.parallel = False
    return model


def split_without_logits(model: Any) -> nn.Module:
    model.parallel = True
    head = Head(gather_output=False)
    parameters = {"embedding": VocabularyEmbedding(), "layers.*": PerPosition(), "head": head}
    return parallelize(model, Plan(parameters=parameters, layers="layers.*", last="norm"))


@pytest.mark.parametrize(
    ("model_fn", "drawn"),
    [
        (tied, TrainingSettings()),
        (untied, TrainingSettings(ranks=2, levels=(0,), gradients="sum", micro_batches=2)),
        (tied, TrainingSettings(ranks=2, levels=(3,), gradients="sum", frozen=((), (5, 6)))),
        (
            tied,
            TrainingSettings(
                ranks=4, levels=(1, 2), gradients="sum", micro_batches=2, no_sync=True
            ),
        ),
        (untied, TrainingSettings(ranks=2, levels=(3,), gradients="sum", dtype="bfloat16")),
        (
            tied,
            TrainingSettings(
                ranks=4, levels=(3,), gradients="sum", shard_size=2, max_norm=0.1, recompute=(True,)
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_training_is_that_of_whole_logits(drawn: TrainingSettings, model_fn: Any) -> None:
    assert_matches_single(model_fn, tokens, settings=drawn, parallelize=without_logits)


@pytest.mark.parametrize(("ranks", "model_fn"), [(2, untied), (4, tied)])
def test_a_training_with_a_split_vocabulary_is_that_of_whole_logits(
    ranks: int, model_fn: Any
) -> None:
    drawn = TrainingSettings(ranks=ranks, axes={"tp": 2}, levels=(3,), gradients="sum")
    assert_matches_single(model_fn, tokens, settings=drawn, parallelize=split_without_logits)


class HeadWithLoss(nn.Module):
    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(7, 7), nn.Linear(7, 19)
        self.reduction = reduction

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, head = torch.tanh(self.up(x)), self.head
        options = {"bias": head.bias, "reduction": self.reduction}
        return linear_cross_entropy(hidden, head.weight, targets, **options).mean()


@on_ranks(2)
def test_a_block_may_hold_head_and_loss_and_recompute_them() -> None:
    expected = _head_with_loss("mean", is_block=False)
    for reduction in ("mean", "none"):
        torch.testing.assert_close(_head_with_loss(reduction, is_block=True), expected)


def _head_with_loss(reduction: Any, *, is_block: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layer: Any = HeadWithLoss(reduction).double()
    hidden, _, _, targets = data()
    targets = targets.abs() % 19  # the mean of the losses is that of the rows that count
    if is_block:
        layer = bmt.Block(layer, zero_level=3, use_checkpoint=True)
    loss = layer(hidden, targets) / (runtime.world_size() if is_block else 1)
    loss.backward()
    grads = {}
    for name, parameter in layer.named_parameters():
        is_part = isinstance(parameter, bmt.DistributedParameter)
        grads[name] = parameter.gather_all_like(parameter.grad) if is_part else parameter.grad
    return grads


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_peak_on_a_gpu_is_a_chunk_beside_the_gradients(dtype: torch.dtype) -> None:
    module.CHUNK_BYTES = 1 << 26
    device, (rows, classes, width) = torch.device("cuda"), (8192, 65536, 512)
    hidden = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(classes, (rows,), device=device)
    peaks = []
    for loss in (linear_cross_entropy, plain):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(hidden, weight, targets).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    gradients = 4 * (hidden.numel() + weight.numel())
    logits = rows * classes * dtype.itemsize
    # Gradients in float32 and in their dtype; the reference's pieces of float32 are as large as
    # a few chunks.
    assert peaks[0] <= 2 * gradients + 8 * (1 << 26) < logits < peaks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rounding_on_a_gpu_is_not_larger_than_torchs(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    module.CHUNK_BYTES = 1 << 20
    device = torch.device("cuda")
    tensors = [v.to(dtype).double() if v.is_floating_point() else v for v in data(600, 4096, 64)]
    tensors = [v.to(device) for v in tensors]
    tensors[1] /= 8
    with torch.device(device):
        exact = results(plain, tensors, torch.float64, **options)
        found = results(linear_cross_entropy, tensors, dtype, **options)
        torchs = results(plain, tensors, dtype, **options)
    for one, other, right in zip(found, torchs, exact, strict=True):
        error, most = ((each.double() - right).norm() for each in (one, other))
        assert error <= 1.5 * most + 1e-6 * right.norm()
