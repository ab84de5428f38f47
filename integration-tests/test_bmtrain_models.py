"""A model family in BMTrain's style trains, generates and saves as the same model in plain torch,
at every level.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import bmtrain_models
import torch
from torch import nn
from zero_models import full_gradient

import bmtrain as bmt
from bmt_testing import run_ranks

WORDS, BATCH, LENGTH, STEPS = 19, 4, 5, 3
OPTIONS = [
    {"zero_level": level, "use_checkpoint": level % 2 == 1, "scripted": True} for level in range(4)
]
OPTIONS += [{"zero_level": 3, "use_checkpoint": False, "scripted": False}]


def batch(step: int, part: int, parts: int) -> list[torch.Tensor]:
    """Ids, their mask, ids of the decoder and their targets."""
    generator = torch.Generator().manual_seed(step)
    ids, decoder_ids, targets = torch.randint(WORDS, (3, BATCH, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([[5], [3], [4], [2]])
    return [tensor.chunk(parts)[part] for tensor in (ids, mask, decoder_ids, targets)]


HOOKED = {
    f"{stack}{place}": 2 * STEPS
    for stack, places in (
        ("encoder", (".layers.0", ".layers.0.attention.project_q", ".layers.1.ffn")),
        ("decoder", (".layers.0", ".layers.0.attention.project_q", ".layers.1.ffn", "")),
    )
    for place in places
}


class Hooks:
    """Sums the squares of what full backward hooks see of a batch's samples: those of its parts
    add up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if name.endswith(
                ("layers.0", "layers.1.ffn", "decoder", "layers.0.attention.project_q")
            ):
                module.register_full_backward_hook(self.hook_for(name))

    def hook_for(self, name: str) -> Any:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            squares = [gradient.square().sum() for gradient in (grad_input[0], *grad_output)]
            self.seen.setdefault(name, []).append(torch.stack(squares))

        return hook


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    """Of two batches, each of which runs forward before one backward through both."""
    losses = []
    for number in (2 * step, 2 * step + 1):
        *given, targets = batch(number, part, parts)
        losses.append(nn.functional.cross_entropy(model(*given).flatten(0, 1), targets.flatten()))
    return losses[0] + 0.5 * losses[1]


def train(models: ModuleType, part: int, parts: int, options: dict[str, Any]) -> dict[str, Any]:
    model = models.EncoderDecoder(WORDS, **options)
    torch.manual_seed(0)
    (bmt if models is bmtrain_models else models.bmt).init_parameters(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    hooks = Hooks(model)
    losses, gradients = [], []
    for step in range(STEPS):
        loss = loss_of(model, step, part, parts)
        manager.zero_grad()
        manager.backward(loss)
        gradients.append({name: full_gradient(p) for name, p in model.named_parameters()})
        manager.step()
        losses.append(loss.item())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generated = model.generate(*batch(9, part, parts)[:2], 4)
    model.load_state_dict({**state, "embedding.weight": state["embedding.weight"] * 2})
    doubled = model.generate(*batch(9, part, parts)[:2], 2)
    return {
        "loss": torch.tensor(losses),
        "gradients": gradients,
        "state": state,
        "generated": generated,
        "doubled": doubled,
        "hooks": hooks.seen,
    }


def train_sharded() -> list[dict[str, Any]]:
    return [train(bmtrain_models, bmt.rank(), bmt.world_size(), options) for options in OPTIONS]


def test_a_model_in_bmtrain_style_equals_plain_torch() -> None:
    plain = train(bmtrain_models.in_plain_torch(), 0, 1, {})
    assert {name: len(seen) for name, seen in plain["hooks"].items()} == HOOKED
    ranks = run_ranks(train_sharded, 2)
    for number, options in enumerate(OPTIONS):
        found = [results[number] for results in ranks]

        def check(what: str, actual: Any, options: Any = options) -> None:
            torch.testing.assert_close(
                actual,
                plain[what],
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text: f"{what} with {options}: {text}",
            )

        check("loss", (found[0]["loss"] + found[1]["loss"]) / 2)
        for what in ("generated", "doubled"):
            check(what, torch.cat([result[what] for result in found]))
        check(
            "hooks",
            {
                name: [sum(both) for both in zip(*(r["hooks"][name] for r in found), strict=True)]
                for name in plain["hooks"]
            },
        )
        for result in found:
            check("gradients", result["gradients"])
            check("state", result["state"])
