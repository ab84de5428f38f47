"""The reference of ``adam_step`` with masters in two parts, beside itself with float32 masters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bmt_core.ops import read_master, reference, split_master

SHAPES = [(1,), (17,), (8, 5), (0,), (), (1000,)]
KINDS = ["float32", "float16", "bfloat16", "compact"]
USUAL: dict[str, Any] = {
    "step": 3,
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
# Zeros, denormals, halves beside even and odd numbers, the largest of both types and their like,
# infinity, NaN.
ODD_BITS = [
    *(
        0x00000000,
        0x80000000,
        0x00000001,
        0x80007FFF,
        0x00008000,
        0x007FFFFF,
        0x3F808000,
        0xBF808000,
        0x3F818000,
    ),
    *(
        0xBF818000,
        0x3F807FFF,
        0x7F7FFFFF,
        0x7F7F8000,
        0xFF7F7FFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
    ),
]


def odd_numbers() -> torch.Tensor:
    return torch.tensor(ODD_BITS, dtype=torch.int64).to(torch.int32).view(torch.float32)


class Case:
    """Lists for ``adam_step``: parameters of a dtype, with whole masters (``compact``:
    with remainders).
    """

    def __init__(self, kind: str, *, device: str = "cpu", shapes: Any = SHAPES) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if kind == "compact" else getattr(torch, kind)
        wholes = [torch.randn(s, generator=generator) for s in shapes]
        if shapes is SHAPES and dtype == torch.bfloat16:
            wholes[1] = odd_numbers()
        wholes = [w.to(device) for w in wholes]
        self.params = [w.to(dtype) for w in wholes]
        self.masters: list[torch.Tensor | None] = [
            None if kind == "float32" else w.clone() for w in wholes
        ]
        if kind == "compact":
            pairs = [split_master(w) for w in wholes]
            self.params, self.masters = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.exp_avgs = [torch.randn(s, generator=generator).to(device) for s in shapes]
        self.exp_avg_sqs = [torch.rand(s, generator=generator).to(device) for s in shapes]
        self.grads = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]

    def lists(self) -> tuple[list[Any], ...]:
        return self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters

    def step(self, **changes: Any) -> None:
        reference.adam_step(*self.lists(), **{**USUAL, "decoupled": False, **changes})

    def weights(self) -> list[torch.Tensor]:
        """The numbers that are updated, in float32."""
        return [
            p if m is None else read_master(p, m) if m.dtype == torch.int16 else m
            for p, m in zip(self.params, self.masters, strict=True)
        ]

    def numbers(self) -> list[torch.Tensor]:
        return [*self.weights(), *self.exp_avgs, *self.exp_avg_sqs]

    def all(self) -> list[torch.Tensor]:
        return [t.clone() for column in self.lists() for t in column if t is not None]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, those of every NaN alike."""
    integer = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return (
        tensor.view(integer).masked_fill(tensor.isnan(), 0x7FC0)
        if tensor.dtype.is_floating_point
        else tensor
    )


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(one, other, strict=True))


def assert_is_rounded(case: Case, whole: Case) -> None:
    for p, other, master in zip(case.params, whole.params, case.weights(), strict=True):
        is_even_half = (master.view(torch.int32) & 0x1FFFF) == 0x8000
        assert torch.equal(bits_of(p)[~is_even_half], bits_of(other)[~is_even_half])


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_compact_master_is_the_whole_master_in_every_bit(
    decoupled: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr("bmt_core.ops.reference.adam.MAX_ELEMENTS", limit)
    whole, compact = Case("bfloat16"), Case("compact")
    for step in range(1, 31):
        torch.manual_seed(step)
        whole.grads = [torch.randn_like(g) for g in whole.grads]
        if step == 29:
            whole.grads[1][:2] = torch.tensor([math.inf, math.nan])
        compact.grads = [g.clone() for g in whole.grads]
        # Steps without an update first, so that the odd numbers survive some of them.
        options: dict[str, Any] = {
            "step": step,
            "decoupled": decoupled,
            "scale": 2.0,
            "hold": step in (1, 9),
        }
        options["skip"] = torch.tensor(float(step in (2, 7))) if step in (2, 6, 7) else None
        options["clip"] = torch.tensor([0.5]) if step % 3 == 0 else None
        options["lr"] = 0.0 if step == 3 else 1e-40 if step == 4 else 0.01
        whole.step(**options)
        compact.step(**options)
        assert same(whole.numbers(), compact.numbers())
        assert_is_rounded(compact, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_every_written_parameter_is_seen_by_its_version(kind: str) -> None:
    case = Case(kind)
    before = [p._version for p in case.params]
    case.step(hold=True)
    assert before == [p._version for p in case.params]
    case.step()
    assert all(a < p._version for a, p in zip(before, case.params, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("is_given_on_device", [False, True])
def test_on_a_gpu_a_compact_master_is_the_whole_master_in_every_bit(
    decoupled: bool, is_given_on_device: bool
) -> None:
    shapes = [*SHAPES, ((1 << 24) + 3,), (1 << 20,)]
    whole, compact = (
        Case("bfloat16", device="cuda", shapes=shapes),
        Case("compact", device="cuda", shapes=shapes),
    )
    for case in (whole, compact):
        case.params[1], rest = split_master(odd_numbers().cuda())
        case.masters[1] = rest if case is compact else odd_numbers().cuda()
    scale: Any = torch.tensor([2.0], device="cuda") if is_given_on_device else 2.0
    clip = torch.tensor(0.5, device="cuda") if is_given_on_device else None
    flags = {step: torch.tensor(float(step in (2, 7)), device="cuda") for step in (2, 6, 7)}
    for step in range(1, 21):
        torch.manual_seed(step)
        whole.grads = [torch.randn_like(g) for g in whole.grads]
        if step in (7, 19):
            whole.grads[1][:2] = math.inf
        compact.grads = [g.clone() for g in whole.grads]
        options = {
            "step": step,
            "decoupled": decoupled,
            "scale": scale,
            "clip": clip,
            "hold": step == 9,
        }
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            whole.step(**options, skip=flags.get(step))
            compact.step(**options, skip=flags.get(step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert same(whole.numbers(), compact.numbers())
        assert_is_rounded(compact, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "compact"])
def test_on_a_gpu_temporaries_are_bounded(kind: str) -> None:
    case = Case("float32", device="cuda", shapes=[(1 << 26,)])
    if kind != "float32":
        case.params, case.grads = [case.params[0].bfloat16()], [case.grads[0].bfloat16()]
        dtype = torch.int16 if kind == "compact" else torch.float32
        case.masters = [torch.zeros(1 << 26, dtype=dtype, device="cuda")]
    case.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.step()
    limit_mib = 1 if kind == "float32" else 257
    assert torch.cuda.max_memory_allocated() - before <= limit_mib << 20


@pytest.mark.parametrize("decoupled", [False, True])
def test_complex_numbers_are_stepped_as_torch_steps_them(decoupled: bool) -> None:
    param, mean, square = (torch.zeros(5, dtype=torch.complex64) for _ in range(3))
    plain = torch.nn.Parameter(param.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([plain], lr=0.01, weight_decay=0.1)
    for step in (1, 2, 3):
        grad = plain.grad = torch.randn(5, dtype=torch.complex64)
        options = {
            "step": step,
            "lr": 0.01,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        reference.adam_step(
            [param], [grad], [mean], [square], [None], **options, decoupled=decoupled
        )
        optimizer.step()
    assert torch.equal(param, plain.detach())
