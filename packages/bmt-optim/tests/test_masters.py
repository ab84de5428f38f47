"""The float32 masters of half parameters, whole or compact, on the CPU."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from offloaded import Offload
from sharded_adam import bits, give_gradients, give_parts, is_half, masters, parameters, train

from bmt_checkpoint import load
from bmt_core.ops import KernelProvider, Kernels
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells


# Compiled kernels equal torch's Adam to rounding only.
@on_ranks(4, env={"BMT_KERNELS": "reference"})
@cells("compact_master", [False, True])
def test_masters_of_shards_are_those_of_torch_adamw_in_every_bit(compact_master: bool) -> None:
    halves = parameters(torch.bfloat16)
    shards = [DistributedParameter(p.detach()) for p in halves]
    wide = [torch.nn.Parameter(p.detach().float()) for p in halves]
    optimizer = AdamOptimizer(shards, lr=0.01, weight_decay=0.1, compact_master=compact_master)
    plain = torch.optim.AdamW(wide, lr=0.01, weight_decay=0.1)
    for step in range(6):
        give_gradients(halves, step)
        for p, half in zip(wide, halves, strict=True):
            assert half.grad is not None
            p.grad = half.grad.float()
        give_parts(shards, halves)
        optimizer.step()
        plain.step()
    for shard, p in zip(shards, wide, strict=True):
        assert torch.equal(shard.gather_like(optimizer.portable_state(shard)["_param_fp32"]), p)
        assert torch.equal(shard.gather_like(shard.detach()), p.bfloat16())


def test_a_compact_master_is_the_same_master_in_two_bytes() -> None:
    params, twins = parameters(torch.bfloat16), parameters(torch.bfloat16)
    compact = AdamOptimizer(params, lr=0.01, compact_master=True)
    whole = AdamOptimizer(twins, lr=0.01, compact_master=False)
    for step in range(25):
        give_gradients(params, step)
        for p, twin in zip(params, twins, strict=True):
            assert p.grad is not None
            twin.grad = p.grad.clone()
        if step == 24:
            for q in (params[1], twins[1]):
                assert q.grad is not None
                q.grad[2:4] = torch.tensor([math.nan, math.inf])
        compact.step()
        whole.step()
        for p, twin, a, b in zip(params, twins, masters(compact), masters(whole), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
            compared = ~is_half(a) & ~a.isnan()
            assert torch.equal(bits(p)[compared], bits(twin)[compared])
            assert torch.equal(p.isnan(), twin.isnan())
    for p, twin in zip(params, twins, strict=True):
        at_rest = [t for t in (p, *compact.state[p].values()) if isinstance(t, torch.Tensor)]
        assert sum(t.nbytes for t in at_rest) == 12 * p.numel()
        at_rest = [t for t in (twin, *whole.state[twin].values()) if isinstance(t, torch.Tensor)]
        assert sum(t.nbytes for t in at_rest) == 14 * p.numel()


@pytest.mark.parametrize("has_compact_adam", [False, True])
def test_by_default_the_kernels_decide(
    has_compact_adam: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Provider(KernelProvider):
        name = "here"
        device_type = "cpu"

        def available(self) -> str | None:
            return None

        def adam_step(  # type: ignore[no-untyped-def]
            self, params, grads, exp_avgs, exp_avg_sqs, masters, *, step, lr, beta1, beta2, eps,
            weight_decay, decoupled,
            hold=False, scale=1.0, clip=None, skip=None,
        ):  # fmt: skip
            kinds.append(masters[0].dtype)

    kinds: list[torch.dtype] = []
    monkeypatch.setattr(Provider, "has_compact_adam", has_compact_adam)
    kernels = Kernels(Provider())
    monkeypatch.setattr("bmt_optim.adam.optimizer.kernels_on", lambda device: kernels)
    params = parameters(torch.bfloat16)
    give_gradients(params, 0)
    for setting in (None, False, True):
        AdamOptimizer(params, compact_master=setting).step()
    by_default = torch.int16 if has_compact_adam else torch.float32
    assert kinds == [by_default, torch.float32, torch.int16]


def test_without_a_kernel_for_it_masters_are_whole() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamOptimizer(params)
    train([0], optimizer)
    assert all(optimizer.state[p]["_param_fp32"].dtype == torch.float32 for p in params)


def test_float16_keeps_a_whole_master() -> None:
    params = parameters(torch.float16)
    optimizer = AdamOptimizer(params, compact_master=True)
    train([0], optimizer)
    assert all(optimizer.state[p]["_param_fp32"].dtype == torch.float32 for p in params)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("is_model_first", [False, True])
def test_a_state_of_either_setting_resumes_with_either(
    before: bool, after: bool, is_model_first: bool
) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamOptimizer(params, lr=0.01, compact_master=before)
    train(range(5), optimizer)
    # Halves beside an even and an odd number, which the settings round in different ways.
    if not before:
        halves = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
        optimizer.state[params[1]]["_param_fp32"][:2] = halves
        params[1].detach()[:2] = halves.bfloat16()
    file = io.BytesIO()
    torch.save(([p.detach() for p in params], optimizer.state_dict()), file)
    file.seek(0)
    values, saved = torch.load(file, weights_only=True)
    resumed_params = parameters(torch.bfloat16, seed=1)
    resumed = AdamOptimizer(resumed_params, lr=0.5, compact_master=after)
    if not is_model_first:
        resumed.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(resumed_params, values, strict=True):
            p.copy_(value)
    if is_model_first:
        resumed.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(masters(optimizer), masters(resumed), strict=True))
    for step in range(5, 9):
        train([step], optimizer, resumed)
        assert all(
            torch.equal(a, b) for a, b in zip(masters(optimizer), masters(resumed), strict=True)
        )
    assert resumed.compact_master == after
    assert all(("_param_remainder" in resumed.state[p]) == after for p in resumed_params)
    assert all(("_param_fp32" in resumed.state[p]) != after for p in resumed_params)


MASTERS = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)]


@pytest.mark.parametrize(("dtype", "compact_master"), MASTERS)
@pytest.mark.parametrize("kind", [AdamOptimizer, Offload])
def test_a_written_parameter_moves_its_master_along(
    kind: Any, dtype: torch.dtype, compact_master: bool
) -> None:
    p = torch.nn.Parameter(torch.linspace(-3, 3, 1000).to(dtype))
    optimizer = kind([p], lr=0.01, compact_master=compact_master)
    train([0], optimizer)
    before = masters(optimizer)[0]
    with torch.no_grad():
        p[:500] = 0.0  # a mask
        p[500:600] = 2.0
    after = masters(optimizer)[0]
    assert after[:500].abs().max() < 1e-38
    torch.testing.assert_close(after[500:600], torch.full((100,), 2.0), rtol=2**-8, atol=0)
    assert torch.equal(after[600:], before[600:]) and not torch.equal(before[600:], p[600:].float())
    train([1], optimizer)
    assert p.isfinite().all() and masters(optimizer)[0].isfinite().all()
    assert p[:500].abs().max() < 0.02 and (p[500:600] - 2).abs().max() < 0.02


needs_kernels = pytest.mark.skipif(
    find_spec("bmt_kernels") is None, reason="bmt-kernels is not installed"
)


@on_ranks(2, init=None)
@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=needs_kernels)])
def test_loaded_weights_train_on_whatever_is_installed(tmp_path: Path, kernels: str) -> None:
    os.environ["BMT_KERNELS"] = kernels
    runtime.init_distributed(device="cpu")
    file = tmp_path / f"{runtime.rank()}.pt"
    torch.save({"weight": torch.full((3, 5), 5.0)}, file)
    plain = torch.nn.Parameter(torch.ones(3, 5))
    torchs = torch.optim.AdamW([plain], lr=0.5, weight_decay=0)
    for value in (1.0, 5.0):
        plain.grad = torch.ones(3, 5)
        plain.data.fill_(value)
        torchs.step()
    for kind in (AdamOptimizer, Offload):
        for dtype, compact_master in [*MASTERS, (torch.bfloat16, None), (torch.float32, None)]:
            model = DistributedModule()
            model.weight = p = DistributedParameter(torch.ones(3, 5, dtype=dtype))
            optimizer = kind([p], lr=0.5, compact_master=compact_master)
            for is_loaded in (False, True):
                if is_loaded:
                    load(model, file)
                p.grad = torch.ones_like(p)
                optimizer.step()
            torch.testing.assert_close(p.gather_like(p.detach()).float(), plain, rtol=2**-7, atol=0)


@pytest.mark.parametrize("compact_master", [False, True])
@pytest.mark.parametrize("kind", [AdamOptimizer, Offload])
def test_small_updates_add_up_although_somebody_writes_the_parameter_in_every_step(
    kind: Any, compact_master: bool
) -> None:
    p = torch.nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    optimizer = kind([p], lr=0.01, compact_master=compact_master)
    for _ in range(300):
        p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            p.clamp_(max=1000)
    assert p[0] == 253.0


@pytest.mark.parametrize("compact_master", [None, False, True])
def test_the_setting_survives_copies_and_pickles(compact_master: bool | None) -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamOptimizer(params, compact_master=compact_master)
    train([0], optimizer)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.compact_master == compact_master
        give_gradients(copied.param_groups[0]["params"], 1)
        copied.step()
        assert copied.state_dict()["state"][0]["step"] == 2
    assert optimizer.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("compact_master", [False, True])
def test_a_parameter_made_float32_goes_on_from_its_master(compact_master: bool) -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamOptimizer([p], lr=1e-4, compact_master=compact_master)
    train([0], optimizer)
    master = masters(optimizer)[0].clone()
    p.grad = None
    p.data = p.data.float()
    p.grad = torch.zeros(3)
    optimizer.step()
    assert not torch.equal(p.detach(), torch.ones(3))
    torch.testing.assert_close(p.detach(), master, rtol=1e-4, atol=0)


def test_a_state_loaded_into_a_used_optimizer_goes_on_as_in_a_new_one() -> None:
    p = torch.nn.Parameter(torch.linspace(0.5, 2.0, 7).bfloat16())
    used = AdamOptimizer([p], lr=0.1, compact_master=False)
    for step in range(4):
        p.grad = torch.full_like(p, step + 1.0)
        used.step()
        if step == 1:
            saved = used.state_dict(gather=True)
    twin = torch.nn.Parameter(p.detach().clone())  # the parameters are not those of the saved state
    new = AdamOptimizer([twin], lr=0.1, compact_master=False)
    for optimizer in (used, new):
        optimizer.load_state_dict(saved)
    p.grad = twin.grad = torch.ones_like(p)
    for optimizer in (used, new):
        optimizer.step()
    assert torch.equal(p, twin)
