"""The compiled module: what it opens, what it refuses, and that nothing hangs, on stand-ins for
NCCL and the CUDA driver.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_fakes import Fakes, compiled, native
from torch.distributed import HashStore

from bmt_core.errors import ConfigError
from bmt_kernels.nccl import NcclError
from bmt_kernels.nccl.herald import Herald
from bmt_kernels.nccl.library import NAME, VARIABLE, candidates, make_engine, open_library

FLOAT32, SUM, PROD = 7, 0, 1
BUFFER = torch.zeros(4)
SHORT = 0.2  # seconds, where a timeout is to pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return Fakes(tmp_path_factory.mktemp("fakes"))


@pytest.fixture
def fakes(built: Fakes) -> Fakes:
    built.reset()
    return built


@pytest.fixture
def engine(fakes: Fakes) -> Iterator[Any]:
    made = fakes.engine()
    yield made
    made.close(0.0)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_library_is_opened_by_its_path_and_found_again_when_it_is_loaded(fakes: Fakes) -> None:
    library = native().Library(fakes.nccl)
    assert (library.path, library.version) == (fakes.nccl, 22809)
    assert native().Library(fakes.nccl, only_if_loaded=True).path == fakes.nccl
    assert len(library.unique_id()) == 128


def test_a_library_that_is_missing_not_loaded_or_no_library_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("no library")
    for path, loaded, reason in (
        (str(tmp_path / "missing.so"), False, "missing.so: cannot open shared object file"),
        ("libdoes-not-exist.so.7", True, "libdoes-not-exist.so.7 is not loaded"),
        (str(tmp_path / "broken.so"), False, "broken.so: (file too short|invalid ELF header)"),
    ):
        with pytest.raises(OSError, match=reason):
            native().Library(path, loaded)


@pytest.mark.parametrize(("number", "text"), [(21704, "2.17.4"), (30000, "3.0.0"), (2804, "2804")])
def test_a_version_with_another_interface_is_refused(
    number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiled("nccl", tmp_path / "libnccl.so", f"FAKE_VERSION={number}")
    with pytest.raises(
        RuntimeError,
        match=rf"libnccl\.so is NCCL {text}, and bmt-kernels knows NCCL from 2\.18\.0 on, below 3",
    ):
        native().Library(path)
    monkeypatch.setenv(VARIABLE, path)
    with pytest.raises(
        ConfigError, match=rf"NCCL {text}.*Let BMT_NCCL_LIBRARY name another.*comm_backend='torch'"
    ):
        open_library()


def test_a_library_without_a_function_is_refused_by_its_name(tmp_path: Path) -> None:
    path = compiled("nccl", tmp_path / "libnccl.so", "FAKE_WITHOUT_UNIQUE_ID")
    with pytest.raises(RuntimeError, match=r"has no function ncclGetUniqueId"):
        native().Library(path)


def test_nccl_is_what_is_loaded_then_what_lies_beside_torch_then_what_the_loader_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    beside = tmp_path / "nvidia" / "nccl" / "lib" / NAME
    beside.parent.mkdir(parents=True)
    beside.touch()
    monkeypatch.setattr(torch.version, "__file__", str(tmp_path / "torch" / "version.py"))
    found = list(candidates())
    assert found[:2] == [(NAME, True), (str(beside), False)] and found[-1] == (NAME, False)
    monkeypatch.setenv(VARIABLE, "/mine.so")
    assert list(candidates()) == [("/mine.so", False)]
    with pytest.raises(
        ConfigError,
        match=r"NCCL is not found \(/mine\.so: cannot open.*BMT_NCCL_LIBRARY name the file",
    ):
        open_library()


def test_an_engine_needs_a_gpu_and_a_driver(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"this run's device is cpu. Start on GPUs, or choose comm_backend='torch'",
    ):
        make_engine(torch.device("cpu"), 10.0)
    library = native().Library(fakes.nccl)
    with pytest.raises(OSError, match=r"no-driver\.so"):
        native().Engine(library, driver="no-driver.so", device=0, timeout=1.0)
    with pytest.raises(RuntimeError, match=r"cuDeviceGet failed: CUDA_ERROR_OTHER"):
        native().Engine(library, driver=fakes.cuda, device=9, timeout=1.0)
    monkeypatch.setenv(VARIABLE, fakes.nccl)
    monkeypatch.setattr("bmt_kernels.nccl.library._DRIVER", fakes.cuda)
    _, made = make_engine(torch.device("cuda", 1), 10.0)
    assert made.close(1.0)


def test_operations_reach_nccl_with_their_addresses_sizes_and_members(
    fakes: Fakes, engine: Any
) -> None:
    group = fakes.communicator(engine)
    x, wide = torch.arange(4.0), torch.zeros(12)
    group.all_gather(x.data_ptr(), wide.data_ptr(), x.nbytes, 0)
    assert wide.equal(x.repeat(3))
    parts = torch.arange(12.0)
    group.reduce_scatter(parts.data_ptr(), x.data_ptr(), 4, FLOAT32, SUM, 0)
    assert x.tolist() == [12.0, 15.0, 18.0, 21.0]  # slice 1 of three alike
    group.all_reduce(x.data_ptr(), 2, FLOAT32, PROD, 0)
    assert x.tolist() == [12.0**3, 15.0**3, 18.0, 21.0]
    group.broadcast(x.data_ptr(), x.nbytes, 2, 0)
    received = torch.full((3, 4), 9, dtype=torch.uint8)
    group.exchange(
        [(x.data_ptr(), 4, 0)], [(received[0].data_ptr(), 3, 2), (received[1].data_ptr(), 4, 1)], 0
    )
    assert received.tolist() == [[2, 2, 2, 9], [1] * 4, [9] * 4]
    group.all_to_all(x.data_ptr(), received.data_ptr(), 4, 0)
    assert received.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert fakes["ungrouped"] == 0 and fakes["recorded"] == 6


def test_a_healthy_end_finalizes_and_destroys(fakes: Fakes) -> None:
    made = fakes.engine()
    groups = [fakes.communicator(made), fakes.communicator(made)]
    x = torch.zeros(4)
    for group in groups:
        group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0)
    assert made.close(10.0) and made.is_closed
    assert (fakes["finalized"], fakes["destroyed"], fakes["aborted"], fakes["events"]) == (
        2,
        2,
        0,
        0,
    )
    with pytest.raises(NcclError, match=r"closed"):
        groups[0].all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0)
    assert made.close(1.0)


def test_the_end_does_not_wait_for_ever_for_what_others_have_left(fakes: Fakes) -> None:
    made = fakes.engine()
    group = fakes.communicator(made)
    fakes["status"] = 600
    group.all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    assert not made.close(SHORT)
    assert (fakes["destroyed"], fakes["aborted"], fakes["events"]) == (0, 1, 0)


def test_connecting_is_waited_for(fakes: Fakes, engine: Any) -> None:
    group = fakes.communicator(engine)
    fakes["blocks"] = 1
    threading.Timer(SHORT, lambda: fakes.__setitem__("blocks", 0)).start()
    group.exchange([], [(BUFFER.data_ptr(), 4, 0)], 0)
    assert fakes["blocks"] == 0 and fakes["recorded"] == 1


def test_members_that_never_connect_are_an_error_for_whoever_waits_for_them(fakes: Fakes) -> None:
    made = fakes.engine(timeout=SHORT)
    group = fakes.communicator(made)
    fakes["blocks"] = 1
    with pytest.raises(
        NcclError,
        match=(
            r"^send of 16 bytes to rank 4 on rank 6 in the group of ranks .* could not begin within"
            r" 0.2 s"
        ),
    ):
        group.exchange([(BUFFER.data_ptr(), BUFFER.nbytes, 0)], [], 0)
    assert fakes["recorded"] == 0
    fakes["blocks"] = 0
    wait_until(lambda: fakes["aborted"] == 1)
    made.close(0.0)


def test_an_error_that_nccl_finds_while_a_call_begins_names_the_call(fakes: Fakes) -> None:
    made = fakes.engine()
    group = fakes.communicator(made)
    fakes["blocks"] = 1
    threading.Timer(SHORT, lambda: fakes.__setitem__("async_error", 6)).start()
    with pytest.raises(
        NcclError,
        match=r"^send of 16 bytes to rank 4 on rank 6 in .* failed: remote process exited",
    ):
        group.exchange([(BUFFER.data_ptr(), BUFFER.nbytes, 0)], [], 0)
    fakes["blocks"] = 0
    wait_until(lambda: fakes["aborted"] == 1)
    made.close(0.0)


def test_a_communicator_is_aborted_when_the_call_that_looks_for_a_dead_member_has_come_out(
    fakes: Fakes,
) -> None:
    made = fakes.engine(timeout=SHORT)
    groups = [fakes.communicator(made), fakes.communicator(made)]
    fakes["blocks"] = fakes["deaf"] = 1
    # They end by themselves, but later.
    attempts = threading.Timer(5.0, lambda: fakes.__setitem__("blocks", 0))
    attempts.start()
    with pytest.raises(
        NcclError, match=r"^all_reduce of 4 float32 on rank 6 .* could not begin within 0.2 s"
    ):
        groups[0].all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    for group in groups:
        with pytest.raises(
            NcclError, match=r"^all_reduce of 4 float32 on rank 6 .* could not begin within 0.2 s"
        ):
            group.broadcast(BUFFER.data_ptr(), BUFFER.nbytes, 0, 0)
    assert not made.close(1.0)
    assert (fakes["blocks"], fakes["aborted"], fakes["inside"]) == (1, 1, 0)  # the other one
    attempts.cancel()
    fakes["blocks"] = 0
    wait_until(lambda: fakes["aborted"] == 2)
    assert (fakes["inside"], fakes["destroyed"], fakes["events"]) == (0, 0, 0)


def test_a_call_that_waits_for_a_device_that_hangs_is_let_go(fakes: Fakes) -> None:
    made = fakes.engine(timeout=SHORT)
    group = fakes.communicator(made)
    fakes["status"] = 600
    group.all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    fakes["blocks"] = 1
    with pytest.raises(
        NcclError, match=r"^all_reduce of 4 float32 .* has not finished within 0.2 s"
    ):
        group.all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    assert fakes["aborted"] == 1
    made.close(0.0)


def test_a_call_like_none_before_has_a_thread_of_its_own(fakes: Fakes, engine: Any) -> None:
    group = fakes.communicator(engine)
    x, wide = torch.zeros(4), torch.zeros(12)
    calls: list[Callable[[], None]] = [
        lambda: group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0),
        lambda: group.all_reduce(x.data_ptr(), 3, FLOAT32, SUM, 0),
        lambda: group.all_reduce(x.data_ptr(), 3, FLOAT32, PROD, 0),
        lambda: group.reduce_scatter(wide.data_ptr(), x.data_ptr(), 4, FLOAT32, SUM, 0),
        lambda: group.all_gather(x.data_ptr(), wide.data_ptr(), 16, 0),
        lambda: group.broadcast(x.data_ptr(), 16, 0, 0),
        lambda: group.broadcast(x.data_ptr(), 16, 1, 0),
        lambda: group.exchange([(x.data_ptr(), 16, 0)], [], 0),
        lambda: group.exchange([], [(x.data_ptr(), 16, 0)], 0),
        lambda: group.all_to_all(x.data_ptr(), wide.data_ptr(), 4, 0),
    ]
    for is_first in (True, False):
        for call in calls:
            call()
            assert (fakes["thread"] != threading.get_native_id()) == is_first
    # Ways between two members are the same for all sizes.
    group.exchange([(x.data_ptr(), 8, 0)], [], 0)
    assert fakes["thread"] == threading.get_native_id()
    fakes["capturing"] = 1  # a graph is captured by the thread that began it
    group.all_reduce(x.data_ptr(), 1, FLOAT32, SUM, 0)
    assert fakes["thread"] == threading.get_native_id()


def test_members_that_never_join_are_an_error_and_a_communicator_that_comes_late_is_aborted(
    fakes: Fakes,
) -> None:
    made = fakes.engine(timeout=SHORT)
    fakes["blocks"] = 1
    with pytest.raises(
        NcclError,
        match=r"joining on rank 6 in the group of ranks \(4, 6, 9\) could not begin within 0.2 s",
    ):
        fakes.communicator(made)
    assert fakes["aborted"] == 0
    fakes["blocks"] = 0
    wait_until(lambda: fakes["aborted"] == 1)
    made.close(0.0)


def test_joining_is_given_up_when_the_run_fails_elsewhere(fakes: Fakes) -> None:
    made = fakes.engine()
    fakes["blocks"] = 1
    threading.Timer(SHORT, lambda: made.fail("no more")).start()
    with pytest.raises(NcclError, match=r"^no more$"):
        fakes.communicator(made)
    fakes["blocks"] = 0
    wait_until(lambda: fakes["aborted"] == 1)
    made.close(0.0)


def test_an_error_while_joining_is_raised(fakes: Fakes) -> None:
    made = fakes.engine()
    fakes["result"] = 6
    with pytest.raises(
        NcclError, match=r"^joining on rank 6 .* failed: remote process exited \(cable unplugged\)"
    ):
        fakes.communicator(made)
    made.close(0.0)


def test_an_error_of_nccl_names_operation_rank_and_group_and_ends_all_communicators(
    fakes: Fakes,
) -> None:
    made = fakes.engine()
    groups = [fakes.communicator(made), fakes.communicator(made, (6, 7), 0)]
    fakes["result"] = 6
    message = (
        r"^recv of 4 bytes from rank 9 on rank 6 in the group of ranks \(4, 6, 9\) failed: remote"
        r" process exited \(cable"
    )
    with pytest.raises(NcclError, match=message):
        groups[0].exchange([], [(BUFFER.data_ptr(), 4, 2)], 0)
    fakes["result"] = 0
    with pytest.raises(NcclError, match=message):
        groups[1].all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    wait_until(lambda: fakes["aborted"] == 2)
    with pytest.raises(NcclError, match=message):
        fakes.communicator(made)
    assert not made.close(1.0)
    assert fakes["destroyed"] == 0 and fakes["aborted"] == 2


def wherever_it_is(seconds: float = 20.0) -> None:
    """Stand for a program that computes, and calls nothing of ours."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.005)
    pytest.fail("no exception came")


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (
            {"status": 600},
            "has not finished within 0.2 s: another rank has left, hangs, or made other calls",
        ),
        ({"status": 700}, "failed: the device reports CUDA_ERROR_ILLEGAL_ADDRESS"),
        ({"status": 600, "async_error": 6}, r"failed: remote process exited \(.*\)"),
    ],
)
def test_work_that_never_ends_is_aborted_and_raises_where_the_main_thread_is(
    fakes: Fakes, numbers: dict[str, int], reason: str
) -> None:
    made = fakes.engine(timeout=SHORT)
    group = fakes.communicator(made)
    x = torch.zeros(4)
    group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0)
    made.check()
    fakes["status"] = numbers["status"]
    with pytest.raises(
        NcclError,
        match=rf"^all_reduce of 4 float32 on rank 6 in the group of ranks \(4, 6, 9\) {reason}$",
    ):
        group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0)
        # Found before there is an operation, it would be an error of the group alone.
        fakes["async_error"] = numbers.get("async_error", 0)
        wherever_it_is()
    wait_until(lambda: fakes["aborted"] == 1)
    for _ in range(2):
        with pytest.raises(NcclError, match=r"all_reduce of 4 float32"):
            group.broadcast(x.data_ptr(), 16, 0, 0)
    assert not made.close(1.0)


