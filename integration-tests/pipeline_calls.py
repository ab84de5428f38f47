"""Calls of a pipelined list of layers in all forms, and the same calls of the plain layers in
one process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import full_gradient

from bmt_core.run.runtime import current
from bmt_params.modules.layer_list import LayerList
from bmt_params.nested import map_tensors, tensors_in
from bmt_pipeline import PipelineTransformerBlockList
from bmt_zero import Block

WIDTH, LENGTH, ROWS = 6, 3, 4

Call = tuple[tuple[Any, ...], dict[str, Any]]


def drawn(rank: int, step: int, *shape: int, number: int = 0, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    return made.requires_grad_() if grad else made


class Mlp(nn.Module):
    """Takes whatever extras there are, and uses every tensor in them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 7).double(), nn.Linear(7, WIDTH, bias=False).double()

    def forward(self, x: torch.Tensor, *extras: Any, **options: Any) -> torch.Tensor:
        for extra in tensors_in((extras, options)):
            x = x * (1 + 0.1 * torch.tanh(extra.double()))
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Recomputed(Mlp):
    """Recomputes a part of itself."""

    def forward(self, x: torch.Tensor, *extras: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, *extras, use_reentrant=False, **options)
        return out


class Two(Mlp):
    """Passes on two hidden states, of which the second is a counter, a constant of another dtype,
    or a state.
    """

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x, second)
        if second.dtype == torch.int64:
            return out, second + 1
        return out, second if second.dtype == torch.float32 else second + 0.5 * out


class Turning(Mlp):
    """Passes on complex numbers beside the hidden state."""

    def forward(self, x: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x, turned.real)
        return out, (turned * torch.exp(1j * out)).conj()


class OptionalState(Mlp):
    """Its second hidden state is None, or a dict."""

    def forward(self, x: torch.Tensor, second: Any) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        out = super().forward(x, second)
        return out, second and {"count": second["count"], "sum": second["sum"] + out}


class Modal(Two):
    """Its second hidden state is in the graph only in training."""

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, second = super().forward(x, second)
        return out, second if self.training else second.detach()


