"""Mistakes that are planted into ranks, and how many examples ``training_settings`` needs to
find each.

python3 tools/dev.py setup && .venv/bin/python integration-tests/planted_mistakes.py
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from own_models import Layer
from torch import nn

from bmt_checkpoint.range_writer import RangeWriter
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import backward_pass
from bmt_optim import clipping
from bmt_pipeline.whole_batch import WholeBatch
from bmt_testing import TrainingSettings, assert_matches_single, training_settings
from bmt_zero.gradient_ledger import GradientLedger

MOST = 100
"""Examples after which a mistake counts as not found."""

WIDTH, TOKENS, ROWS = 6, 11, 8


class Gpt(nn.Module):
    """A model with what the mistakes concern: layers of odd sizes, a tied weight, and a buffer that
    follows the data.
    """

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean((0, 1)), 0.1)
        logits = self.head(hidden - self.mean)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(seed: int) -> tuple[torch.Tensor]:
    return (torch.randint(TOKENS, (ROWS, 5)),)


def no_mistake(model: nn.Module) -> nn.Module:
    return model


def skip_a_reduction(model: nn.Module) -> nn.Module:
    """Block 1 keeps the gradients of its own rank."""
    start = GradientLedger._start

    def skipping(ledger: Any, reduced: torch.Tensor, full: torch.Tensor, division: Any) -> Any:
        if "layers.1." not in str(ledger._flat.labels):
            return start(ledger, reduced, full, division)
        size, rank = ledger._process_group.size, ledger._process_group.rank
        own = full.clone() if reduced.shape == full.shape else full.chunk(size)[rank].clone()
        work = start(ledger, reduced, full, division)
        work.wait()
        reduced.copy_(own)
        return work

    return replace_on_rank(GradientLedger, "_start", skipping, model)


def forget_to_divide(model: nn.Module) -> nn.Module:
    """Gradients are too large by the number of ranks along ``dp``."""
    return replace_on_rank(Runtime, "gradient_divisor", property(lambda runtime: 1), model)


def drop_what_is_held_back(model: nn.Module) -> nn.Module:
    """The gradients of micro-batches inside ``no_sync`` are lost."""

    def dropping(ledger: Any, full: torch.Tensor) -> torch.Tensor:
        held, ledger._held_back = ledger._held_back, None
        return full if held is None or held is full else full.to(held.dtype)

    return replace_on_rank(GradientLedger, "_with_held_back", dropping, model)


def take_the_norm_of_a_part(model: nn.Module) -> nn.Module:
    """Each rank clips by the norm of its own parts."""
    return replace_on_rank(clipping, "_over_all_ranks", lambda local, p: local.pow(1.0 / p), model)


def count_replicas_twice(model: nn.Module) -> nn.Module:
    """The norm of the gradients counts what several ranks have once for each of them."""
    return replace_on_rank(clipping, "replicas", lambda parameter: 1, model)


def lose_a_slice_of_the_checkpoint(model: nn.Module) -> nn.Module:
    """Rank 1 writes zeros in place of its parts."""
    write = RangeWriter.write_part

    def losing(file: Any, offset: int, part: torch.Tensor, ranges: Any, size: int) -> int:
        return write(file, offset, torch.zeros_like(part), ranges, size)

    return (
        replace_on_rank(RangeWriter, "write_part", losing, model) if current().rank == 1 else model
    )


def swap_two_micro_batches(model: nn.Module) -> nn.Module:
    """The first stage takes the micro-batches in another order than the last."""
    take = WholeBatch.micro_batch

    def swapped(batch: Any, tensors: Any, number: int) -> Any:
        return take(batch, tensors, batch.shape.micro_batches - 1 - number)

    return replace_on_rank(WholeBatch, "micro_batch", swapped, model)


def untie(model: Any) -> nn.Module:
    """The tied weight of embedding and head is two weights on the ranks."""
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def let_a_buffer_drift(model: Any) -> nn.Module:
    """On one rank the buffer is not that of its data."""

    def drift(module: Any, *_: Any) -> None:
        module.mean.add_(1e-3)

    if current().rank == 1:
        model.register_forward_hook(drift)
    return model


def mask_otherwise_in_recomputation(model: Any) -> nn.Module:
    """A recomputation draws another dropout mask than the forward."""

    def masked(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        is_recomputed = backward_pass() != -1
        return output * (torch.arange(output.shape[-1]) >= int(is_recomputed))

    model.layers[2].up.register_forward_hook(masked)
    return model


class NormalizedSGD(torch.optim.SGD):
    """SGD of gradients of length 1, each tensor's by its own norm."""

    bmt_elementwise = True  # which is not so: of a part, it takes the norm of the part

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-3)
        super().step()


