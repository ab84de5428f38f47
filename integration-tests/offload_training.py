"""Trainings with ``AdamOptimizer`` and with the offloaded one, for tests on the CPU and on GPUs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_optim.offload.placement import DeviceRoom
from bmt_params.parameter import DistributedParameter
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList, no_sync


class Offload(AdamOffloadOptimizer):
    """Offloads from the CPU to the CPU, in small chunks."""

    chunk = 37

    def _offloads(self, device: torch.device) -> bool:
        return True

    def _device_room(self) -> DeviceRoom:
        return Room()


class Room(DeviceRoom):
    """What the CPU, in the part of a device, has free."""

    def _measured(self, device: torch.device) -> int:
        return 1 << 20


class SplitOffload(Offload):
    """Offloads some states, and keeps those of the first parameters, as many as fit into
    3,000 bytes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, device_memory=3000, **options)


class RestlessOffload(Offload):
    """Has another budget in each step."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        budgets = [0, 3000, 1 << 20, 1000, 5000]
        steps = [state["step"] for state in self.state.values()]
        self.device_memory = budgets[max(steps, default=0) % len(budgets)]
        return super().step(*arguments, **options)


class Gated(Offload):
    """Steps begin when the gate is open."""

    def _kernels(self) -> Any:
        kernels, gate = super()._kernels(), self.gate

        class Kernels:
            has_compact_adam = False

            @staticmethod
            def adam_step(*columns: Any, **options: Any) -> None:
                gate.wait()
                kernels.adam_step(*columns, **options)

        return Kernels

    gate = threading.Event()


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.up = nn.Linear(6, 13, dtype=dtype)
        self.down = nn.Linear(13, 6, bias=False, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """An embedding outside of blocks, three blocks of which the second is frozen in part, and
    a head.
    """

    def __init__(self, level: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, 6, dtype=dtype)
        layers = [Layer(dtype) for _ in range(3)]
        layers[1].up.weight.requires_grad_(False)
        self.layers = TransformerBlockList([Block(layer, zero_level=level) for layer in layers])
        self.head = Block(nn.Linear(6, 11, dtype=dtype), zero_level=level)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


class Training:
    def __init__(
        self,
        kind: Callable[..., AdamOptimizer],
        *,
        level: int = 3,
        dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        loss_scale: float | None = None,
        micro_batches: int = 1,
        holds_back: bool = False,
        counts: bool = False,
        overlap_forward: bool = True,
        **options: Any,
    ) -> None:
        model = BMTrainModelWrapper(Model(level, dtype))
        self.device = runtime.current().device
        self.model, self.max_norm = model, max_norm
        self.micro_batches, self.holds_back, self.counts = micro_batches, holds_back, counts
        groups = [
            {"params": [p for p in model.parameters() if p.full_shape.numel() > 20], "lr": 0.05},
            {
                "params": [p for p in model.parameters() if p.full_shape.numel() <= 20],
                "weight_decay": 0.2,
            },
        ]
        self.optimizer = kind(
            groups, lr=0.02, weight_decay=0.1, overlap_forward=overlap_forward, **options
        )
        self.manager = OptimManager(loss_scale=loss_scale, loss_scale_steps=2)
        self.manager.add_optimizer(self.optimizer)

    def step(self, number: int, *, overflows: bool = False) -> None:
        self.manager.zero_grad()
        generator = torch.Generator().manual_seed(number)
        data = torch.randint(11, (self.micro_batches, 4, 5), generator=generator)
        rows = 4 // runtime.world_size()
        for i, batch in enumerate(data):
            mine = batch[runtime.rank() * rows :][:rows].to(self.device)
            with (
                no_sync(self.model)
                if self.holds_back and i + 1 < self.micro_batches
                else nullcontext()
            ):
                loss = nn.functional.cross_entropy(
                    self.model(mine).float().flatten(0, 1), mine.flatten().roll(1)
                )
                loss = loss * float("inf") if overflows else loss
                if self.counts:  # not the true ones, so that those of micro-batches differ
                    self.manager.backward(loss * 20, count=i + 20)
                else:
                    self.manager.backward(loss / self.micro_batches)
        if self.max_norm is not None:
            self.manager.clip_grad_norm(self.optimizer.param_groups, self.max_norm)
        self.manager.step()

    def whole(self) -> list[torch.Tensor]:
        named = sorted(self.model.named_parameters())
        return [
            p.gather_like(p.data).cpu().clone()
            for _, p in named
            if isinstance(p, DistributedParameter)
        ]


def assert_same_results(trainings: list[Training]) -> None:
    for a, b in zip(*[training.whole() for training in trainings], strict=True):
        assert torch.equal(a, b)


SETTINGS: list[dict[str, Any]] = [
    {"overlap_forward": False},
    {"max_norm": 0.5, "loss_scale": 512.0},
    {"micro_batches": 2},
    {"micro_batches": 2, "holds_back": True, "max_norm": 0.5},
    {"hold_steps": 2, "decoupled_weight_decay": False},
    {"micro_batches": 3, "counts": True, "loss_scale": 512.0},
]


def both(
    kind: Any, dtype: torch.dtype, every: int = 1
) -> list[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]]:
    """Train with both optimizers; return the settings and both models' parameters of each training,
    or of each ``every``-th.
    """
    results = []
    for level, settings in itertools.islice(itertools.product(range(4), SETTINGS), 0, None, every):
        trainings = [
            Training(which, level=level, dtype=dtype, **settings) for which in (AdamOptimizer, kind)
        ]
        for training in trainings:
            for number in range(4):
                training.step(number, overflows=number == 2 and "loss_scale" in settings)
            training.manager.read_outcome()
            training.optimizer.wait()
        steps = [
            {state["step"] for state in training.optimizer.state.values()} for training in trainings
        ]
        assert steps[0] == steps[1]
        assert (
            trainings[0].manager.skipped_steps
            == trainings[1].manager.skipped_steps
            == ("loss_scale" in settings)
        )
        results.append(({"level": level, **settings}, trainings[0].whole(), trainings[1].whole()))
    return results
