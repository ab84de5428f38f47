"""A user's own loop, run by one process in plain torch, and by ranks.

``train(model, data, rank, ranks)`` is called on every rank with the wrapped model, and in one
process with the plain one as rank 0 of 1; both have called ``init_distributed``, so that the loop
may use bmt's functions. ``data`` is all of ``batch_fn(0)``: the loop takes its own rows, makes its
optimizer, and decides about accumulation, clipping, schedules and loss scale. ``rank`` counts those
ranks that see different data. What it returns is compared: numbers, tensors and modules, such as
losses and an average of the weights, in lists or dicts; so are parameters and buffers afterwards.
Every rank returns what one process returns: a mean over ranks, not its own part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bmt_core.settings import DEFAULT_GRADIENTS
from bmt_params.parameter import DistributedParameter
from bmt_testing.comparison import Record
from bmt_testing.settings import TrainingSettings
from bmt_testing.trainings import PlainTraining, ShardedTraining, started
from bmt_testing.user_model import UserModel, seeded

_OF_A_LOOP = (
    *("micro_batches", "no_sync", "gradients", "max_norm", "optimizer", "frozen", "reload"),
    "param_dtype",  # the plain loop calls the model itself, with parameters that nobody casts
)


def without_loop(settings: TrainingSettings) -> TrainingSettings:
    """Return ``settings`` with what a user's loop decides as it is by default."""
    default = TrainingSettings(gradients=DEFAULT_GRADIENTS)
    return dataclasses.replace(settings, **{name: getattr(default, name) for name in _OF_A_LOOP})


class PlainLoop(PlainTraining):
    """The loop by one process in plain torch."""

    def make(self, seed: int) -> None:
        self.model = self.build(self.user.model(seed, self.dtype).train())
        self.parameters = dict(self.model.named_parameters())

    def run(self, steps: int) -> Record:
        _run(self, 0, 1)
        return self.record


class ShardedLoop(ShardedTraining):
    """The loop by the ranks of this run."""

    def make(self, seed: int) -> None:
        self.model = self.wrapped(seed)
        self.parameters = dict(self.model.named_parameters())

    def run(self, steps: int) -> Record:
        _run(self, self.topology.data_rank, self.data_size)
        return self.record


def _run(training: PlainLoop | ShardedLoop, rank: int, ranks: int) -> None:
    """Call the user's function, and note what it returns and what the model is afterwards."""
    user = training.user
    assert user.train is not None
    seed = training.settings.batch_seed(0, 0)
    data = user.batch(seed, training.dtype, training.device)
    with seeded(seed):
        results = user.train.resolve()(training.model, data, rank, ranks)
    for name, value in _values(results):
        training.record.add(name, value)
    training.note_parameters("after the loop")
    for label, name, buffer in training.buffers():
        training.record.add(f"{label}buffer {name} after the loop", buffer)


def _values(results: Any, name: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """Yield what a user's function has returned: tensors, numbers and modules, in lists and dicts,
    each with a name.
    """
    if results is None:
        return
    if isinstance(results, nn.Module):
        results = results.state_dict()
    label = f"result {name}".strip()
    if isinstance(results, torch.Tensor):
        whole = results.gather() if isinstance(results, DistributedParameter) else results
        yield label, whole.detach()
    elif isinstance(results, bool | int | float):
        yield label, torch.tensor(float(results), dtype=torch.float64)
    elif isinstance(results, Mapping):
        for key, value in results.items():
            yield from _values(value, f"{name}[{key!r}]")
    elif isinstance(results, list | tuple):
        for index, value in enumerate(results):
            yield from _values(value, f"{name}[{index}]")
    else:
        raise TypeError(
            f"train() returned a {type(results).__name__}. Return what is to be compared: numbers,"
            " tensors or modules, in lists or dicts."
        )


def train_plain_loop(
    user: UserModel, settings: TrainingSettings, dtype: torch.dtype, init: Mapping[str, Any]
) -> Record:
    """Return what the loop computes in this process, with a model in plain torch, in a run of one
    rank that begins with ``init_distributed(**init)``: so the loop may use bmt's functions.
    """
    from bmt_core.run.runtime import current

    with started(init):
        return PlainLoop(user, settings, 1, dtype, current().device).run(0)


def train_on_ranks(
    user: UserModel,
    settings: TrainingSettings,
    steps: int,
    dtype: torch.dtype,
    init: Mapping[str, Any],
    directory: str,
) -> Record:
    """Train as ``settings`` say, or by the user's loop, by the ranks of a run that begins with
    ``init_distributed(**init)``. Collective. Checkpoints are written to ``directory``.
    """
    kind = ShardedTraining if user.train is None else ShardedLoop
    with started(init):
        return kind(user, settings, dtype, directory).run(steps)
