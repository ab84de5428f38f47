"""Cross entropy, forward and backward, beside torch's, what its compiler makes of it, and Liger's
if it can be imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from bench.kernel_timing import Case, copy_case
from bmt_core.ops import Kernels
from bmt_kernels import cross_entropy_backward_
from bmt_kernels.provider import CompiledKernels

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy_cases(
    provider: CompiledKernels, device: torch.device, elements: int, options: argparse.Namespace
) -> Iterator[list[Case]]:
    """Yield the cases for each number of classes, in bf16."""
    for classes in map(int, options.classes.split(",")):
        yield _cases_of(Kernels(provider), options.rows, classes, device)


def _cases_of(kernels: Kernels, rows: int, classes: int, device: torch.device) -> list[Case]:
    logits = torch.empty(rows, classes, dtype=torch.bfloat16, device=device).normal_(std=2)
    target = torch.randint(classes, (rows,), device=device)
    share = torch.full((rows,), 1.0 / rows, device=device)
    size = logits.nbytes
    row_max, log_sum, _, _ = kernels.cross_entropy_forward(logits, target)
    scratch = torch.empty_like(logits)

    def forward() -> None:
        kernels.cross_entropy_forward(logits, target)

    def backward() -> None:
        kernels.cross_entropy_backward(logits, target, row_max, log_sum, share, share, None)

    def in_place() -> None:
        cross_entropy_backward_(scratch, target, row_max, log_sum, share, share, None)

    def both() -> None:
        largest, total, _, _ = kernels.cross_entropy_forward(logits, target)
        kernels.cross_entropy_backward(logits, target, largest, total, share, share, None)

    shape = f"{rows} × {classes} bf16"
    cases = [
        copy_case(device, min(size // 8, 1 << 28)),
        Case(f"forward, bmt, {shape}", forward, size),
        Case(f"backward, bmt, {shape}", backward, 2 * size),
        Case(f"backward in place, bmt, {shape}", in_place, 2 * size),
        Case(f"forward and backward, bmt, {shape}", both, 3 * size),
    ]
    leaf = logits.clone().requires_grad_()
    for name, loss in _peers(device):
        try:
            run = _with_autograd(loss, leaf, target)
            run()
        # Compilers and third parties fail in ways of their own; the others are still measured.
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        cases.append(Case(f"forward and backward, {name}", run, 3 * size, is_peer=True))
    return cases


def _with_autograd(loss: Loss, leaf: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        leaf.grad = None
        loss(leaf, target).backward()  # type: ignore[no-untyped-call]

    return run


def _peers(device: torch.device) -> Iterator[tuple[str, Loss]]:
    yield "torch, bf16", functional.cross_entropy
    yield "FusedCrossEntropy (bmt, the whole module)", _fused(device)
    if device.type != "cuda":
        return
    yield "torch, float32 copy", lambda x, y: functional.cross_entropy(x.float(), y)
    yield (
        "torch.compile (Triton)",
        torch.compile(lambda x, y: functional.cross_entropy(x.float(), y)),
    )
    try:
        kind: Any = import_module("liger_kernel.transformers").LigerCrossEntropyLoss
    except ModuleNotFoundError as error:
        print(f"Liger (Triton) is left out: {error}")
        return
    yield "Liger (Triton)", kind()


def _fused(device: torch.device) -> Loss:
    loss: Any = import_module("bmtrain.loss").FusedCrossEntropy()
    return loss  # type: ignore[no-any-return]
