"""One training of a user's model: by one process in plain torch, or by the ranks of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from bmt_core.errors import ConfigError
from bmt_core.packages import PACKAGES
from bmt_testing.comparison import Record
from bmt_testing.settings import TrainingSettings
from bmt_testing.user_model import Batch, BatchLoss, UserModel

if TYPE_CHECKING:
    from bmt_params.parameter import DistributedParameter


class Training:
    """The steps that both trainings take. ``data_size`` is the number of ranks that see
    different data.
    """

    def __init__(
        self,
        user: UserModel,
        settings: TrainingSettings,
        data_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.user, self.settings, self.data_size, self.dtype = user, settings, data_size, dtype
        self.record = Record()
        self.make(settings.seed)

    def make(self, seed: int) -> None:
        """Make the model, with values of ``seed``, and its optimizer."""
        plain = self.user.model(seed, self.dtype).train()
        self.names = [name for name, _ in plain.named_parameters()]
        self.model = self.build(plain)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = self.make_optimizer()

    def run(self, steps: int) -> Record:
        """Take ``steps`` steps."""
        for step in range(steps):
            self.step(step)
            if step == 0 and self.settings.reload:
                self.reload()
                self.note_parameters("after loading step 0")
        return self.record

    def step(self, step: int) -> None:
        """Take a step, and note what it computes."""
        self.optimizer.zero_grad()
        frozen = {self.names[n] for n in self.settings.frozen_in(step, len(self.names))}
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in frozen)
        for micro in range(self.settings.micro_batches):
            seed = self.settings.batch_seed(step, micro)
            batch = self.user.batch(seed, self.dtype, self.device)
            parts = self.user.parts(batch, self.data_size)
            is_last = micro == self.settings.micro_batches - 1
            with nullcontext() if is_last else self.holding():
                self.micro_batch(f"loss of micro-batch {micro} in step {step}", batch, parts)
        self.complete()
        self.note(
            [
                (f"gradient of {name} in step {step}", parameter, parameter.grad)
                for name, parameter in self.parameters.items()
                if parameter.grad is not None
            ]
        )
        if self.settings.max_norm is not None:
            self.record.add(
                f"norm of the gradients in step {step}", self.clip(self.settings.max_norm)
            )
        self.update()
        self.note_parameters(f"after step {step}")
        for label, name, buffer in self.buffers():
            self.record.add(f"{label}buffer {name} after step {step}", buffer)

    def note_parameters(self, when: str) -> None:
        """Note all parameters."""
        self.note([(f"{name} {when}", p, p.detach()) for name, p in self.parameters.items()])

    def note(self, values: Sequence[tuple[str, nn.Parameter, torch.Tensor]]) -> None:
        """Note the wholes of named tensors, each of which lies like its parameter."""
        wholes = self.wholes([(parameter, tensor) for _, parameter, tensor in values])
        for (name, *_), whole in zip(values, wholes, strict=True):
            self.record.add(name, whole)

    def build(self, model: nn.Module) -> nn.Module:
        """Return the model that is trained."""
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        parameters = list(self.model.parameters())
        if self.user.optimizer_fn is not None:
            made: torch.optim.Optimizer = self.user.optimizer_fn.resolve()(parameters)
            return made
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.8)
        # A larger eps than the default, so that gradients which are nothing but rounding
        # change little.
        return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.9), eps=1e-3)

    def holding(self) -> AbstractContextManager[Any]:
        """Inside, gradients may stay on the rank."""
        return nullcontext()

    def micro_batch(self, name: str, batch: Batch, parts: list[Batch]) -> None:
        """Compute the gradients of ``batch``, of which ranks have ``parts``, and note its loss."""
        raise NotImplementedError

    def complete(self) -> None:
        """Make gradients as complete as those of Blocks."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip gradients and return their norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def reload(self) -> None:
        """Save the training, and load it into a new model with a new optimizer."""

    def wholes(self, values: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the wholes of tensors, each of which lies like its parameter."""
        return [tensor for _, tensor in values]

    def buffers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """Return a label, the name and the value of each buffer."""
        return (("", name, buffer) for name, buffer in sorted(self.model.named_buffers()))


class PlainTraining(Training):
    """The training by one process in plain torch, on the whole batch of all ranks."""

    def build(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        self.called: set[nn.Module] = set()
        self.layers = _layers(model, self.user.pipeline)
        for layer in self.layers:
            layer.register_forward_hook(lambda module, *_: self.called.add(module))
        self.count: torch.Tensor | float = 0  # of the step's tokens
        if self.settings.param_dtype is not None:
            self.layers_cast_arguments(model, getattr(torch, self.settings.param_dtype))
        return model

    def layers_cast_arguments(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Have the layers cast their arguments to ``dtype``, and the model too, if it has
        parameters that are in no layer.
        """
        inside = {id(p) for layer in self.layers for p in layer.parameters()}
        has_others = any(id(p) not in inside for p in model.parameters())
        for module in {*self.layers, *([model] if has_others else [])}:
            module.register_forward_pre_hook(
                lambda _, *arguments: tree_map(partial(_cast, dtype), arguments), with_kwargs=True
            )

    def loss(self, batch: Batch) -> BatchLoss:
        """Return the loss of ``batch``, computed with parameters that are cast to ``param_dtype``
        as part of the graph, if there is one.
        """
        if self.settings.param_dtype is None:
            return self.user.loss(self.model, batch)
        with _cast_parameters(self.model, getattr(torch, self.settings.param_dtype)):
            return self.user.loss(self.model, batch)

    def micro_batch(self, name: str, batch: Batch, parts: list[Batch]) -> None:
        loss = self.loss(batch)
        self.record.add(name, loss.mean)
        self.backward(loss, 1)

    def backward(self, loss: BatchLoss, parts: int) -> None:
        """Compute the gradients of ``loss``, that of one of ``parts`` of a batch."""
        if loss.count is None:
            total = loss.total / (parts * self.settings.micro_batches)
        else:
            total, self.count = loss.total, self.count + loss.count
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]

    def complete(self) -> None:
        """Divide by the number of tokens, and give zeros to parameters that a called Block did not
        use: see the README of bmt-zero.
        """
        homes = [{id(p) for p in layer.parameters()} for layer in self.layers]
        shared = {one for home in homes for one in home if sum(one in other for other in homes) > 1}
        used = {id(p) for layer in self.called for p in layer.parameters()} - shared
        count, self.count = self.count, 0
        for parameter in self.model.parameters():
            if parameter.grad is None and parameter.requires_grad and id(parameter) in used:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None and self.user.counts:
                parameter.grad /= count
        self.called.clear()


