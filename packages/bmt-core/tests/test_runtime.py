"""Start, state and end of a run."""

from __future__ import annotations

import os
import random
import re
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmt_core.comm import TorchBackend, torch_backend
from bmt_core.errors import ConfigError, NotInitializedError, RemoteError
from bmt_core.plugins import Registry
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run import rendezvous, runtime
from bmt_core.run.collectives import all_reduce
from bmt_core.settings import MeshAxis, RunSettings
from bmt_testing import rank_pool, run_ranks


def test_before_init_questions_have_answers_and_work_an_error() -> None:
    assert (runtime.rank(), runtime.world_size(), runtime.is_initialized()) == (0, 1, False)
    with pytest.raises(NotInitializedError, match=r"Call init_distributed\(\) first"):
        runtime.current()
    runtime.shutdown()


def cycles() -> list[int]:
    ranks = []
    for _ in range(3):
        runtime.init_distributed(device="cpu")
        with pytest.raises(ConfigError, match="initialised already"):
            runtime.init_distributed(device="cpu")
        total = torch.ones(1)
        runtime.current().world.all_reduce(total).wait()
        runtime.synchronize()
        ranks.append(int(total))
        runtime.shutdown()
        runtime.shutdown()
        assert not runtime.is_initialized()
    return ranks


@pytest.mark.parametrize("world_size", [1, 4])
def test_init_shutdown_init_works_in_one_process(world_size: int) -> None:
    assert run_ranks(cycles, world_size, init=None) == [[world_size] * 3] * world_size


def ended_though_a_callback_fails() -> list[str]:
    """What has run at a shutdown of which one callback is interrupted, and at the one of the run
    after it.
    """
    ran = []

    def interrupt() -> None:
        ran.append("first")
        raise KeyboardInterrupt

    runtime.init_distributed(device="cpu")
    runtime.current().at_shutdown += [interrupt, lambda: ran.append("second")]
    with pytest.raises(KeyboardInterrupt):
        runtime.shutdown()
    assert not runtime.is_initialized()
    runtime.init_distributed(device="cpu")
    runtime.synchronize()
    runtime.shutdown()
    return ran


def test_a_shutdown_ends_the_run_though_a_callback_fails() -> None:
    assert run_ranks(ended_though_a_callback_fails, 2, init=None) == [["first", "second"]] * 2


def settings_left_alone() -> bool:
    before = (
        torch.get_num_threads(),
        os.sched_getaffinity(0),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.enabled,
    )
    runtime.init_distributed(device="cpu")
    after = (
        torch.get_num_threads(),
        os.sched_getaffinity(0),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.enabled,
    )
    return before == after


def test_threads_affinity_and_cudnn_stay_the_users() -> None:
    assert run_ranks(settings_left_alone, 2, init=None) == [True, True]


def pinned() -> set[int]:
    before = os.sched_getaffinity(0)
    try:
        runtime.init_distributed(device="cpu", pin_cpu=True)
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(os.cpu_count() == 1, reason="two shares of one core are the same core")
def test_pin_cpu_gives_each_rank_its_share() -> None:
    first, second = run_ranks(pinned, 2, init=None)
    assert first and second and not first & second


def draws() -> tuple[float, float, float]:
    import numpy

    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_every_rank_is_seeded_alike_and_as_plain_torch() -> None:
    numpy = pytest.importorskip("numpy")  # no dependency: seeded where it is installed
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    assert run_ranks(draws, 2, init={"seed": 7}) == [draws()] * 2


def announced(capture: bool = True) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runtime.init_distributed(device="cpu")
    return text.getvalue()


def test_one_line_on_rank_0_says_what_runs() -> None:
    first, second = run_ranks(announced, 2, init=None)
    assert first.count("\n") == 1 and second == ""
    plugins = Registry.load().describe()
    for word in ("2 ranks", "dp=2", "cpu", "backend torch", "kernels", f"{len(plugins)} plugins"):
        assert word in first
    assert not any(plugin.name in first for plugin in plugins) and len(first) < 100