def test_an_error_that_nccl_finds_in_the_background_is_raised(fakes: Fakes) -> None:
    made = fakes.engine()
    fakes.communicator(made)
    with pytest.raises(
        NcclError, match=r"^NCCL on rank 6 in the group of ranks .* failed: remote process exited"
    ):
        fakes["async_error"] = 6
        wherever_it_is()
    assert not made.close(1.0)


def test_a_queue_that_moves_is_no_timeout(fakes: Fakes) -> None:
    """What counts is how long an operation is the next to finish, not how long ago it
    was issued.
    """
    made = fakes.engine(timeout=4 * SHORT)
    group = fakes.communicator(made)
    x = torch.zeros(4)
    for _ in range(8):
        fakes["status"] = 600
        group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0)
        time.sleep(SHORT)
        fakes["status"] = 0
        time.sleep(SHORT)
    made.check()
    assert made.close(1.0)


def test_an_error_of_the_device_is_raised_by_the_call_that_meets_it(fakes: Fakes) -> None:
    made = fakes.engine()
    group = fakes.communicator(made)
    fakes["record_status"] = 700
    with pytest.raises(
        NcclError,
        match=(
            r"^broadcast of 16 bytes from rank 4 on rank 6 .* reports CUDA_ERROR_ILLEGAL_ADDRESS$"
        ),
    ):
        group.broadcast(BUFFER.data_ptr(), BUFFER.nbytes, 0, 0)
    assert not made.close(1.0)
    assert fakes["events"] == 0