class Writing(Mlp):
    """Writes to its second argument, which all rows share."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        shift += 1
        return super().forward(x, shift)


def plain_call(rank: int, step: int) -> Call:
    return (drawn(rank, step, ROWS, LENGTH, WIDTH, grad=True),), {}


def extras_call(rank: int, step: int) -> Call:
    """Masks of each rank, nested and by name, with gradients and without, and what all rows of a
    rank share.
    """
    shape = ROWS, LENGTH, WIDTH
    mask = drawn(rank, step, *shape, number=1) > 0
    shared = drawn(rank, step, LENGTH, WIDTH, number=2, grad=True)
    nested = {
        "bias": [drawn(rank, step, *shape, number=3, grad=True), None],
        "scale": drawn(rank, step, number=4),
    }
    by_name = {"rows": drawn(rank, step, ROWS, 1, 1, number=5), "nothing": None}
    return (drawn(rank, step, *shape, grad=True), mask, None, nested, shared), by_name


def sequence_first_call(rank: int, step: int) -> Call:
    return (
        drawn(rank, step, LENGTH, ROWS, WIDTH, grad=True),
        drawn(rank, step, ROWS, WIDTH, number=1, grad=True),
    ), {}


def ambiguous_call(rank: int, step: int) -> Call:
    """The second extra has as many rows as the batch has, and belongs to all of them."""
    x = drawn(rank, step, ROWS, ROWS, WIDTH, grad=True)
    of_all = drawn(rank, step, ROWS, WIDTH, number=2)
    return (x, drawn(rank, step, ROWS, 1, 1, number=1), of_all), {"batch_related": [0]}


def none_related_call(rank: int, step: int) -> Call:
    """All extras belong to all rows, by position and by name, though they have as many rows as the
    batch has.
    """
    x, table = (
        drawn(rank, step, ROWS, ROWS, WIDTH, grad=True),
        drawn(rank, step, ROWS, WIDTH, number=1, grad=True),
    )
    return (x, table), {
        "by_name": drawn(rank, step, ROWS, 1, number=2, grad=True),
        "batch_related": [],
    }


def named_call(rank: int, step: int) -> Call:
    """Of what is passed by name, too, only a part has the batch as dim 0."""
    x, table = (
        drawn(rank, step, ROWS, ROWS, WIDTH, grad=True),
        drawn(rank, step, ROWS, WIDTH, number=1, grad=True),
    )
    mask, other = (
        drawn(rank, step, ROWS, 1, 1, number=2, grad=True),
        drawn(rank, step, ROWS, 1, 1, number=3),
    )
    return (x, table, other), {"table": table, "mask": mask, "batch_related": [1, "mask"]}


def declared_call(rank: int, step: int) -> Call:
    """The list has the declaration."""
    args, kwargs = named_call(rank, step)
    return args, {name: value for name, value in kwargs.items() if name != "batch_related"}


def changing_call(rank: int, step: int) -> Call:
    length = [3, 5, 3, 1][step % 10]
    return (drawn(rank, step, ROWS, length, WIDTH, grad=step != 2),), {}


def two_call(second: Callable[[int, int], Any], **options: Any) -> Callable[[int, int], Call]:
    return lambda rank, step: (
        (drawn(rank, step, ROWS, LENGTH, WIDTH, grad=True), second(rank, step)),
        options,
    )


def counters(rank: int, step: int) -> torch.Tensor:
    return torch.full((ROWS, 1, 1), rank + step)


def constants(rank: int, step: int) -> torch.Tensor:
    return drawn(rank, step, ROWS, LENGTH, WIDTH, number=1).float()


def states(rank: int, step: int) -> torch.Tensor:
    return drawn(rank, step, ROWS, LENGTH, WIDTH, number=1, grad=True)


def complex_numbers(rank: int, step: int) -> torch.Tensor:
    return torch.polar(*states(rank, step).detach().expand(2, -1, -1, -1)).conj().requires_grad_()


def optional_states(rank: int, step: int) -> Any:
    return {"count": step, "sum": states(rank, step)} if step else None


@dataclass(frozen=True)
class Case:
    """What is called how. ``wrap`` makes the members of the pipelined list out of the layers."""

    call: Callable[[int, int], Call] = plain_call
    layer: type[nn.Module] = Mlp
    layers: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[list[nn.Module]], Iterable[Any]] = list
    edit: Callable[[Any, int], None] = lambda layers, step: None
    look: bool = False
    calls: int = 1
    steps: int = 3


def levels(layers: list[nn.Module]) -> list[nn.Module]:
    return [
        Block(layer, number % 2 == 0, number % 4, mode="PIPE")
        for number, layer in enumerate(layers)
    ]


def unfrozen_later(layers: Any, step: int) -> None:
    """Frozen is the first half in step 0, all in step 1, and the last in step 2."""
    for name, parameter in layers.named_parameters():
        number = int(name.split(".")[0])
        parameter.requires_grad_((number >= 3, False, number < 4)[step])


def ties(layers: list[nn.Module]) -> list[nn.Module]:
    return [layers[0], layers[0], *layers[2:]]


CASES = {
    "plain": Case(),
    "hidden states": Case(
        two_call(states, return_hidden_states=True), Two, options={"num_hidden": 2}
    ),
    "extras": Case(extras_call),
    "sequence first": Case(sequence_first_call, options={"batch_dim": 1}),
    "batch_related": Case(ambiguous_call),
    "none batch_related": Case(none_related_call),
    "batch_related by name": Case(named_call),
    "batch_related of the list": Case(declared_call, options={"batch_related": [1, "mask"]}),
    "shapes that change": Case(changing_call, look=True, steps=4),
    "counters": Case(two_call(counters, return_hidden_states=True), Two, options={"num_hidden": 2}),
    "constants": Case(two_call(constants), Two, options={"num_hidden": 2}),
    "complex": Case(two_call(complex_numbers), Turning, options={"num_hidden": 2}),
    "no second state": Case(two_call(optional_states), OptionalState, options={"num_hidden": 2}),
    "modes that change": Case(
        two_call(states),
        Modal,
        options={"num_hidden": 2},
        edit=lambda layers, step: layers.train(step != 1),
    ),
    "written argument": Case(
        two_call(lambda rank, step: drawn(rank, step, 1, WIDTH)),
        Writing,
        wrap=lambda layers: [Block(one, False, mode="PIPE") for one in layers],
    ),
    "recomputed inside": Case(
        layer=Recomputed, wrap=lambda layers: [Block(one, False, mode="PIPE") for one in layers]
    ),
    "levels": Case(wrap=levels),
    "frozen": Case(edit=unfrozen_later),
    "frozen, without gradient of inputs": Case(
        lambda rank, step: ((drawn(rank, step, ROWS, LENGTH, WIDTH),), {}), edit=unfrozen_later
    ),
    "two calls": Case(calls=2),
    "costs": Case(
        options={"costs": [1, 1, 1, 1, 9]},
        call=two_call(states, return_hidden_states=True),
        layer=Two,
    ),
    "chunks": Case(extras_call, options={"chunks": 2}, layers=9),
    "v": Case(
        two_call(states, return_hidden_states=True),
        Two,
        options={"chunks": 2, "placement": "v", "num_hidden": 2},
        layers=9,
    ),
    "same layer twice": Case(wrap=ties),
}

Record = list[tuple[str, Any]]


def expected(name: str, ranks: int) -> dict[int, Record]:
    """Per rank, what the plain layers give in one process."""
    case = CASES[name]
    made = [case.layer(number) for number in range(case.layers)]
    layers = LayerList(case.options.get("num_hidden", 1))
    for number, layer in enumerate(ties(made) if case.wrap is ties else made):
        layers.add_module(str(number), layer)
    return _run(case, layers, range(ranks))


def found(name: str) -> Record:
    """What this rank's pipelined list gives."""
    case = CASES[name]
    made: list[nn.Module] = [case.layer(number) for number in range(case.layers)]
    layers = PipelineTransformerBlockList(case.wrap(made), **case.options)
    rank = current().topology.data_rank
    return _run(case, layers, [rank])[rank]