class AxisOfTheEnvironment:
    """Adds an axis whose size and order a rank's environment says."""

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis("mine", int(os.environ["SIZE"]), int(os.environ["ORDER"]))]


class Named:
    """A plugin that a program passes to init_distributed()."""

    def __init__(self, name: str, version: str = "1.0") -> None:
        self.name = name
        self.__version__ = version

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis(self.name, 2, 7)]


# Arguments of init_distributed(); names in capitals are variables of the environment.
BAD_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 3}, "ConfigError: .*tp"),
    ({"zero_level": 9}, "ConfigError: .*zero_level must be one of"),
    ({"device": "tpu:0"}, "RuntimeError: .*tpu"),
    ({"device": "meta"}, "ConfigError: .*device must be cpu or cuda"),
    ({"axis_sizes": {"ep": 2}}, "ConfigError: .*'ep' of size 2, which no active plugin provides"),
    ({"comm_backend": "torhc"}, "PluginError: .*Did you mean 'torch'"),
    ({"BMT_COMM_BACKEND": "nothing"}, "PluginError: .*nothing"),
    ({"RANK": "9"}, "ConfigError: RANK=9 is outside"),
    ({"comm_backend": int}, "comm_backend must be a name or a subclass of CommBackend, not <class"),
    ({"plugins": [Named]}, "PluginError: .*is a class. Pass an object of it."),
    ({"plugins": ["Named"]}, "PluginError: .*'Named' is a text. Pass the module itself."),
    ({"plugins": [types.ModuleType("empty")]}, "PluginError: The plugin 'empty' implements no ho"),
]
BAD_ON_RANK_1: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 0}, "ConfigError: tp_size must be at least 1, not 0."),
    ({"timeout": -1}, "ConfigError: timeout must be a positive number of seconds, not -1."),
    ({"device": "meta"}, "ConfigError: device must be cpu or cuda"),
]
MINE = {"plugins": [Named("mine", "3")]}
AXIS = {"plugins": [AxisOfTheEnvironment()], "SIZE": "2", "ORDER": "7"}
SETTINGS = "ConfigError: Rank 1 has other settings than rank 0: "
UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"seed": 1}, f"{SETTINGS}seed is 1 instead of 0"),
    ({}, {"zero_level": 2}, f"{SETTINGS}zero_level is 2 instead of 3"),
    ({}, {"num_micro_batches": 4}, f"{SETTINGS}num_micro_batches is 4 instead of None"),
    ({}, {"reduce_dtype": "fp32"}, f"{SETTINGS}reduce_dtype is fp32 instead of fp32-sum"),
    ({}, {"prefetch_bytes": 9}, f"{SETTINGS}prefetch_bytes is 9 instead of None"),
    ({}, {"gradients": "mean"}, f"{SETTINGS}gradients is mean instead of sum"),
    ({}, {"axis_sizes": {"ep": 2}}, f"{SETTINGS}axis_sizes is {{'ep': 2}} instead of {{}}"),
    ({}, {"check_calls": False}, f"{SETTINGS}check_calls is False instead of None"),
    ({}, {"BMT_KERNELS": "reference"}, f"{SETTINGS}BMT_KERNELS is 'reference' instead of ''"),
    ({}, {"BMT_COMM_BACKEND": "nothing"}, f"{SETTINGS}comm_backend is nothing instead of torch"),
    (
        {},
        {"tp_size": 4, "pipe_size": 2},
        f"{SETTINGS}pipe_size is 2 instead of 1; tp_size is 4 instead of 1",
    ),
    (
        AXIS,
        {**AXIS, "SIZE": "1"},
        f"{SETTINGS}the axis 'mine' is {MeshAxis('mine', 1, 7)!r} instead of"
        f" {MeshAxis('mine', 2, 7)!r}.",
    ),
    (
        AXIS,
        {**AXIS, "ORDER": "70"},
        f"{SETTINGS}the axis 'mine' is {MeshAxis('mine', 2, 70)!r} instead of"
        f" {MeshAxis('mine', 2, 7)!r}.",
    ),
    ({"TORCH": "2.13.0"}, {"TORCH": "2.12.1"}, f"{SETTINGS}torch is 2.12.1 instead of 2.13.0"),
    (MINE, {}, "PluginError: Rank 1 has other plugins than rank 0: mine is missing."),
    (
        MINE,
        {"plugins": [Named("mine", "4")]},
        "PluginError: Rank 1 has other plugins than rank 0: mine is version 4 instead of version 3",
    ),
]
TWICE = "PluginError: Two plugins are named 'mine'. Give the second an attribute 'name' of its own."


