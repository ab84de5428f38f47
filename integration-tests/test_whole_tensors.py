"""Optimizers over whole tensors train models on every grid as in one process, go on from a
checkpoint of another grid, and send each part once and back.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import bmt_recording
import pytest
import torch
from chain_models import WORDS, Chain, batch, split
from torch import nn
from whole_optimizers import Normalized

import bmtrain as bmt
from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import current, rank
from bmt_optim import AdamW, OptimManager, create, whole
from bmt_params import DistributedParameter, Locality, init_parameters
from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks
from bmt_tp import RowParallelLinear
from bmt_zero import Block, no_sync

STEPS, MICRO_BATCHES = 4, 2


KINDS: dict[str, Any] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "Normalized": Normalized,
}


class Odd(Chain):
    """Layers of sizes that nothing divides, with frozen biases, between an embedding and a head
    that are one matrix. Some steps leave out the last layer.
    """

    def __init__(self) -> None:
        super().__init__((9, 5, 11, 3))
        self.head.weight = self.embedding.weight
        for layer in self.layers:
            layer.up.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, ids: torch.Tensor, leaves_out: bool = False) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        for layer in list(self.layers)[: -1 if leaves_out else None]:
            x = layer(x)
        return self.loss(x, ids[:, 1:])


def all_steps(seed: int) -> torch.Tensor:
    return torch.randint(WORDS, (8, STEPS * MICRO_BATCHES, 7))


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    shapes = {p: getattr(p, "whole_shape", p.shape) for p in model.parameters()}
    return [p for p in shapes if len(shapes[p]) == 2], [p for p in shapes if len(shapes[p]) != 2]


def managed_loop(
    kind: str, folder: str, last: int, model: Any, data: torch.Tensor, rank: int, ranks: int
) -> Any:
    """The steps up to ``last``, with accumulation and a schedule. Ranks go on from the checkpoint
    that is there, and leave one.
    """
    matrices, others = matrices_and_others(model)
    optimizer = whole(KINDS[kind], matrices, lr=0.05, bucket_bytes=300)
    manager = OptimManager(loss_scale=8.0)
    manager.add_optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    manager.add_optimizer(AdamW(others, lr=0.01, eps=1e-4, weight_decay=0.01))
    is_sharded, first = isinstance(matrices[0], DistributedParameter), 0
    if is_sharded and bmt.latest(folder) is not None:
        first = bmt.load_checkpoint(folder, model, manager)["step"]
    for step in range(first, last):
        for number in range(MICRO_BATCHES):
            own = data[:, step * MICRO_BATCHES + number].chunk(ranks)[rank]
            options = {"leaves_out": step == 1} if isinstance(model, Odd) else {}
            loss = model(own, **options) / MICRO_BATCHES
            manager.backward(loss)
        manager.step()
        manager.zero_grad()
    if is_sharded:
        bmt.save_checkpoint(folder, model, manager, step=last)
    return bmt.mean_loss(loss.detach())


def plain_loop(kind: str, model: Any, data: torch.Tensor, rank: int, ranks: int) -> Any:
    """A loop without a manager, for gradients that are means."""
    matrices, others = matrices_and_others(model)
    optimizers = [
        whole(KINDS[kind], matrices, lr=0.05),
        torch.optim.AdamW(others, lr=0.01, eps=1e-4),
    ]
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            own = data[:, step * MICRO_BATCHES + number].chunk(ranks)[rank]
            is_last = number + 1 == MICRO_BATCHES
            is_sharded = isinstance(matrices[0], DistributedParameter)
            with no_sync(model) if is_sharded and not is_last else nullcontext():
                loss = model(own) / MICRO_BATCHES
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return bmt.mean_loss(loss.detach())


MIXED: dict[str, Any] = {"levels": (0, 1, 2, 3), "recompute": (True, False)}
TO_GRIDS: list[tuple[str, TrainingSettings, TrainingSettings]] = [
    ("Muon", TrainingSettings(ranks=2, **MIXED), TrainingSettings(ranks=4, levels=(3,))),
    ("Adafactor", TrainingSettings(ranks=4, **MIXED), TrainingSettings(**MIXED)),
    ("Normalized", TrainingSettings(ranks=2, levels=(3,)), TrainingSettings(ranks=4, **MIXED)),
    *[
        (
            kind,
            TrainingSettings(ranks=size, axes={axis: 2}, levels=(level,)),
            TrainingSettings(ranks=6 - size, axes={} if kind == "Muon" else {axis: 2}, levels=(3,)),
        )
        for axis in ("tp", "pp")
        for kind, size, level in (("Muon", 4, 3), ("Adafactor", 4, 0), ("Normalized", 2, 3))
    ],
]


@pytest.mark.parametrize(("kind", "saving", "loading"), TO_GRIDS, ids=str)
def test_a_training_goes_on_from_grid_to_grid_as_in_one_process(
    kind: str, saving: TrainingSettings, loading: TrainingSettings, tmp_path: Path
) -> None:
    axes = {*saving.axes, *loading.axes}
    options: dict[str, Any] = {"parallelize": split} if "tp" in axes else {}
    options |= {"pipeline": "layers"} if "pp" in axes else {}
    for settings, last in ((saving, 2), (loading, STEPS)):
        assert_matches_single(
            Chain if axes else Odd,
            all_steps,
            settings=settings,
            train=partial(managed_loop, kind, str(tmp_path), last),
            **options,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_with_mean_gradients_trains_as_in_one_process(kind: str) -> None:
    assert_matches_single(
        Odd,
        all_steps,
        settings=TrainingSettings(ranks=4 if kind == "Adafactor" else 2, **MIXED),
        train=partial(plain_loop, kind),
        init={"gradients": "mean"},
    )


def normalized(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return whole(Normalized, parameters, lr=0.05)


def test_gradients_that_a_manager_clips_are_stepped_by_as_in_one_process() -> None:
    settings = TrainingSettings(
        ranks=4, shard_size=2, gradients="sum", max_norm=0.1, micro_batches=2, no_sync=True,
        frozen=((), (0, 3)), reload=True, **MIXED,
    )  # fmt: skip
    assert_matches_single(Odd, batch, settings=settings, optimizer_fn=normalized)


class NamedMuon(torch.optim.Muon):
    """Goes by shapes, where torch's goes by ``ndim``, which is right for parts."""

    name = "muon"

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(len(p.shape) != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("NamedMuon takes 2D tensors.")


class Plugin:
    @hookimpl
    def bmt_optimizers(self) -> list[Any]:
        return [NamedMuon]


@on_ranks(2, own_run=True)  # to which it adds a plugin
def test_a_class_of_matrices_by_name_is_refused_at_every_level_with_what_to_do() -> None:
    current().registry.register(Plugin(), "muon")
    for level in range(4):
        block = Block(nn.Linear(4, 3, bias=False), zero_level=level)
        with pytest.raises(ConfigError, match=r"takes whole ones: bmt\.optim\.whole\(NamedMuon"):
            create("muon", block.parameters())


@on_ranks(2, init={"pipe_size": 2})
def test_together_is_refused_with_stages_on_all_of_them() -> None:
    layers = PipelineTransformerBlockList([nn.Linear(4, 4) for _ in range(2)])
    outside = DistributedParameter(torch.ones(4, 4))
    own = [outside, *(layers.parameters() if rank() == 0 else ())]
    with pytest.raises(ConfigError, match="along pp ranks have parameters of their own"):
        whole(Normalized, own, together=True)


LOCALITIES: dict[str, tuple[Locality, ...]] = {
    "rows": (Locality("tp", split_dim=0),),
    "columns": (Locality("tp", split_dim=1),),
    "sections": (Locality("tp", split_dim=1, sections=(4, 2)),),
    "copies": (Locality("tp", gradients="whole"),),
    "shares": (Locality("tp", gradients="share"),),
    "everywhere": (),
}


@on_ranks(4, init={"tp_size": 2})
def test_parameters_of_every_locality_are_joined_at_the_owner() -> None:
    generator = torch.Generator().manual_seed(0)
    for together in (False, True):
        wholes = {
            name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in LOCALITIES
        }
        topology, parts = current().topology, {}
        for name, locality in LOCALITIES.items():
            value = wholes[name]
            for one in locality:
                if one.split_dim is not None:
                    value = one.cut(value, topology.axis_rank("tp"), 2)
            p = parts[name] = DistributedParameter(value, locality=locality)
            assert p.cuts == [(one, 2) for one in locality if one.split_dim is not None]
        references = {name: nn.Parameter(value) for name, value in wholes.items()}
        plain = Normalized(references.values())
        optimizer = whole(Normalized, parts.values(), together=together)
        for _ in range(3):
            for name, p in parts.items():
                grad = torch.randn(4, 6, generator=generator, dtype=torch.float64)
                references[name].grad, p.grad = grad, p.local_part(p.own_slice(grad)).clone()
            plain.step()
            optimizer.step()
        for name, p in parts.items():
            torch.testing.assert_close(
                p.gather_all_like(p.detach()), references[name].detach(), msg=name
            )


@on_ranks(2, init={"tp_size": 2})
def test_each_rank_may_have_one_column_of_a_matrix() -> None:
    layer = RowParallelLinear(2, 6, bias=False)
    init_parameters(layer)
    (p,) = layer.parameters()
    assert isinstance(p, DistributedParameter)
    before = p.gather_all().detach().clone()
    optimizer = whole(torch.optim.SGD, [p], lr=0.5)
    gradient = torch.arange(12.0).view(6, 2)
    for step in range(2):
        p.grad = p.local_part(p.own_slice(gradient)).clone()
        optimizer.step()
        torch.testing.assert_close(p.gather_all().detach(), before - 0.5 * (step + 1) * gradient)


@on_ranks(2, 4, init={"comm_backend": "recording"})
def test_each_part_of_a_gradient_is_sent_to_the_owner_and_each_of_the_values_back() -> None:
    for shapes in ([(8, 8), (16, 4), (4, 8)], [(9, 5), (3, 7), (2, 1)]):
        params = [DistributedParameter(torch.ones(shape)) for shape in shapes]
        optimizer = whole(torch.optim.Muon, params)
        for _ in range(3):  # in the first step owners read the values, too
            for p in params:
                p.grad = torch.ones_like(p)
            bmt_recording.clear()
            optimizer.step()
        calls = [*bmt_recording.calls]
        sent = sum(call.bytes for call in calls if call.op == "send")
        expected = sum(
            p.whole_shape.numel() - p.numel()
            if optimizer.state_owner(p).rank == rank()
            else p.numel()
            for p in params
        )
        assert sent == 4 * expected
        assert optimizer.bytes_per_step() == sum(all_gather_object(sent, current().world))
        # By which ranks find out which parameters have gradients.
        others = [call.op for call in calls if call.op not in ("send", "recv")]
        assert others == ["all_reduce"]