def _run(case: Case, layers: Any, ranks: Iterable[int]) -> dict[int, Record]:
    records: dict[int, Record] = {rank: [] for rank in ranks}
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.05)
    for step in range(case.steps):
        case.edit(layers, step)
        optimizer.zero_grad()
        for rank, record in records.items():
            record += _call(case, layers, rank, step)
        for name, parameter in layers.named_parameters():
            gradient = full_gradient(parameter)
            for record in records.values():
                record.append((f"gradient of {name} in step {step}", gradient))
        optimizer.step()
    for record in records.values():
        record += [
            (f"{name} at the end", value.clone()) for name, value in layers.state_dict().items()
        ]
    return records


def _call(case: Case, layers: Any, rank: int, step: int) -> Record:
    record: Record = []
    losses = []
    for number in range(case.calls):
        args, kwargs = case.call(rank, step + 10 * number)
        if isinstance(layers, LayerList) and type(layers) is LayerList:
            kwargs = {key: value for key, value in kwargs.items() if key != "batch_related"}
        if case.look:
            with torch.no_grad():
                record.append((f"looked at in step {step}, call {number}", layers(*args, **kwargs)))
        outputs = layers(*args, **kwargs)
        record.append(
            (
                f"outputs of step {step}, call {number}",
                map_tensors(torch.Tensor.detach, outputs),
            )
        )
        losses.append(
            sum(
                out.abs().square().mean() * (i + 1)
                for i, out in enumerate(tensors_in(outputs))
                if out.is_floating_point() or out.is_complex()
            )
        )
        if number == case.calls - 1:
            total: Any = sum(losses)
            if total.requires_grad:
                total.backward()
            given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            record.append(
                (f"gradients of the inputs in step {step}", [tensor.grad for tensor in given])
            )
    return record


def all_found(names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = found(name)
        except Exception:
            results[name] = traceback.format_exc()
    return results