def error_of_start(options: dict[str, Any]) -> str:
    """Start with these options, and end. Return the error, or an empty text."""
    variables = {name: value for name, value in options.items() if name.isupper()}
    arguments = {name: value for name, value in options.items() if not name.isupper()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        if "TORCH" in variables:
            patch.setattr("torch.version.__version__", variables["TORCH"])
        try:
            runtime.init_distributed(**{"device": "cpu", "timeout": 20, **arguments})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            runtime.shutdown()
    return ""


def errors_of_starts() -> dict[str, list[str]]:
    rank = int(os.environ["RANK"])
    return {
        "everywhere": [error_of_start(options) for options, _ in BAD_EVERYWHERE],
        "on rank 1": [error_of_start(options if rank else {}) for options, _ in BAD_ON_RANK_1],
        "unlike": [error_of_start((first, second)[rank]) for first, second, _ in UNLIKE],
        "twice": [error_of_start({"plugins": [*MINE["plugins"]] * (1 + rank)})],
        "timeouts": [error_of_start({"timeout": 20 + rank})],
    }


def test_starts_that_fail_say_why_on_every_rank_and_the_next_one_works() -> None:
    """Settings that are wrong, on all ranks or on one, and settings, axes, plugins and versions
    that differ, which are named before groups connect. Timeouts may differ.
    """
    first, second = run_ranks(errors_of_starts, 2, init=None, timeout=120)
    for said in (first, second):
        for (options, pattern), found in zip(BAD_EVERYWHERE, said["everywhere"], strict=True):
            assert re.search(pattern, found), (options, found)
        for (_, options, text), found in zip(UNLIKE, said["unlike"], strict=True):
            assert found.startswith(text), (options, found)
        assert TWICE.partition(": ")[2] in said["twice"][0] and said["timeouts"] == [""]
        assert said["twice"][0].startswith("PluginError: ")
    for (_, text), zero, one in zip(
        BAD_ON_RANK_1, first["on rank 1"], second["on rank 1"], strict=True
    ):
        assert one.startswith(text)
        assert zero.startswith(text.replace(": ", ": Rank 1 failed to start: ", 1)), zero


def one_rank_fails_when_all_have_connected() -> None:
    make = torch_backend.make_process_group

    def fail(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options)
        raise RuntimeError("Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(torch_backend, "make_process_group", fail)
        runtime.init_distributed(device="cpu", timeout=300)


def test_a_rank_that_fails_when_all_have_connected_is_named_on_the_others() -> None:
    first, second = rank_pool(2).outcomes(
        one_rank_fails_when_all_have_connected, init=None, timeout=60
    )
    assert second.error_type == "RuntimeError"
    assert first.error_message == "Rank 1 failed to start: RuntimeError: Too many open files"


def one_rank_fails_while_another_connects() -> None:
    make, close = torch_backend.make_process_group, TorchBackend.close
    store, is_failing = (
        dist.PrefixStore(
            "test", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        ),
        os.environ["RANK"] == "1",
    )

    def connect(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        if is_failing:
            raise RuntimeError("Too many open files")
        store.wait(["closed"])
        made.allreduce(torch.ones(1)).wait()  # gloo fails, as if it were still connecting
        return made

    def close_and_tell(backend: Any) -> None:
        close(backend)
        if is_failing:
            store.set("closed", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "make_process_group", connect)
        patch.setattr(TorchBackend, "close", close_and_tell)
        runtime.init_distributed(device="cpu", timeout=300)


def test_a_rank_that_fails_while_another_connects_is_named_there_too() -> None:
    first, second = rank_pool(2).outcomes(
        one_rank_fails_while_another_connects, init=None, timeout=60
    )
    assert second.error_type == "RuntimeError"
    assert first.error_message == "Rank 1 failed to start: RuntimeError: Too many open files"


def own_backend() -> str:
    class Mine(TorchBackend):
        name = "mine"

    runtime.init_distributed(device="cpu", comm_backend=Mine)
    return runtime.current().backend.name


def test_where_a_name_is_accepted_a_class_is_too() -> None:
    assert run_ranks(own_backend, 2, init=None) == ["mine", "mine"]


def absent(file: str) -> str:
    """Rank 0 waits for another rank, in a run whose store the launcher serves, in one where rank 0
    does, and in one whose store is ``file``.
    """
    if os.environ["RANK"] == "1":
        return ""
    said = []
    for is_served in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_served))
            patch.setenv("MASTER_PORT", os.environ["MASTER_PORT"] if is_served else "0")
            patch.setattr("bmt_core.run.start_section.WARN_AFTER", 0.5)
            with pytest.raises(RemoteError) as caught:
                runtime.init_distributed(device="cpu", timeout=1)
            said.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RemoteError) as caught:
        patch.setattr("bmt_core.run.start_section.WARN_AFTER", 0.5)
        runtime.init_distributed(device="cpu", timeout=1, init_method=f"file://{file}")
    return " ".join([*said, str(caught.value)])