def take_the_norm_of_a_part_in_the_optimizer(parameters: list[nn.Parameter]) -> NormalizedSGD:
    """Make an optimizer that says of itself what is not so."""
    return NormalizedSGD(parameters, lr=0.1)


class Mistake(NamedTuple):
    """A mistake, and what the message about it says. ``plant`` changes the model on ranks, or
    (``is_optimizer``) returns an optimizer.
    """

    plant: Callable[[Any], Any]
    phrases: tuple[str, ...]
    axes: dict[str, tuple[int, ...]] = {}
    is_optimizer: bool = False

    @property
    def name(self) -> str:
        """Say it in words."""
        return self.plant.__name__.replace("_", " ")


MISTAKES = [
    Mistake(skip_a_reduction, ("gradient of layers.1.", "in step 0", "on rank 0")),
    Mistake(forget_to_divide, ("gradient of embedding.weight in step 0", "on rank 0")),
    Mistake(drop_what_is_held_back, ("gradient of ", "in step 0", "on rank 0")),
    Mistake(take_the_norm_of_a_part, ("norm of the gradients in step 0", "on rank 0")),
    Mistake(
        swap_two_micro_batches, ("loss of micro-batch 0 in step 0", "on rank 0"), {"pp": (1, 2)}
    ),
    Mistake(count_replicas_twice, ("norm of the gradients in step 0", "on rank 0")),
    Mistake(lose_a_slice_of_the_checkpoint, (" after loading step 0", "on rank 0")),
    Mistake(
        take_the_norm_of_a_part_in_the_optimizer, (" after step 0", "on rank 0"), is_optimizer=True
    ),
    Mistake(untie, ("gradient of head.weight in step 0", "in plain torch it is not")),
    Mistake(let_a_buffer_drift, ("buffer mean after step 0", "on rank 1")),
    Mistake(mask_otherwise_in_recomputation, ("gradient of ", "in step 0", "on rank 0")),
]


def examples_needed(mistake: Mistake, *, shrinks: bool = False) -> tuple[int, str]:
    """Return how many examples were drawn until one found ``mistake``, and the message; MOST + 1 if
    none did.
    """
    needed, message = MOST + 1, ""
    numbers = itertools.count(1)
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]

    @given(drawn=training_settings(ranks=(1, 2), axes=mistake.axes))
    @settings(
        deadline=None,
        max_examples=MOST,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    def compare(drawn: TrainingSettings) -> None:
        nonlocal needed
        number = next(numbers)
        try:
            assert_matches_single(
                Gpt,
                tokens_of,
                steps=2,
                settings=drawn,
                reference="parts",  # for the buffer
                parallelize=None if mistake.is_optimizer else mistake.plant,
                optimizer_fn=mistake.plant if mistake.is_optimizer else None,
                pipeline="layers" if mistake.axes else None,
            )
        except AssertionError:
            needed = min(needed, number)
            raise

    try:
        compare()
    except AssertionError as error:
        message = str(error)
    return needed, message


def replace_on_rank(owner: Any, name: str, new: Any, model: nn.Module) -> nn.Module:
    """Replace an attribute of bmt until the run of this rank ends, and return ``model``."""
    # A training that is loaded makes its model twice.
    if (owner, name) not in _replaced:
        _replaced[owner, name] = vars(owner)[name]
        setattr(owner, name, new)
        current().at_shutdown.append(lambda: setattr(owner, name, _replaced.pop((owner, name))))
    return model


_replaced: dict[tuple[Any, str], Any] = {}


def main() -> int:
    """Print a table of the mistakes, in Markdown, and return 1 if one was not found, else 0."""
    missed = 0
    print("| mistake | examples | what is said first | simplest settings |")
    print("|---|---|---|---|")
    for mistake in MISTAKES:
        needed, message = examples_needed(mistake, shrinks=True)
        missed += needed > MOST
        first = re.search(r"first: (.*)", message)
        simplest = re.search(r"settings: TrainingSettings\((.*)\)", message)
        cells = (
            mistake.name,
            str(needed) if needed <= MOST else "not found",
            first[1] if first else "",
            f"`{simplest[1]}`" if simplest and simplest[1] else "the default: one rank",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
