"""Parameters outside of Blocks, which are gathered together before forward and reduced together
after backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zero_models import full_gradient, grads_of, of_all_ranks

from bmt_core.run.runtime import current, rank, world_size
from bmt_params.owner import owner_of
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.root_group import RootGroup
from cells import cells

VOCABULARY, WIDTH, BATCH, LENGTH = 13, 6, 8, 5


class Model(nn.Module):
    """Sizes that no number of ranks divides; ``spare`` is used when asked, ``frozen`` does
    not train.
    """

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.spare = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight
        self.fails = False

    def forward(
        self, tokens: torch.Tensor, use_spare: bool = False, read_spare: bool = False
    ) -> torch.Tensor:
        if self.fails:
            raise ValueError("as it should")
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        if read_spare:
            self.spare(hidden)
        if use_spare:
            hidden = hidden + self.spare(hidden)
        return self.head(hidden).float()  # type: ignore[no-any-return]


def sharded(model: nn.Module) -> Any:
    return BMTrainModelWrapper(model.to(current().device))


def tokens(step: int, micro_batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def own(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(world_size())[rank()].to(current().device)


def loss_of(model: nn.Module, batch: torch.Tensor, **options: Any) -> Any:
    return (
        F.cross_entropy(model(batch, **options).flatten(0, 1), batch.flatten(), reduction="sum")
        / BATCH
    )


def whole(parameter: torch.Tensor) -> torch.Tensor:
    part = parameter.detach()
    return (
        (parameter.gather_like(part) if isinstance(parameter, DistributedParameter) else part)
        .clone()
        .cpu()
    )


def trained(
    model: nn.Module, slices: Callable[[torch.Tensor], torch.Tensor], plan: list[dict[str, Any]]
) -> Any:
    """Losses, gradients and parameters after each of the steps in ``plan``, whole; ``micro`` is the
    number of micro-batches.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    history = []
    for step, given in enumerate(plan):
        options = dict(given)
        losses = []
        for micro_batch in range(options.pop("micro", 1)):
            loss = loss_of(model, slices(tokens(step, micro_batch)), **options)
            loss.backward()
            losses.append(loss.detach().cpu())
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
        history.append((losses, grads, [whole(parameter) for parameter in model.parameters()]))
    return history


# Two steps alike, so that the second is what was expected; then others than expected; then as the
# first again.
PLAN: list[dict[str, Any]] = [
    {},
    {},
    {"use_spare": True},
    {"use_spare": True},
    {"micro": 3},
    {"read_spare": True},
    {},
]


def check_training(tolerance: float, **options: Any) -> None:
    expected = trained(Model(**options), lambda batch: batch, PLAN)
    found = trained(sharded(Model(**options)), own, PLAN)
    for (losses, *of_rank), (whole_losses, *of_plain) in zip(found, expected, strict=True):
        summed = [sum(each) for each in zip(*of_all_ranks(losses), strict=True)]
        torch.testing.assert_close(
            [summed, *of_rank], [whole_losses, *of_plain], rtol=tolerance, atol=tolerance
        )


def reducing(world_size: int, reduce_dtype: str) -> dict[str, Any]:
    return {"reduce_dtype": reduce_dtype}


@on_ranks(1, 4, init=reducing)
@pytest.mark.parametrize("reduce_dtype", ["fp32-sum", "param", "fp32"])
@cells("tied", [False, True])
def test_training_equals_plain_torch(tied: bool, reduce_dtype: str) -> None:
    check_training(1e-4, tied=tied)


@pytest.mark.gpu
@on_ranks(2, init={"device": "cuda"}, timeout=120)
def test_training_equals_plain_torch_on_gpus() -> None:
    check_training(1e-3)


