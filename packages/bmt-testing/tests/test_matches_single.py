"""``assert_matches_single`` passes what is right, and says in one line what is wrong with a model,
a batch or settings.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from torch import nn
from verified_models import TOKENS, WIDTH, Model

import bmt_core
from bmt_core import MeshAxis
from bmt_core.plugins.hookspecs import hookimpl
from bmt_testing import TrainingSettings, assert_matches_single, training_settings
from bmt_testing import trainings as trainings_module
from bmt_testing.comparison import differences
from bmt_tp import Column, Head, Plan, Row, VocabularyEmbedding, parallelize

calls = itertools.count()


class Experts(nn.Module):
    """A layer of which the data chooses a part: the other part has no gradient in plain torch, and
    zeros in a Block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts[int(x.mean() > 0)](x)
        return out


class ModelOfOutputs(nn.Module):
    """A model that takes names and returns an output, with experts, a tied layer, and statistics of
    the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.layers[2].weight = self.layers[1].weight
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"logits": self.statistics(x) * scale}


class ModelOfMasks(nn.Module):
    """A model with a mask of booleans, and one of zeros and minus infinity that may be another one
    on ranks.
    """

    mask: torch.Tensor
    causal: torch.Tensor

    def __init__(self, value_on_ranks: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.register_buffer("mask", torch.arange(WIDTH) < 2)
        self.register_buffer("causal", torch.full((WIDTH, WIDTH), -torch.inf).triu(1))
        if bmt_core.is_initialized():
            self.causal[0, 0] = value_on_ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x) + self.causal[-1], -1).masked_fill(self.mask, 0.5)
        return x.square().mean()


def model_of_another_mask_on_ranks() -> nn.Module:
    return ModelOfMasks(0.25)


class ModelOfNoise(Model):
    """A model with dropout whose loss in half precision is ``factor`` times as large on ranks."""

    def __init__(self, factor: float) -> None:
        super().__init__(dropout=0.1)
        self.factor = factor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens)
        is_wrong = bmt_core.is_initialized() and loss.dtype == torch.bfloat16
        return loss * self.factor if is_wrong else loss


def model() -> nn.Module:
    return Model()


def model_with_dropout() -> nn.Module:
    return Model(dropout=0.1)


def model_of_counted_values() -> nn.Module:
    made = Model()
    with torch.no_grad():
        made.norm.weight.fill_(float(next(calls)))
    return made


def model_without_loss() -> nn.Module:
    return nn.Linear(WIDTH, 3)


def model_that_overflows() -> nn.Module:
    made = Model()
    with torch.no_grad():
        made.norm.weight.fill_(1e30)
        made.head.weight.fill_(1e30)
    return made


def model_that_fails_on_ranks() -> nn.Module:
    if bmt_core.is_initialized():
        raise KeyError("only on ranks")
    return Model()


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (8, 4))


def rows(seed: int) -> tuple[torch.Tensor]:
    return (torch.rand(8, WIDTH),)


def six_rows(seed: int) -> torch.Tensor:
    return torch.randint(TOKENS, (6, 4))


def counted_tokens(seed: int) -> torch.Tensor:
    return torch.full((8, 4), next(calls) % TOKENS)


def named_arguments(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(8, WIDTH), "scale": 0.5}


def mean_square(output: dict[str, torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
    return (output["logits"] - batch["x"]).square().mean()


def split(model: nn.Module) -> nn.Module:
    plan = Plan(
        parameters={
            "embedding": VocabularyEmbedding(),
            "layers.*.up": Column(gather="sequence_first"),
            "layers.*.down": Row(input="sequence_first"),
            "head": Head(),
        },
        layers="layers.*",
        last="norm",
    )
    return parallelize(model, plan)


def leave_head_frozen(model: Any) -> nn.Module:
    model.head.weight.register_hook(lambda grad: grad * 1.5)
    return model


class ExpertAxis:
    """A plugin with an axis whose ranks see different data."""

    @hookimpl
    def bmt_mesh_axes(self, config: Any) -> list[MeshAxis]:
        return [MeshAxis("ep", config.axis_sizes.get("ep", 1), order=80)]


@given(drawn=training_settings(ranks=(2, 4), axes={"tp": (1, 2)}))
@settings(deadline=None, max_examples=6, derandomize=True, database=None)
def test_a_model_that_is_right_matches(drawn: TrainingSettings) -> None:
    assert_matches_single(model, tokens, steps=2, settings=drawn, parallelize=split)


@pytest.mark.parametrize(
    "drawn",
    [
        TrainingSettings(ranks=2, levels=(3, 0), recompute=(True,), optimizer="adam"),
        TrainingSettings(
            ranks=4, levels=(1, 2), micro_batches=3, no_sync=True, frozen=((1, 5), ())
        ),
        TrainingSettings(
            ranks=2, dtype="bfloat16", gradients="sum", reduce_dtype="param", max_norm=0.1
        ),
        TrainingSettings(ranks=2, dtype="float16", levels=(2,), micro_batches=2, seed=1),
        TrainingSettings(ranks=2, levels=(3,), gradients="sum", optimizer="adam", reload=True),
        TrainingSettings(ranks=2, levels=(1,), dtype="bfloat16", reload=True),
    ],
    ids=str,
)
def test_experts_ties_and_statistics_match(drawn: TrainingSettings) -> None:
    assert_matches_single(
        ModelOfOutputs, named_arguments, settings=drawn, loss_fn=mean_square, reference="parts"
    )


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_masks_of_booleans_and_of_infinities_are_compared(dtype: Any) -> None:
    drawn = TrainingSettings(ranks=2, dtype=dtype)
    assert_matches_single(ModelOfMasks, rows, steps=1, settings=drawn)
    with pytest.raises(AssertionError, match=r"first: buffer causal .* at \[0, 0\]"):
        assert_matches_single(model_of_another_mask_on_ranks, rows, steps=1, settings=drawn)


@pytest.mark.parametrize("factor", [1.0, 3.0, math.nan])
def test_with_noise_half_precision_explains_no_loss_that_is_much_larger(factor: float) -> None:
    drawn = TrainingSettings(ranks=2, dtype="bfloat16")
    model_fn = functools.partial(ModelOfNoise, factor)
    ending: AbstractContextManager[Any] = nullcontext()
    if factor != 1:
        ending = pytest.raises(AssertionError, match="first: loss")
    with ending:
        assert_matches_single(model_fn, tokens, steps=2, settings=drawn, noise=True)


def test_an_axis_of_a_plugin_matches() -> None:
    drawn = TrainingSettings(ranks=4, axes={"ep": 2}, levels=(2,))
    assert_matches_single(model, tokens, steps=1, settings=drawn, init={"plugins": [ExpertAxis()]})


AXIS_MODULE = """
from bmt_core import MeshAxis
from bmt_core.plugins.hookspecs import hookimpl

