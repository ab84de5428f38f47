"""Trainings on rows with unequal numbers of target tokens, on grids of ranks and in plain torch in
one process, which takes the mean over the tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from offload_training import Offload
from same_data_models import PLAN, WORDS, Model, plain, whole
from torch import nn
from torch.nn import functional as F

from bmt_core import mean_loss
from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current
from bmt_optim import AdamW, OptimManager
from bmt_optim import whole as whole_tensors
from bmt_pipeline import PipelineTransformerBlockList
from bmt_tp import parallelize
from bmt_zero import BMTrainModelWrapper, no_sync

BATCH, LENGTH, STEPS, MICRO_BATCHES, MAX_NORM = 16, 4, 4, 2, 0.3
IGNORED = -100
# A large eps, with which Adam's steps depend on the scale of gradients.
ADAM = {"lr": 0.05, "eps": 0.02}

Record = dict[str, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Optimizer, Optimizer]] = {
    "SGD": (*[lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)] * 2,),
    "AdamW": (
        lambda params: torch.optim.AdamW(params, **ADAM, foreach=True),
        lambda params: AdamW(params, **ADAM),
    ),
    "offload": (
        lambda params: torch.optim.AdamW(params, **ADAM),
        lambda params: Offload(params, **ADAM, weight_decay=0.01, decoupled_weight_decay=True),
    ),
    "whole tensors": (
        lambda params: torch.optim.Adafactor(params, lr=0.05),
        lambda params: whole_tensors(torch.optim.Adafactor, params, lr=0.05),
    ),
}
"""By name: in plain torch, and on ranks."""


class Summed(Model):
    """Returns the sum of the losses of the targets that count."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layers, nn.ModuleList):
            return super().hidden(ids)
        normed: torch.Tensor = self.norm(self.layers(self.embed(ids)))
        return normed

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which the first four have no targets; so has all of the last step."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    counts = torch.randint(LENGTH + 1, (BATCH, 1), generator=generator)
    counts[: BATCH if step == STEPS - 1 else 4] = 0
    labels[torch.arange(LENGTH) >= counts] = IGNORED
    return ids, labels


def of_plain_torch(kind: str, *, clips: bool, dtype: torch.dtype = torch.float64) -> Record:
    """The mean losses, norms, gradients and parameters."""
    model = plain(Summed).to(dtype)
    optimizer = OPTIMIZERS[kind][0](model.parameters())
    record: Record = {}
    for step in range(STEPS):
        ids, labels = batch(step)
        loss = model(ids, labels) / (labels != IGNORED).sum().clamp(min=1)
        loss.backward()
        record[f"loss {step}"] = loss.detach()
        if clips:
            record[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for name, p in model.named_parameters():
            record[f"gradient of {name} {step}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return record | {name: p.detach() for name, p in model.named_parameters()}


def of_ranks(
    kind: str,
    *,
    clips: bool,
    holds: bool = False,
    loss_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Record:
    """The same on the ranks of this run. ``holds``: gradients stay on the ranks until the last
    micro-batch.
    """
    topology = current().topology
    model = made(dtype)
    optimizer = OPTIMIZERS[kind][1](model.parameters())
    manager = OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
    manager.add_optimizer(optimizer)
    record: Record = {}
    for step in range(STEPS):
        if loss_scale is not None:
            overflow(manager, model)
        own = [
            x.chunk(topology.data_size)[topology.data_rank].to(current().device)
            for x in batch(step)
        ]
        loss_sum, count = torch.zeros(2, dtype=dtype, device=current().device)
        micro_batches = zip(*[x.chunk(MICRO_BATCHES) for x in own], strict=True)
        for number, (ids, labels) in enumerate(micro_batches):
            with no_sync(model) if holds and number < MICRO_BATCHES - 1 else nullcontext():
                loss, tokens = model(ids, labels), (labels != IGNORED).sum()
                # A count may be a tensor or a number.
                manager.backward(loss, count=tokens if number else int(tokens))
            loss_sum, count = loss_sum + loss.detach(), count + tokens
        record[f"loss {step}"] = mean_loss(loss_sum, count).nan_to_num()
        if clips:
            record[f"norm {step}"] = manager.clip_grad_norm(model.parameters(), MAX_NORM)
        gradients = dict(manager.unscaled_gradients(model.parameters()))
        for name, p in model.named_parameters():
            record[f"gradient of {name} {step}"] = whole(p, gradients[p])
        manager.step()
        manager.zero_grad()
    manager.read_outcome()
    optimizer.state_dict()  # waits for an update under way
    record |= {name: whole(p, p.data) for name, p in model.named_parameters()}
    of_stages: list[Record] = all_gather_object(record, current().world)
    return {name: value.cpu() for each in of_stages for name, value in each.items()}


def made(dtype: torch.dtype) -> nn.Module:
    """Return the model for the grid of this run."""
    model, topology = plain(Summed).to(dtype), current().topology
    if topology.axis_size("tp") > 1:
        parallelize(model, PLAN)
    if topology.axis_size("pp") > 1:
        model.layers = PipelineTransformerBlockList(list(model.layers))
    return BMTrainModelWrapper(model)


def overflow(manager: OptimManager, model: nn.Module) -> None:
    """Take a step that is skipped, since a loss is infinite; its counts do not matter later."""
    ids = batch(0)[0][:1].to(current().device)
    for _ in range(2):
        manager.backward(model(ids, ids) * float("inf"), count=1000)
    skipped = manager.skipped_steps
    manager.step()
    manager.read_outcome()
    assert manager.skipped_steps == skipped + 1
    manager.zero_grad()


def without_waiting(kind: str) -> float:
    """Train on a GPU, and fail where the host waits for it; return the last mean loss."""
    model = made(torch.float32)
    optimizer = OPTIMIZERS[kind][1](model.parameters())
    manager = OptimManager(loss_scale=2.0**10)
    manager.add_optimizer(optimizer)
    ids, labels = (x.cuda() for x in batch(0))

    def step() -> torch.Tensor:
        for _ in range(MICRO_BATCHES):
            loss_sum, tokens = model(ids, labels), (labels != IGNORED).sum()
            manager.backward(loss_sum, count=tokens)
        manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
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
