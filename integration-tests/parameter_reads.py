"""Ways in which a program reads or writes parameters between ``step()`` and the next forward pass:
those that wait for an update beside it (``overlap_forward``), and those that do not.

The same for the CPU, where the host takes the part of the device, and for GPUs.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from offload_training import Gated
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bmt_checkpoint import load, load_checkpoint, save, save_checkpoint, wait_for_saves
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_optim.adam.update_plan import UpdateStream
from bmt_optim.offload.host_update import HostUpdate
from bmt_params import whole_parameters
from bmt_params.parameter import DistributedParameter
from bmt_zero import Block, BMTrainModelWrapper
from bmtrain.inspect import inspect_model

ADAM = {"lr": 0.1, "eps": 1e-3}
When = Literal["by default", "after wait()", "beside the next forward"]
# The last comes last: a GPU loads a kernel at its first use, and may wait for all streams then.
WHENS: tuple[When, ...] = ("by default", "after wait()", "beside the next forward")
Outcome = Literal[
    "as after the step",
    "as before the step",
    "neither",
    "nothing: the host was too slow, or waited for the update",
]
Values = list[torch.Tensor]


def plain_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(5))


def plain_values() -> tuple[Values, Values]:
    """Return the parameters before and after one step of plain torch."""
    model = plain_model()
    before = [p.detach().clone() for p in model.parameters()]
    model(batch()).square().mean().backward()
    torch.optim.Adam(model.parameters(), **ADAM).step()
    return before, [p.detach() for p in model.parameters()]


def sharded_model() -> nn.Module:
    first, second, activation, last = plain_model().to(runtime.current().device)
    # On one rank, parameters outside of Blocks are updated before step() returns.
    outside = first if runtime.world_size() > 1 else Block(first)
    return BMTrainModelWrapper(nn.Sequential(outside, Block(second), activation, Block(last)))


class LateHost(Gated):
    """The host begins a step when somebody waits for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate = threading.Event()
        super().__init__(*arguments, **options)

    def has_begun(self) -> bool:
        return self.gate.is_set()

    def _prepare(self, *arguments: Any) -> HostUpdate:
        update = super()._prepare(*arguments)
        update.is_over = _OpensWhenAwaited(self.gate)
        return update


class _OpensWhenAwaited(threading.Event):
    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def wait(self, timeout: float | None = None) -> bool:
        self._gate.set()
        return super().wait(timeout)


class LateStream(AdamOptimizer):
    """Updates on the stream beside the forward begin about a quarter of a second late."""

    _stream: _SlowStream

    def _reset(self) -> None:
        super()._reset()
        self._stream = _SlowStream()

    def has_begun(self) -> bool:
        return self._stream.delay.query()


class _SlowStream(UpdateStream):
    delay: torch.cuda.Event

    def begin(self, device: torch.device) -> None:
        super().begin(device)
        with torch.cuda.stream(self._streams[device]):
            torch.cuda._sleep(500_000_000)
        self.delay = self._streams[device].record_event()


@dataclass
class Training:
    """A model after backward, before its first step, and what the program made of it so far."""

    kind: type[LateHost | LateStream]
    when: When
    folder: str
    model: nn.Module = field(init=False)
    kept: Any = None

    def __post_init__(self) -> None:
        self.model = sharded_model()
        chosen = {} if self.when == "by default" else {"overlap_forward": True}
        self.optimizer = self.kind(self.model.parameters(), **ADAM, **chosen)
        self.manager = OptimManager()
        self.manager.add_optimizer(self.optimizer)
        if self.when == "after wait()":  # before other hooks, which may read
            self.optimizer.register_step_post_hook(lambda *arguments: self.optimizer.wait())
        self.manager.backward(self.forward().square().mean())

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    def forward(self) -> torch.Tensor:
        rows = 4 // runtime.world_size()
        mine = batch()[runtime.rank() * rows :][:rows]
        output: torch.Tensor = self.model(mine.to(runtime.current().device))
        return output


@dataclass(frozen=True, kw_only=True)
class Way:
    """``use`` returns something of each parameter, in order: ``of`` this rank's part, or of the
    whole parameter. If it ``writes``, the parameters themselves count, after all updates.

    ``prepare`` makes, before the step, what is kept in the program.
    """

    use: Callable[[Training], Iterable[Any]]
    of: Callable[[torch.Tensor], Any] = lambda value: value
    prepare: Callable[[Training], Any] = lambda training: None
    is_whole: bool = False
    writes: bool = False


