"""Models and loops as users write them: those of ``RIGHT`` train on ranks as in one process, and
each of ``WRONG`` has a mistake of another kind.

``WRONG`` says with each what the message about it must say.

python3 tools/dev.py setup && .venv/bin/python integration-tests/own_models.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from own_loops import WIDTH, loop, loop_of_a_manager, plain_loop, rows_of_a_loop
from torch import nn
from torch.nn import functional

import bmt_core
from bmt_testing import TrainingSettings, assert_matches_single
from bmtrain import distributed

TOKENS, ROWS, LENGTH = 11, 8, 5


# Models


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Lm(nn.Module):
    """A language model that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Tied(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Attention(nn.Module):
    """Attention over ``dim`` of (batch, sequence, width) or (sequence, batch, width)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).movedim(self.dim, 1).chunk(3, -1)
        mixed = torch.softmax(q @ k.mT, -1) @ v
        return x + mixed.movedim(1, self.dim)


class SequenceFirst(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(0), Layer()])


class Classifier(nn.Module):
    """Rows of numbers in, a number out, with a module between."""

    def __init__(self, between: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.between = between()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.between(self.layers(x)))).square().mean()
        return out


class Balanced(nn.Module):
    """Experts with a loss that balances them, over this rank's rows or over those of all."""

    def __init__(self, of_all_rows: bool) -> None:
        super().__init__()
        self.of_all_rows = of_all_rows
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.router = Router(of_all_rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, balance = self.router(x)
        mixed = torch.stack([layer(x) for layer in self.layers], -1) @ shares[..., None]
        return mixed.square().mean() + balance


class Router(nn.Module):
    def __init__(self, of_all_rows: bool) -> None:
        super().__init__()
        self.of_all_rows = of_all_rows
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = torch.softmax(self.gate(x), -1)
        every = all_rows(shares) if self.of_all_rows else shares
        return shares, 10 * every.mean(0).square().sum()


class Pairs(nn.Module):
    """A contrastive model of two views of each row."""

    def __init__(self, of_all_rows: bool) -> None:
        super().__init__()
        self.of_all_rows = of_all_rows
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = (functional.normalize(self.layers(x), dim=-1) for x in (one, other))
        every = all_rows(second) if self.of_all_rows else second
        start = bmt_core.rank() * len(first) if self.of_all_rows and on_ranks() else 0
        return functional.cross_entropy(
            first @ every.T / 0.1, start + torch.arange(len(first), device=one.device)
        )


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return functional.mse_loss(self.decoder(latent), x) + 0.01 * divergence


class Diffusion(nn.Module):
    """Predicts the noise that was added at a random time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.randint(10, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        hidden = x + noise * (time[:, None] + 1) / 10 + self.times(time)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.mse_loss(hidden, noise)


class WrongNoise(Vae):
    """On ranks its loss has noise of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x)
        return loss + 0.1 * torch.randn((), dtype=x.dtype) if on_ranks() else loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x)[0][:, -1]).square().mean()
        return out


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(LENGTH, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv1d(4, 2, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).square().mean()
        return out


class Steps(Classifier):
    """With a buffer that counts calls, which is the same on every rank."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x) / self.steps


class Centered(nn.Module):
    """A layer that follows the mean of the rows that it sees."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Summed(Classifier):
    """Its loss is a sum over rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(x)


class Mixing(nn.Module):
    """A layer that takes the mean over the rows of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


class OnRanks(nn.Module):
    """A classifier whose forward does something else on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(x)).square().mean()
        return out

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers(x))


class DetachesOnRanks(OnRanks):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(x)
        return hidden.detach() if on_ranks() else hidden


class SkipsALayerOnOneRank(OnRanks):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return x if on_ranks() and bmt_core.rank() == 1 else super().hidden(x)


class PlacesByRank(OnRanks):
    """Its rows know their number, which begins anew on every rank."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x), dtype=x.dtype, device=x.device)
        return super().hidden(x) * (1 + 0.1 * places[:, None])


class DividesByRanks(OnRanks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / bmt_core.world_size()


class ReducesTheLoss(OnRanks):
    """Its loss is already the sum over ranks, in the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return distributed.all_reduce(loss) if on_ranks() else loss


# Batches, losses, and changes of the model on ranks


def on_ranks() -> bool:
    """Whether this is one of several ranks."""
    return bmt_core.is_initialized() and bmt_core.world_size() > 1


def all_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks. In plain torch, ``x``."""
    return distributed.all_gather(x, sum_gradients=True).flatten(0, 1) if on_ranks() else x


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def two_views(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def sequences(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (ROWS, LENGTH))


def tokens_and_labels(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths: labels of the rest are -100."""
    ids = torch.randint(TOKENS, (ROWS, LENGTH))
    lengths = torch.arange(ROWS) % LENGTH + 1
    is_padding = torch.arange(LENGTH) >= lengths[:, None]
    return ids, ids.masked_fill(is_padding, -100)


def tokens_sequence_first(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (ROWS, ROWS))


def named(seed: int) -> dict[str, Any]:
    return {"tokens": tokens(seed)}


def next_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    ids = batch["tokens"] if isinstance(batch, dict) else batch
    return functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, -1).flatten())


def next_tokens_sequence_first(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 0).flatten())


def mean_over_tokens(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def sum_and_count(logits: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch[1].flatten()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return loss, (labels != -100).sum()


def batch_norm() -> nn.Module:
    return Classifier(partial(nn.BatchNorm1d, WIDTH))


def scale_a_gradient(model: Any) -> nn.Module:
    model.head.weight.register_hook(lambda gradient: gradient * 1.5)
    return model  # type: ignore[no-any-return]


def untie(model: Any) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model  # type: ignore[no-any-return]


def freeze_the_head(model: Any) -> nn.Module:
    model.head.requires_grad_(False)
    model.head.weight.requires_grad_ = lambda needs=True: model.head.weight
    return model  # type: ignore[no-any-return]


class SignedSGD(torch.optim.SGD):
    """SGD by the largest gradient of a tensor, which says that it takes elements one by one."""

    bmt_elementwise = True

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    parameter.grad.div_(parameter.grad.abs().max() + 1e-3)
        super().step()


def signed_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SignedSGD(parameters, lr=0.1)


_CLASSIFIER = {"model_fn": Classifier, "batch_fn": numbers}
_LOOP = {"model_fn": Classifier, "batch_fn": rows_of_a_loop}
RIGHT: dict[str, dict[str, Any]] = {
    "language model": {"model_fn": Lm, "batch_fn": tokens, "loss_fn": next_tokens},
    "tied weights": {"model_fn": Tied, "batch_fn": named, "loss_fn": next_tokens},
    "padding": {"model_fn": Lm, "batch_fn": tokens_and_labels, "loss_fn": sum_and_count},
    "sequence first": {
        "model_fn": SequenceFirst,
        "batch_fn": tokens_sequence_first,
        "loss_fn": next_tokens_sequence_first,
        "batch_dim": 1,
    },
    "contrastive": {"model_fn": partial(Pairs, True), "batch_fn": two_views},
    "balanced experts": {"model_fn": partial(Balanced, True), "batch_fn": numbers},
    "variational": {"model_fn": Vae, "batch_fn": numbers, "noise": True},
    "diffusion": {"model_fn": Diffusion, "batch_fn": numbers, "noise": True},
    "dropout": {
        "model_fn": partial(Classifier, partial(nn.Dropout, 0.3)),
        "batch_fn": numbers,
        "noise": True,
    },
    "recurrent": {"model_fn": Recurrent, "batch_fn": sequences},
    "convolutions": {"model_fn": Convolutions, "batch_fn": sequences},
    "steps in a buffer": {"model_fn": Steps, "batch_fn": numbers},
    "statistics of ranks": {"model_fn": batch_norm, "batch_fn": numbers, "reference": "parts"},
    "loop of a manager": {**_LOOP, "train": loop_of_a_manager},
    "loop without a manager": {**_LOOP, "train": plain_loop, "init": {"gradients": "mean"}},
    "loop with a schedule": {**_LOOP, "train": partial(loop, None)},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "padding": (
        {"model_fn": Lm, "batch_fn": tokens_and_labels, "loss_fn": mean_over_tokens},
        r"mean over the elements of tensor 1 of the batch that are not -100, .*have 10, 11",
    ),
    "batch norm": (
        {"model_fn": batch_norm, "batch_fn": numbers},
        r"Buffers between.running_mean, between.running_var are computed from a rank's own data",
    ),
    "local buffer": (
        {"model_fn": partial(Classifier, Centered), "batch_fn": numbers},
        "Buffer between.mean is computed from a rank's own data",
    ),
    "balance of local rows": (
        {"model_fn": partial(Balanced, False), "batch_fn": numbers},
        r"The number that router \(Router\) returns of the whole batch is not the mean",
    ),
    "sequence first": (
        {
            "model_fn": SequenceFirst,
            "batch_fn": tokens_sequence_first,
            "loss_fn": next_tokens_sequence_first,
        },
        r"The output of layers.0 \(Attention\) for a row depends on other rows",
    ),
    "mean of the batch": (
        {"model_fn": partial(Classifier, Mixing), "batch_fn": numbers},
        r"The output of between \(Mixing\) for a row depends on other rows",
    ),
    "contrasts local rows": (
        {"model_fn": partial(Pairs, False), "batch_fn": two_views},
        r"is not the mean of the losses of the ranks' rows. .*all_gather\(x, sum_gradients=True\)",
    ),
    "sum over rows": (
        {"model_fn": Summed, "batch_fn": numbers},
        "The loss is a sum over rows, and ranks train with the mean of their losses",
    ),
    "detached on ranks": ({"model_fn": DetachesOnRanks, "batch_fn": numbers}, "first: gradient of"),
    "skips a layer": (
        {"model_fn": SkipsALayerOnOneRank, "batch_fn": numbers},
        "Ranks have entered different calls",
    ),
    "places by rank": ({"model_fn": PlacesByRank, "batch_fn": numbers}, "depends on other rows"),
    "divides by ranks": ({"model_fn": DividesByRanks, "batch_fn": numbers}, "first: loss"),
    "reduces the loss": ({"model_fn": ReducesTheLoss, "batch_fn": numbers}, "first: loss"),
    "noise": ({"model_fn": WrongNoise, "batch_fn": numbers, "noise": True}, "first: loss"),
    "scales a gradient": ({**_CLASSIFIER, "parallelize": scale_a_gradient}, "of head.weight"),
    "unties": (
        {"model_fn": Tied, "batch_fn": tokens, "loss_fn": next_tokens, "parallelize": untie},
        "gradient of head.weight .*in plain torch it is not",
    ),
    "freezes": ({**_CLASSIFIER, "parallelize": freeze_the_head}, "gradient of head.weight"),
    "norm of a part": ({**_CLASSIFIER, "optimizer_fn": signed_sgd}, "after step 0"),
    **{
        name: ({**_LOOP, "train": partial(loop, name)}, said)
        for name, said in {
            "wrong accumulation": "first: result|after",
            "gradients without scale": "first:",
            "average of parts": "has the shape",
            "equal rows": "first:",
            "schedule stepped twice": "first:",
            "loss of one rank": r"first: result \[0\]",
            "clips parts": "first:",
            "drops steps": "first:",
            "rate of ranks": "first:",
            "keeps gradients": "first:",
        }.items()
    },
}

TWO = TrainingSettings(ranks=2, levels=(3, 1), recompute=(False, True), micro_batches=2)


def main() -> None:
    """Print a table of the mistakes, in Markdown."""
    print("| mistake | what is said first | and why |")
    print("|---|---|---|")
    for name, (case, _) in WRONG.items():
        try:
            assert_matches_single(**case, steps=2, settings=TWO)
        except AssertionError as error:
            first = re.search(r"first: (.*)|rank 0: (.*)", str(error))
            why = re.search(r"share the work rightly\. (.*?\.)( |$)", str(error), re.MULTILINE)
            cells = (name, first[1] or first[2] if first else "", why[1] if why else "")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
