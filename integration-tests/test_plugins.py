"""Third-party packages, installed from ``plugins/``, in runs of two ranks; and plugins that are not
as they should be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import bmt_recording
import pytest
import torch
from bmt_lion import Lion
from chain_models import Chain, batch
from torch import nn

import bmtrain as bmt
from bmt_core.comm import Group
from bmt_core.errors import BmtError, ConfigError, PluginError
from bmt_core.ops import OPERATIONS, KernelProvider, reference
from bmt_core.plugins.hookspecs import hookimpl
from bmt_testing import Outcome, on_ranks, rank_pool, run_ranks

TIME_LIMIT = 60.0
STEPS = 5
BLOCKS = 4


# --- installed and listed ---


@pytest.mark.parametrize("name", ["bmt-lion", "bmt-recording"])
def test_package_is_installed_with_its_entry_point(name: str) -> None:
    (entry,) = entry_points(group="bmt", name=name)
    assert entry.dist is not None
    assert (entry.dist.name, entry.dist.version) == (name, "1.0.0")


def test_bmt_plugins_lists_them_with_what_they_offer() -> None:
    command = [sys.executable, "-m", "bmtrain", "plugins"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        row.split("│")[1].strip(): row for row in result.stdout.splitlines() if row.count("│") > 2
    }
    assert "1.0.0" in rows["bmt-lion"] and "optimizer: lion" in rows["bmt-lion"]
    assert "1.0.0" in rows["bmt-recording"] and "comm backend: recording" in rows["bmt-recording"]


def test_their_sources_import_nothing_private() -> None:
    for path in (Path(__file__).parent / "plugins").glob("*/src/**/*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("from bmt", "import bmt")):
                assert "._" not in line and "import _" not in line, f"{path.name}: {line}"


# --- Lion ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_follows_its_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator).to(dtype) for size in (7, 1, 0, 33)]
    weights = [nn.Parameter(param.clone()) for param in params]
    optimizer = Lion(weights, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    moments = [torch.zeros_like(param) for param in params]
    for _ in range(4):
        grads = [torch.randn(param.shape, generator=generator).to(dtype) for param in params]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()
        for index, (param, grad, moment) in enumerate(zip(params, grads, moments, strict=True)):
            direction = torch.sign(0.8 * moment.double() + 0.2 * grad.double())
            params[index] = (param.double() - 0.01 * (direction + 0.1 * param.double())).to(dtype)
            moments[index] = (0.95 * moment.double() + 0.05 * grad.double()).to(dtype)
    # Each of 4 steps rounds the parameter twice more than the formula above.
    tolerance = 8 * torch.finfo(dtype).eps
    for weight, param in zip(weights, params, strict=True):
        torch.testing.assert_close(weight.data, param, rtol=tolerance, atol=tolerance)


def test_lion_returns_what_a_closure_returns() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    assert Lion([weight], lr=0.1).step(lambda: 2.5) == 2.5
    torch.testing.assert_close(weight.data, torch.full((3,), 0.9))


@pytest.mark.parametrize("setting", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_lion_refuses_settings_that_cannot_work(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Lion([nn.Parameter(torch.ones(1))], **setting)


# --- the recording backend ---


class LeavesNothingOut:
    """A group whose methods return what they were called with, to see what a wrapper passes on."""

    ranks = (4, 7)
    rank = 1

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (name, arguments)


def test_recording_passes_every_operation_on_and_records_it() -> None:
    group = bmt_recording.RecordingGroup(LeavesNothingOut())  # type: ignore[arg-type]
    whole, part = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (whole, part),
        "reduce_scatter": (part, whole, "avg"),
        "all_reduce": (whole, "max"),
        "broadcast": (whole, 1),
        "send": (whole, 0),
        "recv": (whole, 0),
    }
    assert set(arguments) == Group.__abstractmethods__, (
        "an operation of Group is missing in this test"
    )
    bmt_recording.clear()
    for op, values in arguments.items():
        assert getattr(group, op)(*values) == (op, values)
    assert bmt_recording.calls == [
        bmt_recording.Call(op, (4, 7), torch.bfloat16, 6, 12) for op in arguments
    ]
    bmt_recording.clear()
    assert bmt_recording.calls == []
    assert (group.ranks, group.rank, group.size) == ((4, 7), 1, 2)


def recorded_inner(inner: str) -> str:
    os.environ["BMT_RECORDING_INNER"] = inner
    bmt.init_distributed(comm_backend="recording", device="cpu")
    world = bmt.config.comm
    return type(world.connected().inner).__name__


def test_recording_wraps_the_backend_that_is_named() -> None:
    assert run_ranks(recorded_inner, 2, "torch", init=None) == ["TorchGroup"] * 2


@pytest.mark.parametrize(
    ("inner", "error", "text"),
    [
        ("torhc", PluginError, "Did you mean 'torch'?"),
        ("recording", ConfigError, "would wrap itself"),
    ],
)
def test_recording_refuses_an_inner_backend_that_cannot_be(
    inner: str, error: type[BmtError], text: str
) -> None:
    outcomes = rank_pool(2).outcomes(recorded_inner, inner, init=None, timeout=TIME_LIMIT)
    assert [outcome.error_type for outcome in outcomes] == [error.__name__] * 2
    assert all(text in outcome.error_message for outcome in outcomes)


# --- training with both ---


def train_sharded() -> tuple[dict[str, torch.Tensor], list[bmt_recording.Call]]:
    torch.manual_seed(7)
    model = bmt.BMTrainModelWrapper(Chain())
    optimizer = bmt.optim.create("lion", model.parameters(), lr=0.01, weight_decay=0.1)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    bmt_recording.clear()
    for step in range(STEPS):
        manager.zero_grad()
        manager.backward(model(batch(step).chunk(2)[bmt.rank()]))
        manager.step()
    calls = list(bmt_recording.calls)
    return {name: value.clone() for name, value in model.state_dict().items()}, calls


def train_plainly() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Chain()
    optimizer = Lion(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    return model.state_dict()


def test_training_with_both_chosen_by_name_equals_plain_torch() -> None:
    results = run_ranks(train_sharded, 2, init={"comm_backend": "recording"})
    expected = train_plainly()
    for state, calls in results:
        torch.testing.assert_close(state, dict(expected))
        for op in ("all_gather", "reduce_scatter"):
            assert [call.op for call in calls].count(op) >= BLOCKS * STEPS
        assert all(
            call.ranks == (0, 1) and call.bytes == call.numel * call.dtype.itemsize
            for call in calls
        )
    issued = [[call[:4] for call in calls] for _, calls in results]
    assert issued[0] == issued[1], "both ranks must issue the same collectives in the same order"


# --- kernels of a plugin in front of those of bmt-kernels ---


class CountedSums(KernelProvider):
    """One operation, and a count of its calls."""

    name = "sums"
    device_type = "cpu"
    calls = 0

    def available(self) -> str | None:
        return None

    def powers_sum(
        self,
        tensors: Sequence[torch.Tensor],
        p: float,
        weights: Sequence[float],
        device: torch.device,
    ) -> torch.Tensor:
        CountedSums.calls += 1
        return reference.powers_sum(tensors, p, weights, device)


class OffersSums:
    @hookimpl
    def bmt_kernel_providers(self) -> list[type[KernelProvider]]:
        return [CountedSums]


@on_ranks(2, init=None, env={"BMT_KERNELS": ""})
def test_kernel_of_a_plugin_overrides_one_operation_and_the_rest_comes_from_the_next_provider() -> (
    None
):
    bmt.init_distributed(device="cpu", plugins=[OffersSums()])
    model = bmt.BMTrainModelWrapper(Chain())
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    manager.backward(model(batch(0)))
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
    kernels = bmt.current().kernels
    sources = {operation: provider.name for operation, provider in kernels.provider_of.items()}
    assert kernels.name == "sums + cpu"
    assert sources == {**dict.fromkeys(OPERATIONS, "cpu"), "powers_sum": "sums"}
    assert CountedSums.calls == 1


# --- errors: one clear message on every rank, and nobody hangs ---


def start(environments: list[dict[str, str]], paths: list[str | None]) -> None:
    """Start with another environment and other installed packages on each rank."""
    rank = int(os.environ["RANK"])
    os.environ.update(environments[rank])
    before, path = list(sys.path), paths[rank]
    sys.path[:] = [*([] if path is None else [path]), *before]
    try:
        bmt.init_distributed(device="cpu", timeout=30)
    finally:
        sys.path[:] = before


def outcomes_of_start(
    *, environments: list[dict[str, str]] | None = None, paths: list[str | None] | None = None
) -> list[Outcome]:
    """Every rank must fail by itself, within the limit."""
    arguments = (environments or [{}, {}], paths or [None, None])
    outcomes = rank_pool(2).outcomes(start, *arguments, init=None, timeout=TIME_LIMIT)
    assert all(outcome.failed for outcome in outcomes)
    assert not {"Hung", "Died"} & {outcome.error_type for outcome in outcomes}, outcomes
    return outcomes


def assert_same(outcomes: list[Outcome], error: type[BmtError], *texts: str) -> None:
    """Check class and text on every rank; another rank's error may be announced as such."""
    for outcome in outcomes:
        assert outcome.error_type == error.__name__, outcome.traceback
        for text in texts:
            assert text in outcome.error_message
    core = {outcome.error_message.split("failed to start: ")[-1] for outcome in outcomes}
    assert len(core) == 1, core