def each(read: Callable[[Any], Any], **options: Any) -> Way:
    """Return the way that calls ``read`` for each parameter."""
    return Way(use=lambda training: [read(p) for p in training.parameters], **options)


def keeping(made: Callable[[Any], torch.Tensor]) -> Way:
    """Return the way that reads what was ``made`` of each parameter before the step."""
    return Way(
        prepare=lambda training: [made(p) for p in training.parameters],
        use=lambda training: training.kept,
    )


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved(training: Training, write: Callable[[str], object], read: Callable[..., object]) -> Any:
    """Return the parameters of another model that reads what ``write`` has written."""
    file = str(Path(training.folder) / "saved")
    write(file)
    wait_for_saves()
    other = sharded_model()
    read(file, other)
    return other.parameters()


def through_checkpoint(training: Training, **options: Any) -> Any:
    return saved(
        training,
        lambda folder: save_checkpoint(folder, training.model, training.manager, **options),
        load_checkpoint,
    )


def whole(training: Training) -> Values:
    with whole_parameters(training.model):
        return [p.detach().clone() for p in training.parameters]


def show_to_hooks(training: Training) -> list[Any]:
    """Have a hook of each layer show the parameters that it sees in the forward."""
    shown: list[Any] = []
    for layer in training.model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(
                lambda module, inputs: shown.extend([module.weight.clone(), module.bias.clone()])
            )
    return shown


def show_to_a_callback(training: Training) -> list[Any]:
    shown: list[Any] = []
    training.optimizer.register_step_post_hook(
        lambda *arguments: shown.extend(p.detach().clone() for p in training.parameters)
    )
    return shown


def update_average(training: Training) -> Any:
    training.kept.update_parameters(training.model)
    return training.kept.module.parameters()


def writing(write: Callable[[Any], object], **options: Any) -> Way:
    """Return the way that calls ``write`` for each parameter."""

    def use(training: Training) -> None:
        with torch.no_grad():
            for p in training.parameters:
                write(p)

    return Way(use=use, writes=True, **options)


def fill_whole(training: Training) -> None:
    with whole_parameters(training.model), torch.no_grad():
        for p in training.parameters:
            p.fill_(1)


def loading(write: Callable[..., object], read: Callable[..., object]) -> Way:
    """Return the way that loads ones, which another model has saved before the step."""

    def prepare(training: Training) -> str:
        other, file = sharded_model(), str(Path(training.folder) / "ones")
        with torch.no_grad():
            for p in other.parameters():
                p.fill_(1)
        write(other, file)
        return file

    return Way(
        prepare=prepare,
        use=lambda training: read(training.model, training.kept),
        of=torch.ones_like,
        writes=True,
    )


WAITS: dict[str, Way] = {
    "p.data": each(lambda p: p.data),
    "p.gather()": each(lambda p: p.gather(), is_whole=True),
    "p.gather_all()": each(lambda p: p.gather_all(), is_whole=True),
    "torch.save(p)": each(through_file),
    "copy.deepcopy(p)": each(copy.deepcopy),
    "copy.deepcopy(model)": Way(use=lambda t: copy.deepcopy(t.model).parameters()),
    "AveragedModel(model)": Way(use=lambda t: AveragedModel(t.model).module.parameters()),
    "model.state_dict()": Way(use=lambda t: t.model.state_dict().values(), is_whole=True),
    "torch.save(model.state_dict())": Way(
        use=lambda t: through_file(t.model.state_dict()).values(), is_whole=True
    ),
    "bmt.save": Way(
        use=lambda t: saved(t, lambda file: save(t.model, file), lambda file, m: load(m, file))
    ),
    "bmt.save_checkpoint": Way(use=through_checkpoint),
    "bmt.save_checkpoint(non_blocking=True)": Way(
        use=lambda t: through_checkpoint(t, non_blocking=True)
    ),
    "bmt.whole_parameters": Way(use=whole, is_whole=True),
    "bmt.inspect.inspect_model": Way(
        use=lambda t: [row["max"] for row in inspect_model(t.model, "*")],
        of=torch.max,
        is_whole=True,
    ),
    "a layer's hook in the forward": Way(
        prepare=show_to_hooks, use=lambda t: (t.forward(), t.kept)[1], is_whole=True
    ),
    "model.load_state_dict": Way(
        use=lambda t: t.model.load_state_dict(
            {name: torch.ones(p.full_shape) for name, p in t.model.named_parameters()}
        ),
        of=torch.ones_like,
        writes=True,
    ),
    "bmt.load": loading(save, load),
    "bmt.load_checkpoint": loading(
        lambda model, folder: save_checkpoint(folder, model),
        lambda model, folder: load_checkpoint(folder, model),
    ),
    "p.data.fill_(1)": writing(lambda p: p.data.fill_(1), of=torch.ones_like),
    "p.fill_(1) in bmt.whole_parameters": Way(use=fill_whole, of=torch.ones_like, writes=True),
}

