"""``assert_matches_single``: a model trained by ranks computes what one process of plain
torch computes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bmt_core.plugins import Registry
from bmt_core.run.topology import Topology, check_axis_sizes, grid_sizes
from bmt_core.settings import RunSettings
from bmt_testing.comparison import Difference, differences, may_be_rounding, rounding_of
from bmt_testing.determinism import check_is_deterministic
from bmt_testing.gpus import RANKS_PER_GPU, gpu_ranks
from bmt_testing.outcome import RankFailure
from bmt_testing.pool import run_ranks
from bmt_testing.repeat_line import repeat_lines
from bmt_testing.settings import TrainingSettings, arguments_of_axes
from bmt_testing.trainings import PlainTraining, require, train_on_ranks, values_of_parts
from bmt_testing.user_model import UserModel

_ROUNDINGS = 2**14
"""By how many roundings of float64 a value may differ: what sums in another order, amplified by
some steps, explain.
"""

_ROUNDINGS_MEASURED = 16
"""By how many roundings of other dtypes, where the training in float64 says how far each value may
be off beyond that.
"""

_LISTED = 5


def assert_matches_single(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    *,
    steps: int = 3,
    settings: TrainingSettings | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    pipeline: str | None = None,
    device: str = "cpu",
    init: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> None:
    """Raise AssertionError unless a training by ``settings`` equals that of one process of
    plain torch.

    Compared are the loss of every micro-batch, every gradient, the norm by which gradients are
    clipped, and every parameter and buffer after each of ``steps`` steps, on every rank. In float64
    they are equal but for the order of sums. In other dtypes a value may be off by a small multiple
    of what plain torch in that dtype is off from plain torch in float64; and if a difference may
    be rounding that the training has amplified, the same training in float64 decides.

    The functions are at the top level of a module, because every rank imports them. They take
    random numbers from torch's generator or from ``random``, which are seeded.

    ``model_fn()`` returns a model of plain torch, with what its dtype is left to ``settings``, and
    without dropout. ``batch_fn(seed)`` returns the batch of all ranks together: a tensor, a tuple
    of tensors for ``model(*batch)``, or a dict for ``model(**batch)``. Dim 0 is the batch; its rows
    are divided among the ranks that see different data. The model returns the loss, alone or as
    ``output.loss``; with ``loss_fn(output, batch)`` it may return anything. The loss of a batch is
    the mean of the losses of the ranks' parts, as everywhere in data parallelism.

    ``parallelize(model)`` is called on every rank before the model is sharded, and returns the
    model; axes such as ``tp`` need it, and along an axis of size 1 it changes nothing: for example
    ``bmt_tp.parallelize``. ``pipeline`` names the list of layers, such as ``"layers"``, that
    becomes a ``PipelineTransformerBlockList`` for the axis ``pp``: an ``nn.Sequential``, or any
    module that calls its children one after the other and returns the result.
    ``optimizer_fn(parameters)`` returns an optimizer, in place of that of ``settings``. ``device``
    is "cpu" or "cuda", for the ranks and for plain torch. ``init`` has further arguments of
    ``init_distributed``.

    Raises ValueError for a model that is not deterministic, for functions that ranks cannot import,
    and for batches that ranks cannot share. Needs bmt-zero, and bmt-optim for summed gradients.
    """
    training = ComparedTraining(
        model_fn=model_fn,
        batch_fn=batch_fn,
        steps=steps,
        loss_fn=loss_fn,
        parallelize=parallelize,
        optimizer_fn=optimizer_fn,
        pipeline=pipeline,
        device=device,
        init=init or {},
        timeout=timeout,
    )
    training.compare(TrainingSettings() if settings is None else settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedTraining:
    """The arguments of :func:`assert_matches_single`, but for its settings, which are drawn."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], Any]
    steps: int = 3
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    parallelize: Callable[[nn.Module], nn.Module] | None = None
    optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    pipeline: str | None = None
    device: str = "cpu"
    init: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout: float = 60.0

    def compare(self, settings: TrainingSettings) -> Counter[str]:
        """Do what :func:`assert_matches_single` does, and return how many numbers of each kind
        were compared.
        """
        self.check(settings)
        check_is_deterministic(self._user)
        comparison = _Comparison(
            self._user, self._grid(settings), self.steps, self._options(settings), self.timeout
        )
        try:
            unlike = comparison.differences(settings)
        except RankFailure as failure:
            repeat = self._repeat_lines(settings)
            raise AssertionError(f"The ranks failed. {failure}\n\n{repeat}") from None
        if unlike:
            raise AssertionError(f"{_report(unlike, settings)}\n\n{self._repeat_lines(settings)}")
        return comparison.compared

    def check(self, settings: TrainingSettings) -> None:
        """Raise the error of ranks, axes, functions or packages that ``settings`` would need and
        that are not there.
        """
        require("bmt-zero")
        _check_device(self.device, settings.ranks)
        _check_axes(settings, self._grid(settings), self._user)

    @property
    def _user(self) -> UserModel:
        return UserModel.of(*self._functions, pipeline=self.pipeline)

    @property
    def _functions(self) -> tuple[Any, ...]:
        return (
            self.model_fn,
            self.batch_fn,
            self.loss_fn,
            self.parallelize,
            self.optimizer_fn,
        )

    def _grid(self, settings: TrainingSettings) -> Topology:
        return _grid(settings, self._options(settings))

    def _options(self, settings: TrainingSettings) -> dict[str, Any]:
        return _init_options(settings, self.device, self.init)

    def _repeat_lines(self, settings: TrainingSettings) -> str:
        return repeat_lines(
            self._functions,
            steps=self.steps,
            settings=settings,
            pipeline=self.pipeline,
            device=self.device,
        )


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Trainings of one model on one grid, by ``settings`` that may differ in their dtype."""

    user: UserModel
    grid: Topology
    steps: int
    options: Mapping[str, Any]
    timeout: float
    compared: Counter[str] = dataclasses.field(default_factory=Counter)
    """How many numbers of each kind ranks have computed that were compared."""

    def differences(self, settings: TrainingSettings) -> list[Difference]:
        """Train both ways and return what differs by more than rounding."""
        dtype = getattr(torch, settings.dtype)
        expected = self._plain(settings, dtype)
        _check_is_finite(expected, settings)
        with TemporaryDirectory(prefix="bmt-testing-") as directory:
            records = run_ranks(
                train_on_ranks,
                settings.ranks,
                self.user,
                settings,
                self.steps,
                dtype,
                dict(self.options),
                directory,
                init=None,
                timeout=self.timeout,
            )
        for record in records:
            for name, value in record.values:
                self.compared[_kind(name).partition(" ")[0]] += value.numel()
        scales = _scales(expected)
        eps = _eps(settings, dtype)
        unlike = differences(
            expected,
            [dict(record.values) for record in records],
            floor=lambda name, value: eps * scales[_kind(name)],
            rounding=lambda: self._rounding(settings, expected),
            may_lack=self.grid.axis_size("pp") > 1,
        )
        if not unlike or dtype == torch.float64 or not may_be_rounding(unlike):
            return unlike
        return self.differences(dataclasses.replace(settings, dtype="float64"))

    def _plain(
        self, settings: TrainingSettings, dtype: torch.dtype
    ) -> list[dict[str, torch.Tensor]]:
        """Return what plain torch computes, for each rank, on a device of the ranks' kind: another
        kind would round otherwise.
        """
        device = torch.device(self.options["device"])
        training = PlainTraining(self.user, settings, self.grid.data_size, dtype, device)
        of_parts = values_of_parts(training.run(self.steps), self.grid.data_size)
        places = [
            Topology(self.grid.sizes, rank, same_data=self.grid.same_data_axes)
            for rank in range(settings.ranks)
        ]
        return [of_parts[place.data_rank] for place in places]

    def _rounding(
        self, settings: TrainingSettings, expected: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[Mapping[str, float]]:
        if settings.dtype == "float64":
            return [{} for _ in expected]
        return rounding_of(expected, self._plain(settings, torch.float64))


def _init_options(
    settings: TrainingSettings, device: str, further: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``init_distributed``."""
    return {
        "device": device,
        "gradients": settings.gradients,
        "prefetch_bytes": settings.prefetch_bytes,
        "reduce_dtype": settings.reduce_dtype,
        "zero_level": settings.level_of(0),
        "shard_size": settings.shard_size,
        "optimizer_shards": settings.optimizer_shards,
        **arguments_of_axes(settings.axes),
        **further,
    }


