"""``assert_matches_single``: a model trained by ranks computes what one process computes in plain
torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
from torch import nn

from bmt_core.plugins import Registry
from bmt_core.run.topology import Topology, check_axis_sizes, grid_sizes, kinds_of_axes
from bmt_core.settings import RunSettings
from bmt_testing.assumptions import why_parts_differ
from bmt_testing.comparison import (
    Difference,
    comparable,
    differences,
    may_be_rounding,
    rounding_of,
)
from bmt_testing.determinism import check_is_deterministic
from bmt_testing.gpus import RANKS_PER_GPU, gpu_ranks
from bmt_testing.loops import train_on_ranks, train_plain_loop, without_loop
from bmt_testing.outcome import RankFailure
from bmt_testing.pool import run_ranks
from bmt_testing.repeat_line import repeat_lines
from bmt_testing.report import compared_with, report_of
from bmt_testing.settings import DtypeName, TrainingSettings, arguments_of_axes
from bmt_testing.trainings import (
    OWN,
    PlainTraining,
    TrainingOfParts,
    require,
    values_of_parts,
)
from bmt_testing.user_model import UserModel

Reference = Literal["whole", "parts"]
"""What ranks are compared with: one process on the whole batch, or on the ranks' parts of it, one
by one.
"""

Values = Sequence[Mapping[str, torch.Tensor]]
"""For each rank, what it computes, by name."""

_ROUNDINGS = 2**14
"""By how many roundings of float64 a value may differ: what sums in another order, amplified by
some steps, explain.
"""

_ROUNDINGS_MEASURED = 16
"""By how many roundings of other dtypes, where the training in float64 says how far each value may
be off beyond that.
"""


def assert_matches_single(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    *,
    steps: int = 3,
    settings: TrainingSettings | None = None,
    reference: Reference = "whole",
    noise: bool = False,
    train: Callable[[nn.Module, Any, int, int], Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    pipeline: str | None = None,
    batch_dim: int = 0,
    device: str = "cpu",
    init: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
) -> None:
    """Raise AssertionError unless a training by ``settings`` equals that of one process in plain
    torch on the whole batch.

    Compared are the loss of every micro-batch, every gradient, the norm by which gradients are
    clipped, and every parameter and buffer after each of ``steps`` steps, on every rank. In float64
    they are equal but for the order of sums. In other dtypes a value may be off by a small multiple
    of what plain torch in that dtype is off from plain torch in float64; and if a difference may
    be rounding that the training has amplified, the same training in float64 decides.

    The functions are at the top level of a module, because every rank imports them. They take
    random numbers from torch's generator or from ``random``, which are seeded.

    ``model_fn()`` returns a model of plain torch, with what its dtype is left to ``settings``, and
    without dropout. ``batch_fn(seed)`` returns the batch of all ranks together: a tensor, a tuple
    of tensors for ``model(*batch)``, or a dict for ``model(**batch)``. Dim ``batch_dim`` is the
    batch; its rows are divided among the ranks that see different data. The model returns the loss,
    alone or as ``output.loss``; with ``loss_fn(output, batch)`` it may return anything. A loss that
    is a mean over tokens, of which ranks may have different numbers, is returned as a pair: the
    sum, and the number. Other losses must be the mean of the losses of the ranks' rows.

    ``reference="parts"`` declares a model that is meant to compute something else on the ranks'
    rows than on the whole batch, such as statistics of each rank: the one process takes the rows of
    each rank one by one, with buffers of their own, and the losses of each rank are compared, not
    their mean. ``noise=True`` declares a model that draws random numbers: the same, and the process
    draws the rows' numbers from the state that the rank's generator has.

    ``train(model, data, rank, ranks)`` is a loop of your own, in place of this function's:
    see :mod:`bmt_testing.loops`.

    ``parallelize(model)`` is called on every rank before the model is sharded, and returns the
    model; axes such as ``tp`` need it, and along an axis of size 1 it changes nothing: for example
    ``bmt_tp.parallelize``. ``pipeline`` names the list of layers, such as ``"layers"``, that
    becomes a ``PipelineTransformerBlockList`` for the axis ``pp``: an ``nn.Sequential``, or any
    module that calls its children one after the other and returns the result.
    ``optimizer_fn(parameters)`` returns an optimizer, in place of that of ``settings``. ``device``
    is "cpu" or "cuda", for the ranks and for plain torch. ``init`` has further arguments of
    ``init_distributed``.

    Raises ValueError for a model that is not deterministic, for functions that ranks cannot import,
    and for batches that ranks cannot share. Needs bmt-zero, and bmt-optim for summed gradients and
    for losses with numbers.
    """
    training = ComparedTraining(
        model_fn=model_fn,
        batch_fn=batch_fn,
        steps=steps,
        reference=reference,
        noise=noise,
        train=train,
        loss_fn=loss_fn,
        parallelize=parallelize,
        optimizer_fn=optimizer_fn,
        pipeline=pipeline,
        batch_dim=batch_dim,
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
    reference: Reference = "whole"
    noise: bool = False
    train: Callable[[nn.Module, Any, int, int], Any] | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    parallelize: Callable[[nn.Module], nn.Module] | None = None
    optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    pipeline: str | None = None
    batch_dim: int = 0
    device: str = "cpu"
    init: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.reference not in get_args(Reference):
            raise ValueError(
                f"reference must be one of {get_args(Reference)}, not {self.reference!r}."
            )
        others = ("loss_fn", "optimizer_fn", "noise")
        given = [name for name in others if getattr(self, name)]
        if self.train is not None and (given or self.reference != "whole"):
            raise ValueError(
                f"train= is the whole loop, which {', '.join(given) or 'reference'} cannot change."
                " Leave it out: the loop has its own losses, optimizers and batches."
            )

    def compare(self, settings: TrainingSettings) -> Counter[str]:
        """Do what :func:`assert_matches_single` does, and return how many numbers of each kind
        were compared.
        """
        settings = self.used(settings)
        self.check(settings)
        user = dataclasses.replace(self._user, counts=check_is_deterministic(self._user))
        comparison = _Comparison(
            user, self._grid(settings), self.steps, self._options(settings), self.timeout
        )
        try:
            report = comparison.report(settings)
        except RankFailure as failure:
            report = f"The ranks failed. {failure}"
        if report:
            raise AssertionError(f"{report}\n\n{self._repeat_lines(settings)}")
        return comparison.compared

    def used(self, settings: TrainingSettings) -> TrainingSettings:
        """Return ``settings``, but for those that a loop of the user's own decides."""
        return settings if self.train is None else without_loop(settings)

    def check(self, settings: TrainingSettings) -> None:
        """Raise the error of ranks, axes, functions or packages that ``settings`` would need and
        that are not there.
        """
        require("bmt-zero")
        _check_device(self.device, settings.ranks)
        _check_axes(settings, self._grid(settings), self._user)

    @property
    def compared_with(self) -> str:
        """What ranks are compared with, in words."""
        return compared_with(self._user)

    @property
    def _user(self) -> UserModel:
        return UserModel.of(
            **self._functions,
            pipeline=self.pipeline,
            batch_dim=self.batch_dim,
            of_parts=self.noise or self.reference == "parts",
            noise=self.noise,
        )

    @property
    def _functions(self) -> dict[str, Any]:
        names = ("model_fn", "batch_fn", "train", "loss_fn", "parallelize", "optimizer_fn")
        return {name: getattr(self, name) for name in names}

    def _grid(self, settings: TrainingSettings) -> Topology:
        return _grid(settings, self._options(settings))

    def _options(self, settings: TrainingSettings) -> dict[str, Any]:
        return _init_options(settings, self.device, self.init)

    def _repeat_lines(self, settings: TrainingSettings) -> str:
        names = ("reference", "noise", "pipeline", "batch_dim", "device", "init")
        default = {each.name: each.default for each in dataclasses.fields(self)} | {"init": {}}
        given = {name: getattr(self, name) for name in names}
        chosen = {name: value for name, value in given.items() if value != default[name]}
        return repeat_lines(self._functions, {"steps": self.steps, "settings": settings, **chosen})


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Trainings of one model on one grid, by settings that may differ in their dtype."""

    user: UserModel
    grid: Topology
    steps: int
    options: Mapping[str, Any]
    timeout: float
    compared: Counter[str] = dataclasses.field(default_factory=Counter)
    """How many numbers of each kind ranks have computed that were compared."""

    def report(self, settings: TrainingSettings) -> str:
        """Train both ways and return what differs by more than rounding, and if it is known, why;
        "" if nothing does.
        """
        dtype = getattr(torch, settings.dtype)
        expected = self._expected(self.user, settings, dtype)
        _check_is_finite(expected, settings)
        found = self._found(settings, dtype)
        unlike = self._unlike(self.user, settings, expected, found)
        for values in found:
            for name, value in _losses_of(values, own=self.user.of_parts).items():
                self.compared[_kind(name).partition(" ")[0]] += value.numel()
        if not unlike:
            return ""
        exact = _in_float64(settings)
        if settings != exact and self._may_be_rounding(unlike, _scales(expected)):
            return self.report(exact)
        parts = [report_of(unlike, settings, self.user), self._assumption(settings, found)]
        return "\n\n".join(filter(None, parts))

    def _may_be_rounding(self, unlike: list[Difference], scales: Mapping[str, float]) -> bool:
        if not self.user.noise:
            return may_be_rounding(unlike)
        # Torch draws other noise in other dtypes, so that nothing says how much is rounding. But
        # what is missing, not finite, or off by more than the largest value of its kind is none.
        return all(each.distance <= scales.get(_kind(each.name), 0.0) for each in unlike)

    def _assumption(self, settings: TrainingSettings, found: Values) -> str:
        """Return which assumption of data parallelism does not hold for the model, if that is why
        ranks have ``found`` something else; else "".
        """
        if self.user.of_parts or self.user.train is not None or self.grid.data_size == 1:
            return ""
        of_parts = dataclasses.replace(self.user, of_parts=True)
        expected = self._expected(of_parts, settings, getattr(torch, settings.dtype))
        if self._unlike(of_parts, settings, expected, found):
            return ""
        seeds = [
            settings.batch_seed(step, micro)
            for step in range(self.steps)
            for micro in range(settings.micro_batches)
        ]
        why = why_parts_differ(self.user, settings.seed, seeds, self.grid.data_size)
        return (
            "Ranks compute what one process computes that takes their rows one by one, so they"
            f" share the work rightly. {why}\nIf that is meant, declare it: reference='parts'."
        )

    def _unlike(
        self, user: UserModel, settings: TrainingSettings, expected: Values, found: Values
    ) -> list[Difference]:
        scales = _scales(expected)
        eps = _eps(settings, expected[0])
        return differences(
            expected,
            [_losses_of(values, own=user.of_parts) for values in found],
            floor=lambda name, value: eps * scales[_kind(name)],
            rounding=lambda: self._rounding(user, settings, expected),
            may_lack=self.grid.axis_size("pp") > 1,
        )

    def _found(self, settings: TrainingSettings, dtype: torch.dtype) -> Values:
        """Return what each rank computes."""
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
        return [dict(record.values) for record in records]

    def _expected(self, user: UserModel, settings: TrainingSettings, dtype: torch.dtype) -> Values:
        """Return what plain torch computes, for each rank, on a device of the ranks' kind: another
        kind would round otherwise.
        """
        device = torch.device(self.options["device"])
        if user.train is not None:
            return [self._of_plain_loop(settings, dtype)] * settings.ranks
        kind = TrainingOfParts if user.of_parts else PlainTraining
        training = kind(user, settings, self.grid.data_size, dtype, device)
        of_parts = values_of_parts(training.run(self.steps), self.grid.data_size)
        places = [self.grid.of_rank(rank) for rank in range(settings.ranks)]
        return [of_parts[place.data_rank] for place in places]

    def _of_plain_loop(
        self, settings: TrainingSettings, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """Return what the user's loop computes with the plain model; ValueError if it fails."""
        # One rank has no other axes.
        init = {k: v for k, v in self.options.items() if k not in _OF_SEVERAL_RANKS}
        arguments = (self.user, settings, dtype, init)
        try:
            (record,) = run_ranks(train_plain_loop, 1, *arguments, init=None, timeout=self.timeout)
        except RankFailure as failure:
            raise ValueError(f"The loop failed in one process of plain torch. {failure}") from None
        return dict(record.values)

    def _rounding(
        self, user: UserModel, settings: TrainingSettings, expected: Values
    ) -> Sequence[Mapping[str, float]]:
        if settings.computed_dtype == "float64" or user.noise:
            return [{} for _ in expected]
        exact = dataclasses.replace(settings, param_dtype=None)
        return rounding_of(expected, self._expected(user, exact, torch.float64))