@pytest.fixture
def distribution(tmp_path: Path) -> Any:
    """Return a function that makes an installed distribution outside of ``sys.path`` and
    returns where.
    """

    def make(name: str, code: str) -> str:
        # Packages of several tests are imported by the same worker processes.
        module = f"{name}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        metadata = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[bmt]\n{name} = {module}\n")
        return str(tmp_path)

    return make


def test_ranks_with_different_plugins_all_raise_one_message() -> None:
    outcomes = outcomes_of_start(environments=[{}, {"BMT_DISABLE_PLUGINS": "bmt-lion"}])
    assert_same(outcomes, PluginError, "Rank 1 has other plugins than rank 0: bmt-lion is missing")
    assert outcomes[0].error_message == outcomes[1].error_message


def test_plugin_that_breaks_one_rank_only_stops_every_rank(distribution: Any) -> None:
    broken = distribution("bmt-broken", "import no_such_module_of_bmt")
    outcomes = outcomes_of_start(paths=[None, broken])
    assert_same(
        outcomes,
        PluginError,
        "'bmt-broken' (bmt-broken 1.0)",
        "No module named 'no_such_module_of_bmt'",
    )
    assert "Rank 1" in outcomes[0].error_message


EXITS_IN_HOOK = """
import os, sys
from bmt_core.plugins.hookspecs import hookimpl
@hookimpl
def {signature}:
    if os.environ["RANK"] == "1":
        sys.exit({code})
    return []
"""


def test_plugin_that_exits_when_imported_is_named_on_every_rank(distribution: Any) -> None:
    exits = distribution("bmt-exiting", "import sys\nsys.exit(0)")
    outcomes = outcomes_of_start(paths=[None, exits])
    assert_same(
        outcomes,
        PluginError,
        "plugin 'bmt-exiting' (bmt-exiting 1.0) cannot be imported",
        "SystemExit",
    )


@pytest.mark.parametrize(
    "signature",
    # Before the ranks know each other, and after.
    ["bmt_mesh_axes(config)", "bmt_comm_backends()", "bmt_run_started(runtime)"],
)
def test_plugin_that_exits_in_a_hook_is_named_on_every_rank(
    distribution: Any, signature: str
) -> None:
    path = distribution("bmt-exiting", EXITS_IN_HOOK.format(signature=signature, code=3))
    outcomes = outcomes_of_start(paths=[path, path])
    hook = signature.partition("(")[0]
    assert_same(
        outcomes,
        PluginError,
        f"plugin 'bmt-exiting' (bmt-exiting 1.0) failed in {hook}(): SystemExit: 3",
    )