def _grid(settings: TrainingSettings, options: Mapping[str, Any]) -> Topology:
    """Return the grid of the run; :class:`ConfigError` if there is none for these settings."""
    names = ("tp_size", "pipe_size", "axis_sizes")
    run = RunSettings(**{name: options[name] for name in names if name in options})
    registry = Registry.load(plugins=options.get("plugins", ()))
    axes = registry.mesh_axes(run)
    check_axis_sizes(run.axis_sizes, axes)
    same_data = [axis.name for axis in axes if not axis.shards_data]
    sizes = grid_sizes(axes, settings.ranks, settings.shard_size)
    return Topology(sizes, same_data=same_data)


def _check_device(device: str, ranks: int) -> None:
    if torch.device(device).type == "cuda" and ranks > gpu_ranks():
        raise ValueError(
            f"device={device!r} needs GPUs for {ranks} ranks, and this machine has those for"
            f" {gpu_ranks()}. Take fewer ranks, or say in {RANKS_PER_GPU} how many share a GPU."
        )


def _check_axes(settings: TrainingSettings, grid: Topology, user: UserModel) -> None:
    for name, size in settings.axes.items():
        if size == 1:
            continue
        if grid.axis_size(name) != size:
            package = {"tp": "bmt-tp", "pp": "bmt-pipeline"}.get(name)
            if package is not None:
                require(package)
            raise ValueError(
                f"axes asks for {name!r} of size {size}, and the grid is {grid.sizes}."
            )
        if name == "pp" and user.pipeline is None:
            raise ValueError(
                f"axes={dict(settings.axes)} divides layers over {size} stages, and the model does"
                " not say which: pass pipeline='layers', the name of the list of layers, or leave"
                " 'pp' out of training_settings(axes=...)."
            )
        if name in grid.same_data_axes and user.parallelize is None:
            raise ValueError(
                f"axes={dict(settings.axes)} splits the model along {name!r}, and the model does"
                f" not say how: pass parallelize=, a function that splits it, or leave {name!r} out"
                " of training_settings(axes=...)."
            )