def _losses_of(values: Mapping[str, torch.Tensor], *, own: bool) -> Mapping[str, torch.Tensor]:
    """Return ``values`` with one of the two kinds of losses that a rank notes."""
    owns = {name.removeprefix(OWN): loss for name, loss in values.items() if name.startswith(OWN)}
    others = {name: value for name, value in values.items() if not name.startswith(OWN)}
    return {**others, **owns} if own else others


_OF_SEVERAL_RANKS = ("shard_size", "optimizer_shards", "tp_size", "pipe_size", "axis_sizes")


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
    sizes = grid_sizes(axes, settings.ranks, settings.shard_size)
    return Topology(sizes, **kinds_of_axes(axes))


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
        if user.noise and (name == "pp" or name in grid.same_data_axes):
            raise ValueError(
                f"axes={dict(settings.axes)} splits a model along {name!r}, whose ranks draw random"
                " numbers for pieces of it, and noise=True compares those of whole calls: leave"
                f" {name!r} out of training_settings(axes=...)."
            )
        if name in grid.same_loss_axes and user.parallelize is None:
            raise ValueError(
                f"axes={dict(settings.axes)} splits the model along {name!r}, and the model does"
                f" not say how: pass parallelize=, a function that splits it, or leave {name!r} out"
                " of training_settings(axes=...)."
            )


