"""A language model whose parameters are all outside of Blocks, trained in plain torch and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bmt_core import DistributedParameter
from bmt_core.params.owner import owner_of
from bmt_core.run.runtime import current, rank, world_size
from bmt_zero import BMTrainModelWrapper as sharded
from bmt_zero.root_group import RootGroup
from bmt_zero.unsharded_buffer import BufferState

VOCABULARY, WIDTH, BATCH, LENGTH = 13, 6, 8, 5


class Model(nn.Module):
    """Sizes that no number of ranks divides; ``spare`` is used when asked, ``frozen`` does not train."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.spare = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, use_spare: bool = False, read_spare: bool = False) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        if read_spare:
            self.spare(hidden)
        if use_spare:
            hidden = hidden + self.spare(hidden)
        return self.head(hidden).float()  # type: ignore[no-any-return]


def model(**options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options)


def tokens(step: int, micro_batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def own(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(world_size())[rank()].to(current().device)


def loss_of(model: nn.Module, batch: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch, **options).flatten(0, 1), batch.flatten(), reduction="sum") / BATCH


def trained(model: nn.Module, slices: Callable[[torch.Tensor], torch.Tensor], plan: list[dict[str, Any]]) -> Any:
    """Losses, gradients and parameters after each of the steps in ``plan``, whole; ``micro`` is the number of micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    history = []
    for step, given in enumerate(plan):
        options = dict(given)
        losses = []
        for micro_batch in range(options.pop("micro", 1)):
            loss = loss_of(model, slices(tokens(step, micro_batch)), **options)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        grads = [None if p.grad is None else whole(p, p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        history.append((torch.stack(losses).cpu(), grads, [whole(p, p.detach()) for p in model.parameters()]))
    return history


def whole(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DistributedParameter):
        part = parameter.gather_like(part)
    return part.detach().clone().cpu()


def trained_on_ranks(plan: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    return trained(sharded(model(**options).to(current().device)), own, plan)


def used_on_rank_0_only(read: bool) -> list[bool]:
    """Whether ``spare`` has a gradient on this rank, when only rank 0 uses what every rank computes with it."""
    shards = sharded(model())
    for step in range(3):
        shards.zero_grad()
        output = shards(own(tokens(step)), use_spare=rank() == 0, read_spare=read)
        output.sum().backward()
    return [p.grad is not None for p in shards.spare.parameters()]


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


def expert_of_a_layer_that_was_skipped() -> list[torch.Tensor]:
    """Gradients of the shared expert in calls after one that has not run the layers which have it."""
    shards: Any = sharded(SharedExpert())
    gradients = []
    for order in ((0, 1, 2), (0,), (0, 1), (0,), (2, 1)):
        shards.zero_grad()
        shards(torch.ones(2, WIDTH), order).sum().backward()
        expert = shards.layers[1].expert.bias
        if len(order) > 1:
            gradients.append(expert.gather_like(expert.grad))
    return gradients


class Failing(Model):
    fails = False

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.fails:
            raise ValueError("as it should")
        return super().forward(*args, **kwargs)


def survives_failures() -> tuple[bool, bool]:
    """Whether a call that fails before it reads what was gathered ahead leaves a model that trains, and nothing gathered."""
    torch.manual_seed(1)
    plain = Failing()
    torch.manual_seed(1)
    shards = sharded(Failing())
    for step in range(4):
        for module in (plain, shards):
            assert isinstance(module, Failing)
            module.fails = step == 2
        if step == 2:
            try:
                shards(own(tokens(step)))
            except ValueError:
                pass
            continue
        loss_of(shards, own(tokens(step))).backward()  # type: ignore[no-untyped-call]
        loss_of(plain, tokens(step)).backward()  # type: ignore[no-untyped-call]
    pairs = zip(plain.parameters(), shards.parameters(), strict=True)
    equal = all(p.grad is None or torch.allclose(p.grad, whole(s, s.grad), atol=1e-5) for p, s in pairs)  # type: ignore[arg-type]
    owners = [owner_of(parameter) for parameter in shards.parameters()]
    found = {(owner.call, owner.buffer.state) for owner in owners if isinstance(owner, RootGroup)}
    return equal, found == {(None, BufferState.FREED)}


def in_other_modes() -> bool:
    """Whether calls without gradients, in inference mode, and calls in which a parameter is changed give the plain result."""
    plain, shards = model(), sharded(model())
    batch = tokens(0)
    results = []
    for _ in range(3):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                results.append(torch.allclose(shards(own(batch)), own(plain(batch)), atol=1e-6))
        with torch.no_grad():
            for module in (plain, shards):
                for parameter in module.parameters():
                    parameter.mul_(1.25)
    return all(results)


def with_penalty() -> Any:
    """Gradients of a loss to which a parameter that was gathered by itself, before the call, contributes too; plain and sharded."""
    found = []
    for made, batch, ranks in ((model(), tokens(0), 1), (sharded(model()), own(tokens(0)), world_size())):
        for _ in range(2):
            penalty = made.embedding.weight.square().sum() / ranks
            (loss_of(made, batch) + penalty).backward()
        found.append([None if p.grad is None else whole(p, p.grad) for p in made.parameters()])
    return found


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = self.spare
        return (self.used * x).abs().sum()


def complex_and_unused() -> Any:
    """Gradients of complex parameters of which the loss uses one."""
    waves = sharded(Waves())
    waves(torch.arange(5.0)).backward()
    return [None if p.grad is None else whole(p, p.grad) for p in waves.parameters()]


def hooked_and_unread() -> bool:
    """Whether a hook is left alone by calls that do not read its parameter, and called by the one that does."""
    shards, seen = sharded(model()), []
    weight = shards.spare._parameters["weight"]
    assert isinstance(weight, DistributedParameter)
    handle = weight.register_hook(lambda grad: seen.append(grad.numel()))
    for step, use_spare in enumerate([False, True, False]):
        loss_of(shards, own(tokens(step)), use_spare=use_spare).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    return seen == [weight.numel()]


class Pair(nn.Module):
    """Reads both of its parameters; the loss depends on the second one only if ``uses_both``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, uses_both: bool) -> torch.Tensor:
        second = self.second
        return self.first.sum() + second.sum() if uses_both else self.first.sum() + second.detach().sum()


def of_two_calls(dtype: torch.dtype) -> list[list[float]]:
    """Gradients after three passes of two calls, of which the first in the order of backward uses all parameters."""
    pair = sharded(Pair(dtype))
    for _ in range(3):
        (pair(False) + pair(True)).backward()
    return [whole(p, p.grad).unique().tolist() for p in pair.parameters()]  # type: ignore[arg-type]