class TrainingOfParts(PlainTraining):
    """The training by one process in plain torch, which takes the ranks' parts of a batch one by
    one.

    The loss of a batch is the mean of those of the parts. Each part has buffers and random numbers
    of its own, as every rank has, and begins a call with the first part's statistics of norms and
    other written buffers: see [Note: rank 0's buffers] in :mod:`bmt_zero.written_buffers`. Names of
    values that differ from part to part begin with the part's number: see :func:`values_of_parts`.
    """

    def build(self, model: nn.Module) -> nn.Module:
        model = super().build(model)
        self.places = [
            (module._buffers, name) for module in model.modules() for name in module._buffers
        ]
        self.give_to_all_parts([holder[name] for holder, name in self.places])
        self.written = _written(model)
        return model

    def micro_batch(self, name: str, batch: Batch, parts: list[Batch]) -> None:
        for own in self.of_parts[1:]:
            for index, is_written in enumerate(self.written):
                first = self.of_parts[0][index]
                own[index] = first.clone() if is_written and first is not None else own[index]
        for number, part in enumerate(parts):
            with self.buffers_of(number), self.user.noise_of(name, number):
                loss = self.loss(part)
            self.record.add(f"{number}|{name}", loss.mean)
            self.backward(loss, self.data_size)

    def give_to_all_parts(self, buffers: Sequence[torch.Tensor | None]) -> None:
        """Let every part begin with ``buffers``. Shared ones stay shared."""
        self.of_parts = []
        for _ in range(self.data_size):
            clones = {id(b): None if b is None else b.clone() for b in buffers}
            self.of_parts.append([clones[id(b)] for b in buffers])

    def reload(self) -> None:
        """Nothing changes but the buffers: a checkpoint has those of rank 0."""
        self.give_to_all_parts(self.of_parts[0])

    @contextmanager
    def buffers_of(self, part: int) -> Iterator[None]:
        """Inside, the model has the buffers of ``part``, and may change them."""
        for (holder, name), buffer in zip(self.places, self.of_parts[part], strict=True):
            holder[name] = buffer
        yield
        self.of_parts[part] = [holder[name] for holder, name in self.places]

    def buffers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        for number in range(self.data_size):
            with self.buffers_of(number):
                for name, buffer in sorted(self.model.named_buffers()):
                    yield f"{number}|", name, buffer


