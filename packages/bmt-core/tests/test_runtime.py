"""Start, state and end of a run."""

from __future__ import annotations

import os
import random
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
from bmt_core.run import runtime
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


@pytest.mark.parametrize("world_size", [1, 2, 4])
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


BAD = [
    ({"tp_size": 3}, {}, "ConfigError", "tp"),
    ({"zero_level": 9}, {}, "ConfigError", "zero_level must be one of"),
    ({"device": "tpu:0"}, {}, "RuntimeError", "tpu"),
    ({"device": "meta"}, {}, "ConfigError", "device must be cpu or cuda"),
    (
        {"axis_sizes": {"ep": 2}},
        {},
        "ConfigError",
        "the axis 'ep' of size 2, which no active plugin provides",
    ),
    ({"comm_backend": "torhc"}, {}, "PluginError", "Did you mean 'torch'"),
    ({}, {"BMT_COMM_BACKEND": "nothing"}, "PluginError", "nothing"),
    ({}, {"RANK": "9"}, "ConfigError", "RANK=9 is outside"),
]


def start(arguments: dict[str, Any]) -> None:
    runtime.init_distributed(**{"device": "cpu", "timeout": 20, **arguments})


@pytest.mark.parametrize(("arguments", "env", "kind", "message"), BAD)
def test_bad_settings_fail_on_every_rank_with_one_clear_error(
    arguments: dict[str, Any], env: dict[str, str], kind: str, message: str
) -> None:
    for outcome in rank_pool(2).outcomes(start, arguments, init=None, env=env, timeout=30):
        assert outcome.error_type == kind and message in (outcome.error_message or "")


def one_rank_cannot_start() -> None:
    runtime.init_distributed(device="meta" if os.environ["RANK"] == "1" else "cpu", timeout=20)


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


def test_a_rank_that_cannot_start_is_named_on_all_others() -> None:
    first, second = rank_pool(2).outcomes(one_rank_cannot_start, init=None, timeout=30)
    assert first.error_type == second.error_type == "ConfigError"
    assert "Rank 1 failed to start: device must be cpu or cuda" in (first.error_message or "")
    assert (second.error_message or "").startswith("device must be cpu or cuda")


def start_with_own(arguments: list[dict[str, Any]], env: list[dict[str, str]]) -> None:
    rank = int(os.environ["RANK"])
    os.environ.update(env[rank])
    runtime.init_distributed(**{"device": "cpu", "timeout": 20, **arguments[rank]})


@pytest.mark.parametrize(
    ("second", "env", "difference"),
    [
        ({"seed": 1}, {}, "seed is 1 instead of 0"),
        ({"zero_level": 2}, {}, "zero_level is 2 instead of 3"),
        ({"num_micro_batches": 4}, {}, "num_micro_batches is 4 instead of None"),
        ({"reduce_dtype": "fp32"}, {}, "reduce_dtype is fp32 instead of fp32-sum"),
        ({"prefetch_bytes": 9}, {}, "prefetch_bytes is 9 instead of None"),
        ({"gradients": "mean"}, {}, "gradients is mean instead of sum"),
        ({"axis_sizes": {"ep": 2}}, {}, "axis_sizes is {'ep': 2} instead of {}"),
        ({"check_calls": False}, {}, "check_calls is False instead of None"),
        ({}, {"BMT_KERNELS": "reference"}, "BMT_KERNELS is 'reference' instead of ''"),
        ({}, {"BMT_COMM_BACKEND": "nothing"}, "comm_backend is nothing instead of torch"),
        (
            {"tp_size": 4, "pipe_size": 2},
            {},
            "pipe_size is 2 instead of 1; tp_size is 4 instead of 1",
        ),
    ],
)
def test_a_setting_of_one_rank_that_differs_is_named_on_every_rank_before_groups_connect(
    second: dict[str, Any], env: dict[str, str], difference: str
) -> None:
    outcomes = rank_pool(4).outcomes(
        start_with_own, [{}, second, {}, {}], [{}, env, {}, {}], init=None, timeout=30
    )
    for outcome in outcomes:
        assert outcome.error_type == "ConfigError"
        assert f"Rank 1 has other settings than rank 0: {difference}" in (
            outcome.error_message or ""
        )


class AxisOfTheEnvironment:
    """Adds an axis whose size and order a rank's environment says."""

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis("mine", int(os.environ["SIZE"]), int(os.environ["ORDER"]))]


def start_with_axis(sizes: list[int], orders: list[int]) -> None:
    rank = int(os.environ["RANK"])
    os.environ.update(SIZE=str(sizes[rank]), ORDER=str(orders[rank]))
    runtime.init_distributed(device="cpu", timeout=20, plugins=[AxisOfTheEnvironment()])