def test_what_is_captured_in_a_graph_is_not_watched(fakes: Fakes, engine: Any) -> None:
    fakes["capturing"] = 1
    fakes.communicator(engine).all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)
    assert fakes["recorded"] == 0


def test_other_threads_run_while_nccl_takes_its_time(fakes: Fakes, engine: Any) -> None:
    group = fakes.communicator(engine)
    fakes["microseconds"] = 300_000
    x = torch.zeros(4)
    caller = threading.Thread(target=lambda: group.all_reduce(x.data_ptr(), 4, FLOAT32, SUM, 0))
    began = time.monotonic()
    caller.start()
    turns = 0
    while caller.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 20 and time.monotonic() - began >= 0.3


def test_a_failure_of_one_rank_is_told_to_the_others_through_the_store(fakes: Fakes) -> None:
    store = HashStore()
    engines = [fakes.engine(), fakes.engine()]
    heralds = [Herald(made, store, rank) for rank, made in enumerate(engines)]
    for herald in heralds:
        herald.start()
    with pytest.raises(NcclError, match=r"^no more$"):
        engines[1].fail("no more")
        engines[1].check()
    with pytest.raises(NcclError, match=r"^NCCL was aborted on rank 0, as rank 1 failed: no more$"):
        wherever_it_is()
    for made, herald in zip(engines, heralds, strict=True):
        made.close(0.0)
        herald.join(10.0)
        assert not herald.is_alive()


