"""Which optimizers may have sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from managed import Unaware

from bmt_core.errors import ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import current
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, AdamW, OptimManager, by_name, create
from bmt_params.guards import optimizer_kind
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks


class AdamW8bit(torch.optim.AdamW):
    """Is elementwise, whatever its name says."""


class Normed(Unaware):
    """Needs the norm of a whole gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class Together(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
        super().step()


class MustHaveAClosure(Unaware):
    bmt_elementwise = True

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class CallsItsClosure(Unaware):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


class Declared(Unaware):
    bmt_elementwise = False


class OwnMuon(torch.optim.Muon):
    """Gathers whole parameters, and says so."""

    bmt_elementwise = True


class NamedMuon(torch.optim.Muon):
    """Goes by shapes, where torch's goes by ``ndim``."""

    name = "muon"

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(len(p.shape) != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("NamedMuon takes 2D tensors.")


class Plugin:
    @hookimpl
    def bmt_optimizers(self) -> list[Any]:
        return [NamedMuon]


ELEMENTWISE: list[Any] = [
    AdamOptimizer,
    AdamOffloadOptimizer,
    torch.optim.AdamW,
    torch.optim.SGD,
    Unaware,
    OwnMuon,
    AdamW8bit,
]
OF_SHAPE: dict[Any, str] = {
    torch.optim.Adafactor: (
        "a 1-D slice: stepping a matrix as a 1-D tensor gives another result than stepping it whole"
    ),
    Declared: "bmt_elementwise = False",
}
OF_VALUES: dict[Any, str] = {
    Together: "stepping two tensors together gives another result than stepping each alone",
    Normed: "stepping a tensor in parts gives another result than stepping it whole",
}


@on_ranks(1, 2)
def test_optimizers_that_need_whole_parameters_are_refused_for_sharded_ones() -> None:
    p, manager = DistributedParameter(torch.ones(4, 3)), OptimManager()
    for kind, reason in {**OF_SHAPE, **(OF_VALUES if p.is_sharded else {})}.items():
        with pytest.raises(
            ConfigError, match=f"^{kind.__name__} cannot train sharded .*{reason}"
        ) as caught:
            manager.add_optimizer(kind([p]), whole="refuse")
        assert "bmt_elementwise = True" in str(caught.value) and not manager.optimizers
    for kind in [*ELEMENTWISE, *([] if p.is_sharded else OF_VALUES)]:
        OptimManager().add_optimizer(kind([p]), whole="refuse")


def test_any_optimizer_may_have_ordinary_parameters() -> None:
    for kind in [*ELEMENTWISE, *OF_SHAPE, *OF_VALUES]:
        OptimManager().add_optimizer(kind([torch.nn.Parameter(torch.ones(4, 3))]))


@on_ranks(1, 2)
def test_optimizers_whose_step_needs_a_closure_are_refused_at_once() -> None:
    for kind in (torch.optim.LBFGS, MustHaveAClosure, CallsItsClosure):
        for p in (torch.nn.Parameter(torch.ones(4, 3)), DistributedParameter(torch.ones(4, 3))):
            manager = OptimManager()
            for whole in ("auto", "refuse", True):
                with pytest.raises(
                    ConfigError, match=f"^The step of {kind.__name__} needs a closure.*AdamW"
                ):
                    manager.add_optimizer(kind([p]), whole=whole)  # type: ignore[arg-type]
            assert not manager.optimizers


def test_own_optimizers_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_kind, "twin_of", None)
    for kind in (AdamOptimizer, AdamW, AdamOffloadOptimizer):
        assert optimizer_kind.kind_of(kind([torch.nn.Parameter(torch.ones(3))])).needs == "elements"


@on_ranks(1, 2, own_run=True)  # to which it adds a plugin
def test_an_optimizer_by_name_that_takes_matrices_only_says_what_to_do() -> None:
    current().registry.register(Plugin(), "muon")
    p = DistributedParameter(torch.ones(4, 3))
    for params in ([p], iter([p]), [{"params": [p], "lr": 0.1}], [("weight", p)]):
        with pytest.raises(
            ConfigError,
            match=r"NamedMuon cannot be made for sharded .*2D.*bmt\.optim\.whole\(NamedMuon",
        ):
            create("muon", params)
    # What is wrong with whole parameters too is the constructor's own error.
    with pytest.raises(ValueError, match="2D"):
        create("muon", [DistributedParameter(torch.ones(4))])
    with pytest.raises(ValueError, match="earning rate"):
        create("muon", [p], lr=-1.0)
    assert isinstance(create("muon", [torch.nn.Parameter(torch.ones(4, 3))]), NamedMuon)
    assert isinstance(torch.optim.Muon([p]), torch.optim.Optimizer)


def test_own_optimizers_by_name_load_no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_name.Registry, "load", None)
    p = torch.nn.Parameter(torch.ones(3))
    assert [type(create(name, [p])) for name in ("adam", "adamw", "adam_offload")] == [
        AdamOptimizer,
        AdamW,
        AdamOffloadOptimizer,
    ]
