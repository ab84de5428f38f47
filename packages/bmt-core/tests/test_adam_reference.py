"""The references of ``adam_step`` among each other: whole and compact masters, plain and fused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bmt_core.ops import read_master, reference
from bmt_core.ops.reference.adam_fused import update_fused
from bmt_core.ops.reference.adam_rows import Settings, groups
from bmt_core.ops.remainder import split_master

SHAPES = [(1,), (17,), (8, 5), (0,), (), (1000,)]
KINDS = ["float32", "float16", "bfloat16", "compact"]
USUAL: dict[str, Any] = {"step": 3, "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Case:
    """Lists for ``adam_step``: parameters of a dtype, with whole masters (``compact``: with remainders)."""

    def __init__(self, kind: str, *, device: str = "cpu", grads: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if kind == "compact" else getattr(torch, kind)
        wholes = [torch.randn(s, generator=generator).to(device) for s in SHAPES]
        self.params = [w.to(dtype) for w in wholes]
        self.masters: list[torch.Tensor | None] = [None if kind == "float32" else w.clone() for w in wholes]
        if kind == "compact":
            pairs = [split_master(w) for w in wholes]
            self.params, self.masters = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.exp_avgs = [torch.randn(s, generator=generator).to(device) for s in SHAPES]
        self.exp_avg_sqs = [torch.rand(s, generator=generator).to(device) for s in SHAPES]
        self.grads = [torch.randn(s, generator=generator).to(device, grads or dtype) for s in SHAPES]

    def lists(self) -> tuple[list[Any], ...]:
        return self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters

    def step(self, **changes: Any) -> None:
        reference.adam_step(*self.lists(), **{**USUAL, "decoupled": False, **changes})

    def fused(self, **changes: Any) -> None:
        """What ``adam_step`` does on CUDA; torch has the fused kernels on the CPU too."""
        usual = {"decoupled": False, "hold": False, "scale": 1.0, "clip": None, "skip": None}
        for rows in groups(*self.lists()):
            update_fused(rows, Settings(**{**USUAL, **usual, **changes}))

    def weights(self) -> list[torch.Tensor]:
        """The numbers that are updated, in float32."""
        return [
            p if m is None else read_master(p, m) if m.dtype == torch.int16 else m
            for p, m in zip(self.params, self.masters, strict=True)
        ]

    def all(self) -> list[torch.Tensor]:
        return [t.clone() for column in self.lists() for t in column if t is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("limit", [None, 7])
def test_a_compact_master_is_the_whole_master_in_every_bit(
    decoupled: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr("bmt_core.ops.reference.adam.MAX_ELEMENTS", limit)
    whole, compact = Case("bfloat16"), Case("compact")
    for step in range(1, 26):
        torch.manual_seed(step)
        whole.grads = [torch.randn_like(g) for g in whole.grads]
        compact.grads = [g.clone() for g in whole.grads]
        changes = {"step": step, "decoupled": decoupled, "scale": 2.0, "hold": step == 4}
        changes["skip"] = torch.tensor(float(step == 7)) if step > 5 else None
        whole.step(**changes)
        compact.step(**changes)
        assert same(whole.weights(), compact.weights())
        for p, other, master in zip(whole.params, compact.params, compact.weights(), strict=True):
            is_half = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(p[~is_half], other[~is_half])
    assert same(whole.exp_avg_sqs, compact.exp_avg_sqs)


def test_a_skipped_step_changes_no_bit_of_a_compact_master() -> None:
    case = Case("compact")
    case.grads[1][3] = math.nan
    before = case.all()[len(SHAPES) :]
    params = [p.view(torch.int16).clone() for p in case.params]
    case.step(skip=torch.ones(1, dtype=torch.uint8))
    case.fused(skip=torch.full((1,), 2, dtype=torch.uint8))
    after = case.all()[len(SHAPES) :]
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))
    assert same(params, [p.view(torch.int16) for p in case.params])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("limit", [None, 64, 128])
def test_fused_is_the_same_step_to_rounding(
    kind: str, decoupled: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr("bmt_core.ops.reference.adam_fused.MAX_ELEMENTS", limit)
    fused, plain = Case(kind), Case(kind)
    for step in range(3, 8):
        fused.fused(step=step, decoupled=decoupled)
        plain.step(step=step, decoupled=decoupled)
    assert_close(fused.weights(), plain.weights())
    assert_close(fused.exp_avgs, plain.exp_avgs)
    assert_close(fused.exp_avg_sqs, plain.exp_avg_sqs)
    for p, weight in zip(fused.params, fused.weights(), strict=True):
        assert torch.equal(p, weight.to(p.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grads", [None, torch.float32])
@pytest.mark.parametrize(("scale", "clip"), [(4.0, None), (torch.tensor([4.0]), None), (1, 0.5), (4.0, 0.0)])
def test_fused_scales_and_clips_and_leaves_gradients_alone(
    kind: str, grads: torch.dtype | None, scale: Any, clip: float | None
) -> None:
    options = {"scale": scale, "clip": None if clip is None else torch.tensor([clip])}
    fused, plain = Case(kind, grads=grads), Case(kind, grads=grads)
    before = [g.clone() for g in fused.grads]
    fused.fused(**options)
    plain.step(**options)
    assert_close(fused.weights(), plain.weights())
    assert_close(fused.exp_avg_sqs, plain.exp_avg_sqs)
    assert same(before, fused.grads) and same(before, plain.grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_fused_skips_where_the_flag_is_anything_but_zero(kind: str, scale: float) -> None:
    skipped, taken, plain = Case(kind), Case(kind), Case(kind)
    before = skipped.all()
    for flag in (torch.ones(1, dtype=torch.uint8), torch.tensor(3.0), torch.tensor([True])):
        skipped.fused(skip=flag, scale=scale)
        assert same(before, skipped.all())
    taken.fused(skip=torch.zeros(1, dtype=torch.uint8), scale=scale)
    plain.fused(scale=scale)
    assert same(taken.all(), plain.all()) and not same(before, taken.all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_written_parameter_is_seen_by_its_version(kind: str) -> None:
    case = Case(kind)
    before = [p._version for p in case.params]
    case.step(hold=True)
    assert before == [p._version for p in case.params]
    case.step()
    assert all(a < p._version for a, p in zip(before, case.params, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_with_gaps_are_updated_like_others(kind: str) -> None:
    case, plain = Case(kind), Case(kind)
    for column in (case.params, case.exp_avgs, case.exp_avg_sqs, case.masters, case.grads):
        if column[2] is not None:
            column[2] = torch.stack([column[2], column[2]], dim=2)[..., 0]
            column[1] = torch.stack([column[1], column[1]], dim=1)[..., 0]
    case.step()
    plain.step()
    assert same(plain.all(), case.all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_on_a_gpu_the_step_is_that_of_the_cpu_to_rounding(kind: str, decoupled: bool) -> None:
    moved, plain = Case(kind, device="cuda"), Case(kind)
    torch.cuda.synchronize()
    for step, (scale, bad) in enumerate([(1.0, 0.0), (8.0, 0.0), (8.0, 1.0), (1.0, 0.0)], start=3):
        options = {"step": step, "decoupled": decoupled, "scale": scale, "hold": step == 6}
        flag = torch.full((), bad, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            moved.step(**options, skip=flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain.step(**options, skip=torch.tensor(bad))
    for a, b in zip(moved.weights() + moved.exp_avg_sqs, plain.weights() + plain.exp_avg_sqs, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit_mib"), [(torch.float32, 1), (torch.bfloat16, 80)])
def test_on_a_gpu_a_step_needs_little_memory(dtype: torch.dtype, limit_mib: int) -> None:
    n = 1 << 26
    params, grads = [torch.zeros(n, dtype=dtype, device="cuda")], [torch.ones(n, dtype=dtype, device="cuda")]
    moments = [[torch.zeros(n, device="cuda")] for _ in range(2)]
    masters = [None if dtype == torch.float32 else torch.zeros(n, dtype=torch.int16, device="cuda")]
    reference.adam_step(params, grads, *moments, masters, **USUAL, decoupled=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reference.adam_step(params, grads, *moments, masters, **USUAL, decoupled=True)
    assert torch.cuda.max_memory_allocated() - before <= limit_mib << 20