def _check_is_finite(
    expected: Sequence[Mapping[str, torch.Tensor]], settings: TrainingSettings
) -> None:
    for name, value in expected[0].items():
        if not value.isfinite().all():
            raise ValueError(
                f"{name} is not finite in plain torch with {settings!r}, so nothing can be"
                " compared. Give the model smaller values, or leave the dtype out of"
                " training_settings(dtypes=...)."
            )


def _eps(settings: TrainingSettings, dtype: torch.dtype) -> float:
    """Return by how much values may differ, as a part of the largest one of their kind."""
    if dtype != torch.float64:
        return _ROUNDINGS_MEASURED * torch.finfo(dtype).eps
    if settings.max_norm is not None:  # norms are float32, and so is what is clipped
        return _ROUNDINGS_MEASURED * torch.finfo(torch.float32).eps
    return _ROUNDINGS * torch.finfo(dtype).eps


def _scales(expected: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the largest value of each kind: a gradient that is zero comes of terms that
    are not.
    """
    scales: dict[str, float] = {}
    for values in expected:
        for name, value in values.items():
            if value.numel():
                kind = _kind(name)
                scales[kind] = max(scales.get(kind, 0.0), float(value.abs().max()))
    return scales


def _kind(name: str) -> str:
    """Return the kind of a value: a loss, gradient, norm, or parameter; of each buffer its name."""
    words = name.split(" ")
    if words[0] == "buffer":
        return name
    return words[0] if words[0] in ("loss", "gradient", "norm") else "parameter"


def _report(unlike: Sequence[Difference], settings: TrainingSettings) -> str:
    first = unlike[0]
    number = f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''}"
    lines = [f"A training on {number} differs from one process of plain torch.", ""]
    where = "on no rank" if first.rank is None else f"on rank {first.rank}"
    at = f", at {list(first.index)}" if first.index else ""
    if first.problem:
        lines.append(f"first: {first.name}, {where}: {first.problem}")
    else:
        lines += [
            f"first: {first.name}, {where}{at}",
            f"  expected: {first.expected:.10g}",
            f"  found:    {first.found:.10g}, off by {first.distance:.3g}",
        ]
        if first.rounding:
            lines.append(f"  rounding: plain torch is {first.rounding:.3g} from itself in float64")
    if further := unlike[1:]:
        lines.append(f"and {len(further)} more, such as:")
        lines += [f"  {difference}" for difference in further[:_LISTED]]
    return "\n".join(lines)