@contextmanager
def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    slots = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    cast = {id(parameter): _cast(dtype, parameter) for _, _, parameter in slots}
    try:
        for holder, name, parameter in slots:
            holder[name] = cast[id(parameter)]
        yield
    finally:
        for holder, name, parameter in slots:
            holder[name] = parameter


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def values_of_parts(record: Record, data_size: int) -> list[dict[str, torch.Tensor]]:
    """Return what a training in plain torch expects of the ranks with each part of the data, by
    name.
    """
    of_parts: list[dict[str, torch.Tensor]] = [{} for _ in range(data_size)]
    for name, value in record.values:
        number, bar, own = name.partition("|")
        for part, values in enumerate(of_parts):
            if not bar:
                values[name] = value
            elif int(number) == part:
                values[own] = value
    return of_parts


OWN = "own "
"""How names of losses of a rank's own rows begin; others are means over all ranks."""


class ShardedTraining(Training):
    """The training by the ranks of this run. ``directory`` is for its checkpoints."""

    def __init__(
        self, user: UserModel, settings: TrainingSettings, dtype: torch.dtype, directory: str
    ) -> None:
        from bmt_core.run.runtime import current

        self.topology = current().topology
        self.directory = directory
        super().__init__(user, settings, self.topology.data_size, dtype, current().device)

    def wrapped(self, seed: int) -> nn.Module:
        """Return the wrapped model, with values of ``seed``."""
        # Rank 0 says what it starts and wraps, which is told once and not for every example.
        with redirect_stdout(StringIO()):
            return self.build(self.user.model(seed, self.dtype).train())

    def make(self, seed: int) -> None:
        with redirect_stdout(StringIO()):
            super().make(seed)
        has_manager = self.settings.gradients == "sum" or self.user.counts
        self.manager = _manager() if has_manager else None
        if self.manager is not None:
            self.manager.add_optimizer(self.optimizer)

    def reload(self) -> None:
        checkpoint = require("bmt-checkpoint")
        checkpoint.save_checkpoint(self.directory, self.model, self.manager or self.optimizer)
        self.make(self.settings.seed + 1)  # with other values
        checkpoint.load_checkpoint(self.directory, self.model, self.manager or self.optimizer)

    def build(self, model: nn.Module) -> nn.Module:
        zero = require("bmt-zero")
        if self.user.parallelize is not None:
            model = self.user.parallelize.resolve()(model)
        layers = _layers(model, self.user.pipeline)
        shared = _shared_with_others(model, layers)
        stages = self.topology.axis_size("pp")
        for number, layer in enumerate(layers):
            # Else the wrapper, which sees the whole model, makes the Block.
            if layer not in shared or stages > 1:
                self._make_block(layer, number, mode="PIPE" if stages > 1 else "BLOCK")
        if stages > 1:
            assert self.user.pipeline is not None
            path, _, name = self.user.pipeline.rpartition(".")
            pipelined = require("bmt-pipeline").PipelineTransformerBlockList(layers)
            setattr(model.get_submodule(path), name, pipelined)
        wrapped: nn.Module = zero.BMTrainModelWrapper(model, param_dtype=self.param_dtype)
        for number, layer in enumerate(layers):
            if layer in shared:
                layer.gradient_checkpointing = self.settings.is_recomputed(number)  # type: ignore[assignment]
        return wrapped

    def _make_block(self, layer: nn.Module, number: int, mode: str) -> None:
        level, recomputes = self.settings.level_of(number), self.settings.is_recomputed(number)
        keep = self.settings.keep if recomputes else None
        require("bmt-zero").Block(
            layer,
            use_checkpoint=recomputes,
            zero_level=level,
            mode=mode,
            param_dtype=self.param_dtype,
            keep=keep,
        )

    @property
    def param_dtype(self) -> torch.dtype | None:
        name = self.settings.param_dtype
        return None if name is None else getattr(torch, name)

    def holding(self) -> AbstractContextManager[Any]:
        if not self.settings.no_sync:
            return nullcontext()
        held: AbstractContextManager[Any] = require("bmt-zero").no_sync(self.model)
        return held

    def micro_batch(self, name: str, batch: Batch, parts: list[Batch]) -> None:
        rank = self.topology.data_rank
        with self.user.noise_of(name, rank):
            loss = self.user.loss(self.model, parts[rank])
        self.record.add(f"{OWN}{name}", loss.mean)
        self.record.add(name, self.mean_of_ranks(loss))
        if self.manager is None:
            (loss.total / self.settings.micro_batches).backward()  # type: ignore[no-untyped-call]
        elif loss.count is None:
            self.manager.backward(loss.total / self.settings.micro_batches)
        else:
            self.manager.backward(loss.total, count=loss.count)

    def complete(self) -> None:
        if self.manager is not None and self.user.counts:
            self.manager.unscaled_gradients(self.parameters.values())

    def mean_of_ranks(self, loss: BatchLoss) -> torch.Tensor:
        """Return the mean loss of the whole batch. Collective."""
        from bmt_core import mean_loss

        with torch.no_grad():
            return mean_loss(loss.total.detach(), loss.count)

    def clip(self, max_norm: float) -> torch.Tensor:
        assert self.manager is not None
        norm: torch.Tensor = self.manager.clip_grad_norm(self.model.parameters(), max_norm)
        return norm

    def update(self) -> None:
        (self.optimizer if self.manager is None else self.manager).step()

    def wholes(self, values: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[torch.Tensor]:
        from bmt_params.shard import assemble_all

        # All are, once the model is wrapped.
        sharded: list[tuple[DistributedParameter, torch.Tensor]] = values  # type: ignore[assignment]
        for parameter, _ in sharded:
            parameter.wait_for_updates()
        # Most of a small training's calls would be these, one for each parameter.
        wholes = iter(assemble_all([(p._shard, t) for p, t in sharded if not p.cuts]))
        return [p.gather_all_like(t) if p.cuts else next(wholes) for p, t in sharded]

    def buffers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """Return the buffers, except those of layers on stages, which see the data of a
        whole pipeline.
        """
        is_pipelined = self.topology.axis_size("pp") > 1
        for name, buffer in sorted(self.model.named_buffers()):
            if not (is_pipelined and name.startswith(f"{self.user.pipeline}.")):
                yield "", name, buffer


@contextmanager
def started(init: Mapping[str, Any]) -> Iterator[None]:
    """Start a run with ``init_distributed(**init)``, and inside leave out a warning that is true of
    plain torch, too. Collective.
    """
    from bmt_core.run.runtime import init_distributed

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\w+ steps \d+ parameters of \w+ itself", UserWarning)
        with redirect_stdout(StringIO()):  # rank 0 says what it starts
            init_distributed(**init)
        yield


def require(distribution: str, who: str = "This training on ranks") -> Any:
    """Return the module of the package ``distribution``; :class:`ConfigError` if it is not
    installed, which says ``who`` needs it.
    """
    package = PACKAGES[distribution]
    if find_spec(package.module) is None:
        raise ConfigError(
            f"{who} needs {distribution}, which is not installed. Install it with:"
            f" {package.install}"
        )
    return import_module(package.module)


def _manager() -> Any:
    return require("bmt-optim").OptimManager()


def _layers(model: nn.Module, pipeline: str | None) -> list[nn.Module]:
    """Return the modules that become Blocks, each once: the members of ``pipeline``, or what the
    wrapper finds.
    """
    if pipeline is not None:
        return list(model.get_submodule(pipeline).children())
    require("bmt-zero")
    from bmt_zero.model_layers import layers_of

    return layers_of(model)


def _written(model: nn.Module) -> list[bool]:
    """Return, for each buffer of each module, whether its forward is known to write it."""
    require("bmt-zero")
    from bmt_zero.written_buffers import written_names

    return [name in written_names(m) for m in model.modules() for name in m._buffers]


def _shared_with_others(model: nn.Module, layers: list[nn.Module]) -> set[nn.Module]:
    """Return those of ``layers`` that share a parameter with another one, or with the model outside
    of them.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = {
        id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values()
    }
    homes = [{id(p) for p in layer.parameters()} for layer in layers]
    return {
        layer
        for layer, home in zip(layers, homes, strict=True)
        if home & outside or sum(bool(home & other) for other in homes) > 1
    }