def _check_is_finite(
    expected: Sequence[Mapping[str, torch.Tensor]], settings: TrainingSettings
) -> None:
    for name, value in expected[0].items():
        # A mask of attention is infinite, and the same on all ranks.
        is_wrong = value.isnan() if name.startswith("buffer ") else ~value.isfinite()
        if is_wrong.any():
            raise ValueError(
                f"{name} is not finite in plain torch with {settings!r}, so nothing can be"
                " compared. Give the model smaller values, or leave the dtype out of"
                " training_settings(dtypes=...)."
            )


def _in_float64(settings: TrainingSettings) -> TrainingSettings:
    """Return ``settings`` in float64; with a ``param_dtype`` that is not the same, in float32."""
    param_dtype: DtypeName | None = None if settings.param_dtype is None else "float32"
    return dataclasses.replace(settings, dtype="float64", param_dtype=param_dtype)


def _eps(settings: TrainingSettings, expected: Mapping[str, torch.Tensor]) -> float:
    """Return by how much values may differ, as a part of the largest one of their kind."""
    # Norms are float32, and so is what is clipped by them. Some models compute their loss in
    # float32, whatever their dtype, and its gradient comes of that.
    dtype = getattr(torch, settings.computed_dtype)
    losses = [value for name, value in expected.items() if _kind(name) == "loss"]
    is_float32 = settings.max_norm is not None or any(x.dtype == torch.float32 for x in losses)
    if dtype == torch.float64 and not is_float32:
        return _ROUNDINGS * torch.finfo(dtype).eps
    used = torch.float32 if dtype == torch.float64 else dtype
    return _ROUNDINGS_MEASURED * torch.finfo(used).eps


def _scales(expected: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the largest value of each kind: a gradient that is zero comes of terms that
    are not.
    """
    scales: dict[str, float] = {}
    # Most are the same on all ranks.
    values = {id(value): (name, value) for each in expected for name, value in each.items()}
    for name, value in values.values():
        finite = value[value.isfinite()]
        if finite.numel():
            kind = _kind(name)
            # Not in their dtype: booleans and the least integer have no absolute value.
            largest = float(comparable(finite).abs().max())
            scales[kind] = max(scales.get(kind, 0.0), largest)
    return scales


def _kind(name: str) -> str:
    """Return the kind of a value: a loss, gradient, norm, or parameter; of each buffer, and each
    result of a user's loop, its name.
    """
    words = name.split(" ")
    if words[0] in ("buffer", "result"):
        return name
    return words[0] if words[0] in ("loss", "gradient", "norm") else "parameter"
