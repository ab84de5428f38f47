"""Attention along ``cp`` on GPUs: torch's fast kernels in half precision, and trainings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from context_models import KINDS, Model, batch
from torch.nn import functional as F

import bmt_cp
import bmtrain as bmt
from bmt_cp.context_group import context_group, own_part
from bmt_testing import TrainingSettings, assert_matches_single, run_ranks
from bmt_zero.kept_results import AttentionFunctions

pytestmark = pytest.mark.gpu(2)
LENGTH, SIZE = 4096, 64


def compared(key_heads: int) -> None:
    """Compare outputs and gradients with attention in float64 of the whole sequence."""
    bmt.init_distributed(device="cuda", cp_size=2)
    bmt.current().state(AttentionFunctions)  # torch's functions are replaced, as by keep=
    draw = torch.Generator().manual_seed(0)
    index = torch.arange(LENGTH, device="cuda")
    documents = (index // 1000)[None]
    for causal, window, has_documents in (
        (True, None, False),
        (False, None, False),
        (True, 300, False),
        (True, None, True),
    ):
        whole = [
            torch.randn(1, heads, LENGTH, SIZE, generator=draw).to("cuda", torch.bfloat16)
            for heads in (4, key_heads, key_heads, 4)
        ]
        exact = [x.double().requires_grad_() for x in whole[:3]]
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda")
        if causal:
            seen &= index[:, None] >= index
        if window is not None:
            seen &= index[:, None] - index < window
        if has_documents:
            seen &= documents[0, :, None] == documents
        key, value = (x.repeat_interleave(4 // key_heads, 1) for x in exact[1:])
        expected = F.scaled_dot_product_attention(exact[0], key, value, seen)
        expected.backward(whole[3].double())
        rank = context_group().rank
        own = [own_part(x, 2, 2, rank).detach().requires_grad_() for x in whole]
        found = bmt_cp.attention(
            *own[:3],
            causal=causal,
            window=window,
            document_ids=documents if has_documents else None,
        )
        found.backward(own[3])
        pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(own, exact, strict=False))]
        for ours, theirs in pairs:
            assert ours is not None and theirs is not None
            part = own_part(theirs, 2, 2, rank)
            # A few roundings of bfloat16, which has 8 bits.
            assert (ours.double() - part).abs().max() < part.abs().max() / 64


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_on_gpus_attention_is_that_of_the_whole_sequence(key_heads: int) -> None:
    run_ranks(compared, 2, key_heads, init=None)


def memory_that_waits() -> None:
    """Compute attention while the GPU is seconds behind the host."""
    draw = torch.Generator("cuda").manual_seed(0)
    own = [torch.randn(1, 4, 512, SIZE, generator=draw, device="cuda") for _ in range(3)]
    bmt_cp.attention(*own)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    bmt_cp.attention(*own)
    found = torch.cuda.memory_stats()
    assert found["active_bytes.all.current"] == found["allocated_bytes.all.current"]


def test_on_gpus_memory_of_an_exchange_is_free_before_the_gpu_has_come_so_far() -> None:
    run_ranks(memory_that_waits, 2, init={"device": "cuda", "cp_size": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus_training_equals_one_process(kind: str) -> None:
    settings = TrainingSettings(ranks=2, axes={"cp": 2}, gradients="sum")
    assert_matches_single(
        partial(Model, kind), partial(batch, kind), settings=settings, device="cuda"
    )