DOES_NOT_WAIT: dict[str, Way] = {
    "p.detach().norm()": each(lambda p: p.detach().norm(), of=torch.norm),
    "p.detach()": each(lambda p: p.detach()),
    # An index into a part raises.
    "p[:1]": each(
        lambda p: p[:1] if p.is_indexable else p.detach()[:1], of=lambda v: v.flatten()[:1]
    ),
    "p.tolist()": each(lambda p: p.tolist()),
    "p.detach().cpu().numpy()": each(lambda p: p.detach().cpu().numpy()),
    "p.cpu()": each(lambda p: p.cpu()),
    "p.double()": each(lambda p: p.double().float()),
    "parameters_to_vector": each(lambda p: nn.utils.parameters_to_vector([p])),
    "average.lerp_(p, 0.5)": each(
        lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.5), of=lambda v: v * 0.5
    ),
    "AveragedModel.update_parameters": Way(
        prepare=lambda t: AveragedModel(t.model), use=update_average
    ),
    "a hook after the step": Way(prepare=show_to_a_callback, use=lambda t: t.kept),
    "a kept p.data": keeping(lambda p: p.data),
    "a kept p.detach()": keeping(lambda p: p.detach()),
    "a kept view of other libraries": keeping(lambda p: torch.from_dlpack(p.detach())),
    "p.mul_(0.5)": writing(lambda p: p.mul_(0.5), of=lambda v: v * 0.5),
}
WAYS = {**WAITS, **DOES_NOT_WAIT}


def outcomes(kind: type[LateHost | LateStream], folder: str) -> dict[str, dict[When, Outcome]]:
    """Return what comes of each way, whenever it is used; ``folder`` is empty."""
    return {
        name: {when: outcome(kind, name, when, f"{folder}/{name}, {when}") for when in WHENS}
        for name in WAYS
    }


def expected(name: str) -> dict[When, Outcome]:
    """Return what comes of a way."""
    late: Outcome = "as after the step"
    if name in DOES_NOT_WAIT:
        # An update goes on from what was written, or overwrites it.
        late = "neither" if DOES_NOT_WAIT[name].writes else "as before the step"
    return {
        "by default": "as after the step",
        "after wait()": "as after the step",
        "beside the next forward": late,
    }


def outcome(kind: type[LateHost | LateStream], name: str, when: When, folder: str) -> Outcome:
    """Take a step, read or write the parameters, and return whose values the program has found.

    An update beside the next forward shows nothing if it began before a read that waits for it, or
    before the end of one that does not.
    """
    way, training = WAYS[name], Training(kind, when, folder)
    training.kept = way.prepare(training)
    training.optimizer.step()
    is_beside = when == "beside the next forward"
    began_early = is_beside and training.optimizer.has_begun()
    try:
        used = way.use(training)
        found = [] if way.writes else _values(used)
        if name in DOES_NOT_WAIT:
            began_early = is_beside and training.optimizer.has_begun()
    finally:
        training.optimizer.wait()
    if began_early:
        return "nothing: the host was too slow, or waited for the update"
    if way.writes:
        found = _values(training.parameters)
    before, after = (
        [
            way.of(_compared(p, value, way))
            for p, value in zip(training.parameters, values, strict=True)
        ]
        for values in plain_values()
    )
    if _are_close(found, after):
        return "as after the step"
    return "as before the step" if _are_close(found, before) else "neither"


def _values(used: Iterable[Any]) -> Values:
    return [torch.as_tensor(value).detach().cpu().clone().flatten() for value in used]


def _compared(p: DistributedParameter, value: torch.Tensor, way: Way) -> torch.Tensor:
    return value if way.is_whole else p.local_part(value).flatten()


def _are_close(found: Values, expected: Values) -> bool:
    # Ranks add gradients in another order than one process; a step moves each element by about 0.1.
    return all(
        a.shape == b.flatten().shape and torch.allclose(a, b.flatten(), rtol=1e-4, atol=1e-4)
        for a, b in zip(found, expected, strict=True)
    )
