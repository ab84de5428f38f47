"""What a step of a pipeline gathers and reduces, for how many micro-batches it keeps activations,
and what is left after it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import bmt_recording
import pytest
import torch
from pipeline_trainings import Piped, Plain, loss_of, of_pipeline, text
from torch import nn

from bmt_core.run.runtime import current
from bmt_pipeline import train_step
from bmt_testing import run_ranks

LAYERS, MICRO_BATCHES = 4, 8


class Watched(torch.autograd.Function):
    """The identity, which notes how long what it saves is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        kept = torch.empty(3)
        ctx.kept = kept
        seen.append(weakref.ref(kept))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def measured(schedule: str) -> tuple[Counter[str], int, int, int, int]:
    """Of the second step: collectives of blocks, and the most live graphs; bytes of parameters, and
    of what stays gathered.

    And how many parameters of layers have a gradient in the last forward.
    """
    model = Piped(LAYERS, 3, False)
    seen: list[Any] = []
    most = early = 0

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal most, early
        out: torch.Tensor = Watched.apply(output, seen)  # type: ignore[no-untyped-call]
        most = max(most, sum(one() is not None for one in seen))
        early = sum(p.grad is not None for p in model.layers.parameters())
        return out

    model.layers.layers()[0].register_forward_hook(watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = current().topology
    for ids, targets in list(zip(*text(), strict=True))[:2]:
        optimizer.zero_grad()
        bmt_recording.clear()
        batch: Any = of_pipeline(ids, targets)
        train_step(model, loss_of, batch, schedule, MICRO_BATCHES)
        own = topology.group(("dp",)).ranks
        calls = Counter(call.op for call in bmt_recording.calls if tuple(call.ranks) == own)
        optimizer.step()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    blocks: list[Any] = model.layers.layers()
    gathered = sum(
        g.buffer.tensor.untyped_storage().nbytes()
        for b in blocks
        for g in b._bmt_block.state.groups
    )
    return calls, most, held, gathered, early


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_gathers_each_block_once_and_keeps_as_many_activations_as_the_schedule_says(
    schedule: str,
) -> None:
    """GPipe gathers twice, but blocks that backward needs first stay. Between steps a rank has its
    shards of its stage.

    Before the last backward of a step no memory is taken for gradients that are zero.
    """
    init = {"pipe_size": 2, "comm_backend": "recording"}
    results = run_ranks(measured, 4, schedule, init=init)
    for rank, (calls, live, _, gathered, early) in enumerate(results):
        assert calls == {"all_gather": LAYERS // 2, "reduce_scatter": LAYERS // 2}, rank
        assert live == (MICRO_BATCHES if schedule == "gpipe" else 2 - rank // 2), rank
        assert gathered == early == 0
    plain = Plain(LAYERS).double()
    of_model, of_layers = (
        sum(p.numel() * p.element_size() for p in module.parameters())
        for module in (plain, plain.layers)
    )
    for stage in (results[:2], results[2:]):
        assert (
            sum(held for _, _, held, _, _ in stage) == of_layers // 2 + (of_model - of_layers) // 2
        )
