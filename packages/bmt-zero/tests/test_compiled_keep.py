"""What compiled Blocks, and Blocks on GPUs, keep of their forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from compile_models import CompiledGpt, Training, from_new, gpt, result
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from keep_models import ATTENTION, BOTH, WIDTH, Attends, assert_equal, blocks_of, inputs
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from zero_models import full_gradient

from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block
from cells import cells


def is_linear(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation is F.linear


@torch.compile(fullgraph=True, backend="aot_eager")
def compiled_part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x @ weight, x)


class HasCompiledPart(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(compiled_part(super().forward(x), self.out.weight))
        return y


@on_ranks(1)
@cells("keep", [BOTH, 10**6, is_linear])
def test_a_part_may_be_compiled(keep: Any) -> None:
    torch.manual_seed(0)
    layer, grads = HasCompiledPart(), []
    for block in (*blocks_of([layer], None), *blocks_of([layer], keep)):
        for step in range(2):
            block.zero_grad()
            block(inputs(step)).square().sum().backward()
        grads.append([full_gradient(p) for p in block.parameters()])
    assert_equal(*grads)


def keeps_addmm(operation: Any, args: tuple[Any, ...]) -> bool:
    return bool(operation is torch.ops.aten.addmm.default)


class Graphs:
    """A backend that runs graphs as they are, and counts what their backward computes."""

    def __init__(self) -> None:
        self.recomputed: list[tuple[int, int]] = []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(graph),
            bw_compiler=self.count,
            partition_fn=min_cut_rematerialization_partition,
        )

    def count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = [f"{node.target} {node.args}" for node in graph.graph.nodes]
        attentions = [
            text for text in nodes if f"{ATTENTION}_flash" in text and "backward" not in text
        ]
        products = [text for text in nodes if "aten.addmm.default" in text]
        self.recomputed.append((len(attentions), len(products)))
        return make_boxed_func(graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.backend(*args, **kwargs)


@on_ranks(1, timeout=120)
@cells(
    ("keep", "recomputed"),
    [
        (None, [(1, 3)]),
        ("attention", [(0, 3)]),
        ("products", [(1, 0)]),
        (BOTH, [(0, 0)]),
        (10**6, [(0, 0)]),
        # The first product of one, and the one after attention of both.
        (12288 + 2 * 4096, [(1, 1), (1, 2)]),
        (keeps_addmm, [(1, 0)]),
    ],
)
def test_compiled_blocks_keep_too(keep: Any, recomputed: list[tuple[int, int]]) -> None:
    found, backend = [], Graphs()
    for value, compiler in ((None, "aot_eager"), (keep, backend)):
        with from_new(compiler) as kind:  # type: ignore[arg-type]
            model = CompiledGpt(gpt(2, kind=kind), 3, recomputes=True, keep=value)
            found.append(result(Training(model, partial(torch.optim.SGD, lr=0.3)), 3))
    torch.testing.assert_close(found[1], found[0])
    assert sorted(backend.recomputed) == recomputed


class HasHiddenProducts(nn.Module):
    """Products that the measured call does not see come before those that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, 24).requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.frozen(x).mean(-1, keepdim=True).sigmoid()
        x = x * gate + self.attention(x, x, x, need_weights=False)[0]
        return x + self.out(torch.tanh(self.down(torch.tanh(self.up(x)))))


class Recomputed(Graphs):
    """Notes how many columns the products have that backward computes again."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        super().__init__()

    def count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.addmm.default:
                self.columns.append(node.meta["val"].shape[-1])
        return make_boxed_func(graph)


@on_ranks(1, timeout=120)
def test_numbers_of_compiled_products_are_those_of_the_measured_call() -> None:
    torch.manual_seed(0)
    layer, grads, backend = HasHiddenProducts(), [], Recomputed()
    for keep, compiler in ((None, "aot_eager"), (12 * 8 * 4, backend)):
        with from_new(compiler):  # type: ignore[arg-type]
            block = Block(copy.deepcopy(layer), compile=True, keep=keep)
            for _ in range(3):
                block.zero_grad()
                block(inputs()).square().sum().backward()
        grads.append([full_gradient(p) for p in block.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads)
    assert backend.columns and 8 not in backend.columns  # that of ``down`` is kept


class Flexible(Attends):
    """Attention with scores that are changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x).unflatten(-1, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        mixed = flex_attention.flex_attention(
            query, key, value, score_mod=lambda score, b, h, i, j: score + (i - j)
        )
        y: torch.Tensor = self.down(F.gelu(self.up(mixed.transpose(1, 2).flatten(2))))
        return y


def on_gpu(kernel: Any, keep: Any) -> tuple[list[Any], list[int]]:
    """Return gradients without and with ``keep``, and the bytes that wait for backward."""
    torch.manual_seed(0)
    kind, dropout = (Flexible, 0.0) if kernel is None else (Attends, 0.2)
    plain = kind(dropout).bfloat16().cuda()
    found, held = [], []
    for value in (None, keep):
        block = Block(copy.deepcopy(plain), keep=value)
        for step in range(2):
            torch.manual_seed(step)
            block.zero_grad()
            x = torch.randn(2, 128, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            before = torch.cuda.memory_allocated()
            with nullcontext() if kernel is None else sdpa_kernel(getattr(SDPBackend, kernel)):
                y = block(x)
                held.append(torch.cuda.memory_allocated() - before)
                y.float().square().sum().backward()
        found.append([*[full_gradient(p) for p in block.parameters()], x.grad, torch.rand(1)])
    return found, held


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["attention", BOTH, 10**8])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", None])
def test_on_gpus_kept_attention_gives_the_gradients_of_full_recomputation(
    kernel: str | None, keep: Any
) -> None:
    (((expected, found), held),) = run_ranks(on_gpu, 1, kernel, keep, init={"device": "cuda"})
    # Kernels of attention may add up gradients in any order.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert held[3] > held[1]