def test_heralds_end_with_their_engines(fakes: Fakes) -> None:
    made = fakes.engine()
    herald = Herald(made, HashStore(), 0)
    herald.start()
    made.close(1.0)
    herald.join(10.0)
    assert not herald.is_alive()


def test_an_engine_that_nobody_closes_does_not_hold_up_the_process(fakes: Fakes) -> None:
    made = fakes.engine()
    group = fakes.communicator(made)
    del made
    with pytest.raises(NcclError, match=r"closed"):
        group.all_reduce(BUFFER.data_ptr(), 4, FLOAT32, SUM, 0)


def test_nobody_asks_about_a_communicator_while_it_is_given_back(fakes: Fakes) -> None:
    made = fakes.engine()
    fakes["asking"] = 300_000
    fakes.communicator(made)
    time.sleep(SHORT)  # the watcher asks, and will be done before the end is, which asks next
    threading.Timer(SHORT / 4, lambda: made.fail("no more")).start()
    assert not made.close(10.0)
    assert (fakes["aborted"], fakes["torn"]) == (1, 0)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_fork_that_ends_waits_for_none_of_the_threads_it_does_not_have(
    fakes: Fakes, is_closed: bool
) -> None:
    made = fakes.engine()
    group = fakes.communicator(made)
    time.sleep(SHORT)  # the watcher waits
    child = os.fork()
    if child == 0:
        if is_closed:
            made.close(1.0)
        del group, made
        gc.collect()
        os._exit(0)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert made.close(1.0)
    assert (fakes["destroyed"], fakes["aborted"]) == (1, 0)