@pytest.mark.slow("bmt-core")
def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    said, _ = run_ranks(absent, 2, str(tmp_path / "store"), init=None, timeout=30)
    assert said.count("After 1 s these ranks have not started: 1.") == 3


def meet_in_file(file: str, is_late: bool) -> float:
    """Meet the other rank as new processes do; the rank that ``is_late`` comes after it."""
    rendezvous._stores.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_starts", 0)
        if is_late:
            time.sleep(1)
        runtime.init_distributed(device="cpu", timeout=20, init_method=f"file://{file}")
    total = all_reduce(torch.ones(())).item()
    runtime.shutdown()
    return total


def meet_again_in_file(file: str) -> list[float]:
    rank = int(os.environ["RANK"])
    return [meet_in_file(file, rank == late) for late in (1, 0)]


def test_ranks_meet_in_a_file_that_an_earlier_run_has_left(tmp_path: Path) -> None:
    assert run_ranks(meet_again_in_file, 2, str(tmp_path / "store"), init=None) == [[2, 2]] * 2


def test_a_file_in_a_folder_that_is_not_there_is_refused() -> None:
    for outcome in rank_pool(2).outcomes(meet_in_file, "/absent/store", False, init=None):
        assert outcome.error_type == "ConfigError"
        assert "'/absent', which does not exist" in outcome.error_message


def nobody_serves_the_store() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", "9")
        with pytest.raises(RemoteError) as caught:
            runtime.init_distributed(device="cpu", timeout=1)
    return str(caught.value)


def test_a_store_that_cannot_be_reached_is_named() -> None:
    for rank, said in enumerate(run_ranks(nobody_serves_the_store, 2, init=None, timeout=30)):
        assert said.startswith(
            f"Rank {rank} cannot reach 127.0.0.1:9, where rank 0 or the launcher should be: "
        )


def with_own_plugin() -> tuple[list[str], dict[str, int]]:
    runtime.init_distributed(device="cpu", timeout=20, plugins=MINE["plugins"])
    run = runtime.current()
    return [f"{info.name} {info.version}" for info in run.registry.describe()], run.topology.sizes


def test_plugins_that_are_passed_are_asked_like_installed_ones() -> None:
    for described, sizes in run_ranks(with_own_plugin, 2, init=None):
        assert "mine 3" in described and sizes == {"mine": 2, "dp": 1}