@pytest.mark.parametrize(("sizes", "orders"), [([2, 1], [7, 7]), ([2, 2], [7, 70])])
def test_an_axis_that_differs_between_ranks_is_named_on_every_rank(
    sizes: list[int], orders: list[int]
) -> None:
    for outcome in rank_pool(2).outcomes(start_with_axis, sizes, orders, init=None, timeout=30):
        assert outcome.error_type == "ConfigError"
        expected, found = (
            repr(MeshAxis("mine", size, order)) for size, order in zip(sizes, orders, strict=True)
        )
        assert (outcome.error_message or "").startswith(
            f"Rank 1 has other settings than rank 0: the axis 'mine' is {found} instead"
            f" of {expected}."
        )


def start_with_torch(versions: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.version.__version__", versions[int(os.environ["RANK"])])
        runtime.init_distributed(device="cpu", timeout=20)


def test_another_version_of_torch_on_one_rank_is_named_on_every_rank() -> None:
    for outcome in rank_pool(2).outcomes(
        start_with_torch, ["2.13.0", "2.12.1"], init=None, timeout=30
    ):
        assert outcome.error_type == "ConfigError"
        assert "torch is 2.12.1 instead of 2.13.0" in (outcome.error_message or "")


def test_ranks_may_have_timeouts_of_their_own() -> None:
    run_ranks(start_with_own, 2, [{"timeout": 20}, {"timeout": 30}], [{}, {}], init=None)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, not 0."),
        ({"timeout": -1}, "timeout must be a positive number of seconds, not -1."),
    ],
)
def test_a_bad_setting_of_one_rank_is_an_error_on_every_rank(setting: Any, complaint: str) -> None:
    first, second = rank_pool(2).outcomes(
        start_with_own, [{}, setting], [{}, {}], init=None, timeout=30
    )
    assert first.error_type == second.error_type == "ConfigError"
    assert (
        first.error_message == f"Rank 1 failed to start: {complaint}"
        and second.error_message == complaint
    )


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


def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    said, _ = run_ranks(absent, 2, str(tmp_path / "store"), init=None, timeout=30)
    assert said.count("After 1 s these ranks have not started: 1.") == 3


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


class Named:
    """A plugin that a program passes to init_distributed()."""

    def __init__(self, name: str, version: str = "1.0") -> None:
        self.name = name
        self.__version__ = version

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [MeshAxis(self.name, 2, 7)]


def start_with(plugins: list[list[Any]]) -> tuple[list[str], dict[str, int]]:
    runtime.init_distributed(device="cpu", timeout=20, plugins=plugins[int(os.environ["RANK"])])
    run = runtime.current()
    return [f"{info.name} {info.version}" for info in run.registry.describe()], run.topology.sizes


def start_with_names(names: list[list[tuple[str, str]]]) -> tuple[list[str], dict[str, int]]:
    return start_with([[Named(*name) for name in of_rank] for of_rank in names])


def test_plugins_that_are_passed_are_asked_like_installed_ones() -> None:
    for described, sizes in run_ranks(
        start_with_names, 2, [[("mine", "3")], [("mine", "3")]], init=None
    ):
        assert "mine 3" in described and sizes == {"mine": 2, "dp": 1}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([], "Rank 1 has other plugins than rank 0: mine is missing."),
        ([("mine", "4")], "mine is version 4 instead of version 3"),
        (
            [("mine", "3"), ("mine", "3")],
            "Two plugins are named 'mine'. Give the second an attribute 'name' of its own.",
        ),
    ],
)
def test_plugins_that_are_passed_are_compared_between_ranks(
    second: list[tuple[str, str]], message: str
) -> None:
    for outcome in rank_pool(2).outcomes(
        start_with_names, [[("mine", "3")], second], init=None, timeout=30
    ):
        assert outcome.error_type == "PluginError" and message in (outcome.error_message or "")


def start_with_nonsense(kind: str) -> None:
    module = types.ModuleType("empty")
    runtime.init_distributed(
        device="cpu", plugins=[{"class": Named, "text": "Named", "module": module}[kind]]
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("class", "is a class. Pass an object of it."),
        ("text", "'Named' is a text. Pass the module itself."),
        ("module", "The plugin 'empty' implements no hook."),
    ],
)
def test_what_is_no_plugin_is_refused(kind: str, message: str) -> None:
    (outcome,) = rank_pool(1).outcomes(start_with_nonsense, kind, init=None)
    assert outcome.error_type == "PluginError" and message in (outcome.error_message or "")


def start_with_backend() -> None:
    runtime.init_distributed(device="cpu", comm_backend=int)  # type: ignore[arg-type]


def test_a_class_that_is_no_backend_is_refused() -> None:
    (outcome,) = rank_pool(1).outcomes(start_with_backend, init=None)
    assert (
        outcome.error_message
        == "comm_backend must be a name or a subclass of CommBackend, not <class 'int'>."
    )