@hookimpl
def bmt_mesh_axes(config):
    return [MeshAxis("ep", config.axis_sizes.get("ep", 1), order=80)]
"""


def test_a_module_is_a_plugin_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "axis_in_a_module.py").write_text(AXIS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    drawn = TrainingSettings(ranks=4, axes={"ep": 2})
    plugins = [import_module("axis_in_a_module")]
    assert_matches_single(model, tokens, steps=1, settings=drawn, init={"plugins": plugins})


def test_a_module_that_ranks_cannot_import_is_refused() -> None:
    plugin = ModuleType("typed_in")
    exec(AXIS_MODULE, vars(plugin))
    drawn = TrainingSettings(ranks=2, axes={"ep": 2})
    with pytest.raises(ValueError, match=r"'typed_in' cannot be sent .* into a file"):
        assert_matches_single(model, tokens, settings=drawn, init={"plugins": [plugin]})


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_training_on_gpus_matches(dtype: Any) -> None:
    drawn = TrainingSettings(
        ranks=2, dtype=dtype, levels=(3, 1), recompute=(True, False), micro_batches=2
    )
    assert_matches_single(model, tokens, settings=drawn, device="cuda")


def test_a_failure_says_what_differs_and_the_command_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = TrainingSettings(ranks=2, levels=(2, 3))
    with pytest.raises(AssertionError) as caught:
        assert_matches_single(model, tokens, steps=1, settings=drawn, parallelize=leave_head_frozen)
    message = str(caught.value)
    assert (
        "A training on 2 ranks differs from one process of plain torch on the whole batch."
        in message
    )
    first = re.search(
        r"first: gradient of head.weight in step 0, on rank 0, at \[\d, \d\]\n"
        r"  expected: (\S+)\n  found: +(\S+), off by",
        message,
    )
    assert first is not None, message
    assert float(first[2]) == pytest.approx(1.5 * float(first[1]))
    assert "settings: TrainingSettings(ranks=2, levels=(2, 3))" in message
    command = message.partition("repeat in a shell: ")[2].splitlines()[0]
    path, *program, code = shlex.split(command)
    assert program == ["python", "-c"] and path.endswith(":$PYTHONPATH")
    folders = path.removeprefix("PYTHONPATH=").removesuffix(":$PYTHONPATH")
    for folder in folders.split(os.pathsep):
        monkeypatch.syspath_prepend(folder)
    with pytest.raises(AssertionError, match=re.escape(first[0])):
        exec(code, {"__name__": "__main__"})


def test_ranks_that_fail_are_reported_with_their_settings() -> None:
    with pytest.raises(AssertionError, match="KeyError: 'only on ranks'") as caught:
        assert_matches_single(model_that_fails_on_ranks, tokens, settings=TrainingSettings(ranks=2))
    assert "repeat in Python:  assert_matches_single(model_that_fails_on_ranks, tokens" in str(
        caught.value
    )


TWO = TrainingSettings(ranks=2)
ERRORS: list[tuple[Callable[..., Any], Callable[..., Any], TrainingSettings, str]] = [
    (lambda: Model(), tokens, TWO, "model_fn=.*<lambda> cannot be imported by the ranks"),
    (model, lambda seed: tokens(seed), TWO, "batch_fn=.*<lambda> cannot be imported by the ranks"),
    (
        model_of_counted_values,
        tokens,
        TWO,
        "not deterministic: norm.weight differs between two calls",
    ),
    (model, counted_tokens, TWO, r"counted_tokens\(0\) is not deterministic: tensor 0 differs"),
    (
        model_with_dropout,
        tokens,
        TWO,
        r"the output of dropout \(Dropout\) differs.*Set dropout to 0",
    ),
    (model_without_loss, rows, TWO, r"returned a tensor of shape \(8, 3\) in place of a loss"),
    (
        model,
        six_rows,
        TrainingSettings(ranks=4),
        "6 rows, which 4 ranks that see different data cannot",
    ),
    (model_that_overflows, tokens, TrainingSettings(dtype="float16"), "not finite in plain torch"),
    (
        model,
        tokens,
        TrainingSettings(ranks=2, axes={"tp": 2}),
        "along 'tp', and .* pass parallelize=",
    ),
    (model, tokens, TrainingSettings(ranks=2, axes={"pp": 2}), "over 2 stages, .* pass pipeline="),
    (
        model,
        tokens,
        TrainingSettings(ranks=3, axes={"tp": 2}),
        "3 ranks cannot be divided by tp_size=2",
    ),
]


@pytest.mark.parametrize(("model_fn", "batch_fn", "drawn", "error"), ERRORS)
def test_what_cannot_be_compared_is_one_clear_error(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    drawn: TrainingSettings,
    error: str,
) -> None:
    with pytest.raises((ValueError, TypeError), match=error) as caught:
        assert_matches_single(model_fn, batch_fn, settings=drawn)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings_module, "find_spec", lambda name: None)
    with pytest.raises(
        bmt_core.ConfigError,
        match=r"needs bmt-zero, which is not installed. Install it with: ",
    ):
        assert_matches_single(model, tokens)


def test_settings_refuse_what_they_cannot_mean() -> None:
    with pytest.raises(ValueError, match=r"max_norm=1\.0 needs gradients='sum'"):
        TrainingSettings(max_norm=1.0)
    with pytest.raises(ValueError, match="levels must be a tuple with at least one entry"):
        TrainingSettings(levels=())
    with pytest.raises(ValueError, match=r"dtype must be one of .*'bfloat16'.*, not 'half'"):
        TrainingSettings(dtype="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"training_settings\(ranks=...\) needs at least one"):
        training_settings(ranks=())


@given(drawn=training_settings(axes={"tp": (1, 2), "pp": (1, 2)}))
@settings(derandomize=True, database=None)
def test_the_repr_is_an_expression_and_axes_divide_the_ranks(drawn: TrainingSettings) -> None:
    assert eval(repr(drawn)) == drawn
    taken = drawn.axes.get("tp", 1) * drawn.axes.get("pp", 1)
    assert drawn.ranks % taken == 0
    assert 0 not in drawn.frozen_in(1, 3)


def test_settings_shrink_to_the_simplest() -> None:
    def smallest(condition: Callable[[TrainingSettings], bool]) -> TrainingSettings:
        drawn = training_settings(ranks=(1, 2), axes={"tp": (1, 2)})
        return find(drawn, condition, settings=settings(database=None, derandomize=True))

    assert smallest(lambda _: True) == TrainingSettings()
    assert smallest(lambda found: found.ranks > 1 and 3 in found.levels) == TrainingSettings(
        ranks=2, levels=(3,)
    )
    assert smallest(lambda found: any(found.recompute)) == TrainingSettings(recompute=(True,))


def test_every_setting_is_drawn() -> None:
    default = TrainingSettings()
    found = set()

    @given(drawn=training_settings(axes={"tp": (1, 2)}, param_dtypes=(None, "bfloat16")))
    @settings(derandomize=True, database=None)
    def note(drawn: TrainingSettings) -> None:
        names = TrainingSettings.__dataclass_fields__
        found.update(name for name in names if getattr(drawn, name) != getattr(default, name))

    note()
    assert found == set(TrainingSettings.__dataclass_fields__)


def test_what_only_the_last_rank_has_otherwise_is_found() -> None:
    wanted = {"loss": torch.ones(2)}
    (unlike,) = differences(
        [wanted, wanted, wanted],
        [wanted, {"loss": torch.ones(2)}, {"loss": torch.tensor([1.0, 2.0])}],
        floor=lambda *_: 0.1,
        rounding=lambda: [{}] * 3,
        may_lack=False,
    )
    assert (unlike.rank, unlike.index, unlike.found) == (2, (1,), 2.0)