class Two(nn.Module):
    """Each letter is a micro-batch: B uses both parameters, 1 the first one only; N reads both and
    uses the first one only, and R does so on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, factor: torch.Tensor, letter: str) -> torch.Tensor:
        out = self.first.float().sum() * factor
        if letter == "1":
            return out
        second = self.second.float().sum() * factor
        return out if letter == "N" or (letter == "R" and rank() == 1) else out + second


@on_ranks(2)
@cells(
    ("uses", "in_block"),
    [
        ("BBBBBBBBB", False),
        ("BB1BB1BB1BB1B", False),
        ("BNBNRNBNBNRNBNBN", False),
        ("B1B1B1BB1BBB", False),
        ("BB1BB1BB1BB", True),
    ],
)
def test_small_gradients_add_up_though_micro_batches_use_other_parameters(
    uses: str, in_block: bool
) -> None:
    model: Any = sharded(nn.Sequential(Two()))[0]
    if in_block:
        model = Block(model, zero_level=2)
    exact = [0.0, 0.0]
    for number, letter in enumerate(uses):
        factor = 128.0 if number == 0 else 0.25
        if in_block:  # a Block has gradients of all that trains
            model.second.requires_grad_(letter == "B")
        model(torch.tensor(factor), letter).backward()
        exact[0] += 2 * factor
        exact[1] += factor * {"B": 2, "R": 1, "N": 0, "1": 0}[letter]
    found = [grad[0].item() for grad in grads_of(model).values()]
    assert found == [torch.tensor(value).bfloat16().item() for value in exact]


@on_ranks(2)
def test_what_only_one_rank_uses_has_a_gradient_on_all() -> None:
    """Of what every rank computes with ``spare``, only rank 0 uses the result."""
    model = sharded(Model())
    for step in range(3):
        model.zero_grad()
        model(own(tokens(step)), use_spare=rank() == 0, read_spare=True).sum().backward()
    assert all(parameter.grad is not None for parameter in model.spare.parameters())


class Routed(nn.Module):
    """Uses its expert on rank 0 alone, as a router may by the tokens of a rank."""

    def __init__(self, expert: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.expert = expert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return x + self.expert(x) if rank() == 0 else x


class SharedExpert(nn.Module):
    """Blocks that share an expert. Each call runs the layers that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Routed(expert), Routed(expert)])

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        x = self.norm(x)
        for index in order:
            x = self.layers[index](x)
        return x


@on_ranks(2, timeout=30)
def test_what_one_rank_uses_of_a_layer_that_the_last_call_skipped_has_a_gradient_on_all() -> None:
    model = sharded(SharedExpert())
    for order in ((0, 1, 2), (0,), (0, 1), (0,), (2, 1)):
        model.zero_grad()
        model(torch.ones(2, WIDTH), order).sum().backward()
        if len(order) > 1:
            grad = full_gradient(model.layers[1].expert.bias)
            assert grad is not None and grad.abs().sum() > 0
            torch.testing.assert_close(of_all_ranks(grad), [grad, grad])


@on_ranks(2)
def test_a_call_that_fails_leaves_nothing_behind() -> None:
    """It fails before it reads what was gathered ahead."""
    plain, model = Model(), sharded(Model())
    for step in range(4):
        model.fails = step == 2
        if model.fails:
            with pytest.raises(ValueError, match="as it should"):
                model(own(tokens(step)))
        else:
            loss_of(model, own(tokens(step))).backward()
            loss_of(plain, tokens(step)).backward()
    expected = {name: grad for name, grad in grads_of(plain).items() if grad is not None}
    found = grads_of(model)
    torch.testing.assert_close(
        {name: found[name] for name in expected}, expected, rtol=1e-5, atol=1e-5
    )
    owners = [owner_of(parameter) for parameter in model.parameters()]
    assert {
        (owner.call, owner.buffer.has_memory) for owner in owners if isinstance(owner, RootGroup)
    } == {(None, False)}


@on_ranks(4)
def test_calls_in_other_modes_and_changed_parameters_are_seen() -> None:
    plain, model = Model(), sharded(Model())
    batch = tokens(0)
    for _ in range(3):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(
                    model(own(batch)), own(plain(batch)), rtol=1e-5, atol=1e-6
                )
        with torch.no_grad():
            for parameter in [*plain.parameters(), *model.parameters()]:
                parameter.mul_(1.25)


@on_ranks(2)
def test_what_was_gathered_by_itself_adds_to_what_is_reduced_together() -> None:
    """A parameter that was gathered by itself, before the call, contributes to the loss, too."""
    plain, model = Model(), sharded(Model())
    for made, batch, ranks in ((plain, tokens(0), 1), (model, own(tokens(0)), world_size())):
        for _ in range(2):
            penalty = made.embedding.weight.square().sum() / ranks
            (loss_of(made, batch) + penalty).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = self.spare
        return (self.used * x).abs().sum()


@on_ranks(2)
def test_complex_parameters_without_gradient_have_none() -> None:
    waves = sharded(Waves())
    waves(torch.arange(5.0)).backward()
    grads = grads_of(waves)
    assert grads["used"].tolist() == [0, 2, 4, 6, 8] and grads["spare"] is None


@on_ranks(2)
def test_hooks_see_no_gradient_of_parameters_that_were_not_read() -> None:
    model, seen = sharded(Model()), []
    weight = model.spare._parameters["weight"]
    handle = weight.register_hook(lambda grad: seen.append(grad.numel()))
    for step, use_spare in enumerate([False, True, False]):
        loss_of(model, own(tokens(step)), use_spare=use_spare).backward()
    handle.remove()
    assert seen == [weight.numel()]
