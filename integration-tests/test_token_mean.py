"""``backward(loss_sum, count=tokens)``: gradients of the mean over the tokens of the whole batch,
as plain torch computes it in one process, however unequal the ranks' and micro-batches' shares are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from chain_models import WORDS, Chain, split
from offload_training import Offload
from torch import nn

from bmt_core import mean_loss
from bmt_optim import AdamW, OptimManager, whole
from bmt_testing import TrainingSettings, assert_matches_single, run_ranks
from bmt_zero import BMTrainModelWrapper

IGNORED = -100


class Summed(Chain):
    """Returns the sum of the losses of the targets that count, and their number."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        hidden = self.layers(self.embedding(ids))
        return self.loss(hidden, labels, reduction="sum"), (labels != IGNORED).sum()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which the first four have no targets."""
    ids, labels = torch.randint(WORDS, (2, 16, 4))
    counts = torch.randint(5, (16, 1))
    counts[:4] = 0
    labels[torch.arange(4) >= counts] = IGNORED
    return ids, labels


HELD: dict[str, Any] = {"gradients": "sum", "micro_batches": 2, "no_sync": True}
CLIPPED: dict[str, Any] = {"gradients": "sum", "micro_batches": 2, "max_norm": 0.3}
SETTINGS = [
    TrainingSettings(levels=(3,), **CLIPPED),
    TrainingSettings(ranks=2, levels=(0, 1), **CLIPPED),
    TrainingSettings(ranks=4, levels=(2, 3), **HELD),
    TrainingSettings(ranks=4, levels=(3,), shard_size=2, **CLIPPED),
    TrainingSettings(ranks=4, levels=(1, 3), shard_size=2, optimizer_shards="all", **CLIPPED),
    TrainingSettings(ranks=4, levels=(3, 0), axes={"tp": 2}, **HELD),
    TrainingSettings(ranks=4, levels=(3,), axes={"pp": 2}, **CLIPPED),
    TrainingSettings(ranks=4, levels=(2,), axes={"pp": 2, "tp": 2}, **CLIPPED),
]
compare = partial(assert_matches_single, Summed, batch)


@pytest.mark.parametrize(
    ("settings", "gradients"), list(zip(SETTINGS, ("sum", "mean") * 4, strict=True)), ids=repr
)
def test_a_training_with_counts_is_that_of_plain_torch_on_every_grid(
    settings: TrainingSettings, gradients: str
) -> None:
    axes: dict[str, Any] = {"parallelize": split} if "tp" in settings.axes else {}
    axes |= {"pipeline": "layers"} if "pp" in settings.axes else {}
    compare(settings=settings, init={"gradients": gradients}, **axes)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW(parameters, lr=0.05, eps=0.02)


def offload(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Offload(parameters, lr=0.05, eps=0.02, weight_decay=0.01, decoupled_weight_decay=True)


def whole_tensors(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return whole(torch.optim.Adafactor, parameters, lr=0.05)


OPTIMIZERS = {"AdamW": adamw, "offload": offload, "whole tensors": whole_tensors}


@pytest.mark.parametrize("kind", ["AdamW", "whole tensors"])
def test_every_kind_of_optimizer_steps_by_the_divided_gradients(kind: str) -> None:
    settings = TrainingSettings(ranks=2, levels=(3, 0), **CLIPPED)
    compare(settings=settings, optimizer_fn=OPTIMIZERS[kind])


@pytest.mark.parametrize("kind", [None, "AdamW", "whole tensors"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.gpu
def test_on_gpus_a_training_with_counts_is_that_of_plain_torch(
    kind: str | None, ranks: int
) -> None:
    options = CLIPPED if kind else HELD
    settings = TrainingSettings(ranks=ranks, levels=(3, 0), **options)
    optimizer = OPTIMIZERS[kind] if kind else None
    compare(settings=settings, optimizer_fn=optimizer, device="cuda")


def without_waiting(kind: str) -> float:
    """Train on a GPU, and fail where the host waits for it; return the last mean loss."""
    torch.manual_seed(0)
    model = BMTrainModelWrapper(Summed())
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    manager = OptimManager(loss_scale=2.0**10)
    manager.add_optimizer(optimizer)
    ids, labels = (x.cuda() for x in batch(0))

    def step() -> torch.Tensor:
        for _ in range(2):
            loss_sum, tokens = model(ids, labels)
            manager.backward(loss_sum, count=tokens)
        manager.clip_grad_norm(optimizer.param_groups, 0.3)
        manager.step()
        manager.zero_grad()
        return mean_loss(loss_sum.detach(), tokens)

    for _ in range(4):  # in the first steps losses of ranks are compared, and states are made
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return loss.item()


@pytest.mark.parametrize("kind", ["AdamW", "offload"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
@pytest.mark.gpu
def test_on_gpus_the_host_waits_for_no_count(kind: str, ranks: int) -> None:
    losses = run_ranks(without_waiting, ranks, kind, init={"device": "cuda", "zero_level": 2})
    assert len(set(losses)) == 1 and losses[0] < 2.6
