"""The testing kit itself: results, failures, hangs and deaths of ranks, without the runtime."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from bmt_core.launch import Launch
from bmt_testing import (
    Outcome,
    RankError,
    RankFailure,
    RankPool,
    gpu_ranks,
    pytest_plugin,
    rank_pool,
    run_ranks,
)


@dataclass(frozen=True)
class Pair:
    first: int
    second: torch.Tensor


class AwkwardError(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(f"because of {reason}")


def rank() -> int:
    return int(os.environ["RANK"])


def launch_variables() -> tuple[str, ...]:
    return tuple(
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )


def sum_over_ranks(value: float) -> float:
    dist.init_process_group("gloo")
    tensor = torch.tensor([value * (rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def leave_a_key() -> bool:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    seen = store.check(["left behind"])
    dist.barrier()
    store.set("left behind", "1")
    return seen


def swap(pair: Pair) -> Pair:
    return Pair(int(pair.second.sum()), torch.full((3,), pair.first))


def raise_on(failing_rank: int) -> None:
    if rank() == failing_rank:
        raise FileNotFoundError(2, "no such thing", "thing")


def raise_everywhere() -> None:
    raise AwkwardError(reason="rain")


def raise_while_others_reduce() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 0:
        raise ValueError("rank 0 gave up")
    dist.all_reduce(torch.ones(1))


def wait_for_ever_on(hanging_rank: int) -> str:
    if rank() == hanging_rank:
        threading.Event().wait()
    return "done"


def raise_or_wait_for_ever() -> None:
    if rank() == 0:
        raise ValueError("rank 0 gave up")
    threading.Event().wait()


def exit_on(dying_rank: int) -> str:
    if rank() == dying_rank:
        os._exit(7)
    return "done"


def process_id() -> int:
    return os.getpid()


def spoil_the_process() -> None:
    os.environ["SPOILED"] = "yes"
    os.environ["HOME"] = "nowhere"
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    os.chdir("/")


def spoiled_parts() -> tuple[object, ...]:
    return (
        os.environ.get("SPOILED"),
        os.environ["HOME"],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        os.getcwd(),
    )


def environment(name: str) -> str | None:
    return os.environ.get(name)


class Careless:
    """Raises where no caller can catch it."""

    def __del__(self) -> None:
        raise ValueError("nobody would hear of it")


def lose_an_error_on(careless_rank: int) -> None:
    if rank() == careless_rank:
        Careless()


def fail_in_shutdown_on(failing_rank: int) -> None:
    def fail() -> None:
        raise OSError("cannot leave")

    from bmt_core.run.runtime import current  # other tests here do without the runtime

    if rank() == failing_rank:
        current().at_shutdown.append(fail)


def return_a_lambda() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_rank_runs_and_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(launch_variables, world_size, init=None)
    assert results == [
        (str(rank), str(world_size), str(rank), str(world_size)) for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_meet_and_reduce(world_size: int) -> None:
    expected = 0.5 * sum(range(1, world_size + 1))
    assert run_ranks(sum_over_ranks, world_size, 0.5, init=None) == [expected] * world_size


def test_nothing_in_the_store_outlives_a_run() -> None:
    assert run_ranks(leave_a_key, 2, init=None) == [False, False]
    assert run_ranks(leave_a_key, 2, init=None) == [False, False]


def test_arguments_and_results_of_the_test_modules_own_classes_travel() -> None:
    first, second = run_ranks(swap, 2, Pair(4, torch.arange(3)), init=None)
    assert first.first == second.first == 3
    assert torch.equal(first.second, torch.full((3,), 4))


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_on, 2, 1, init=None)
    assert caught.value.errors == {
        1: RankError("FileNotFoundError", "[Errno 2] no such thing: 'thing'")
    }
    assert "raise_on failed on 1 of 2 ranks." in str(caught.value)
    assert "rank 0: returned" in str(caught.value)
    assert "in raise_on" in str(caught.value)


def test_the_exception_object_comes_along_where_it_can_be_pickled() -> None:
    good, bad = rank_pool(2).outcomes(raise_on, 1, init=None)
    assert good == Outcome(rank=0) and not good.failed
    assert isinstance(bad.error, FileNotFoundError) and bad.error.filename == "thing"
    for outcome in rank_pool(2).outcomes(raise_everywhere, init=None):
        assert (outcome.error_type, outcome.error_message, outcome.error) == (
            "AwkwardError",
            "because of rain",
            None,
        )


def test_equal_tracebacks_are_shown_once() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(raise_everywhere, 4, init=None)
    assert "----- rank 0, 1, 2, 3 -----" in str(caught.value)
    assert str(caught.value).count("in raise_everywhere") == 1


def test_a_failing_rank_frees_the_ranks_that_wait_for_it() -> None:
    outcomes = rank_pool(2).outcomes(raise_while_others_reduce, init=None)
    assert [outcome.error_type for outcome in outcomes] == ["ValueError", "RuntimeError"]
    assert run_ranks(rank, 2, init=None) == [0, 1]


def test_a_rank_that_hangs_is_killed_and_named() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(wait_for_ever_on, 2, 1, init=None, timeout=2)
    assert caught.value.errors == {1: ("Hung", "Killed after 2 s.")}
    assert "in wait_for_ever_on" in caught.value.outcomes[1].traceback
    assert caught.value.outcomes[0].value == "done"
    assert run_ranks(rank, 2, init=None) == [0, 1]


def test_ranks_that_hang_after_another_failed_have_their_grace_only() -> None:
    outcomes = rank_pool(2).outcomes(raise_or_wait_for_ever, init=None, grace=1)
    assert outcomes[0].error_message == "rank 0 gave up"
    assert (outcomes[1].error_type, outcomes[1].error_message) == (
        "Hung",
        "Killed 1 s after another rank had failed.",
    )


def test_a_rank_that_dies_is_reported_and_replaced() -> None:
    pool = RankPool(2)
    try:
        before = pool.run(process_id, init=None)
        outcomes = pool.outcomes(exit_on, 0, init=None)
        after = pool.run(process_id, init=None)
    finally:
        pool.close()
    assert outcomes[0].error_type == "Died" and "exit code 7" in outcomes[0].error_message
    assert outcomes[1].value == "done"
    # NCCL reads the variable of its host once in a process, so each process keeps its rank.
    assert before[1] == after[1] and before[0] != after[0]


def test_processes_are_kept_for_three_numbers_of_ranks() -> None:
    before = [run_ranks(process_id, size, init=None) for size in (1, 2, 4)]
    assert [run_ranks(process_id, size, init=None) for size in (1, 2, 4)] == before
    run_ranks(process_id, 3, init=None)
    assert run_ranks(process_id, 2, init=None) == before[1]
    assert run_ranks(process_id, 1, init=None) != before[0]
    assert rank_pool(2) is rank_pool(2)


def test_a_closed_pool_starts_again() -> None:
    pool = RankPool(1)
    try:
        first = pool.run(process_id, init=None)
        pool.close()
        assert pool.run(process_id, init=None) != first
    finally:
        pool.close()


def test_what_a_job_changes_in_its_process_is_put_back() -> None:
    before = run_ranks(spoiled_parts, 2, init=None)
    run_ranks(spoil_the_process, 2, init=None)
    assert run_ranks(spoiled_parts, 2, init=None) == before
    assert before[0][2:5] == (torch.float32, torch.device("cpu"), 1)


def test_env_reaches_the_ranks_of_one_run_only() -> None:
    assert run_ranks(
        environment, 2, "BMT_TEST_COLOUR", init=None, env={"BMT_TEST_COLOUR": "red"}
    ) == ["red", "red"]
    assert run_ranks(environment, 2, "BMT_TEST_COLOUR", init=None) == [None, None]


def launch() -> tuple[int, int, str | None]:
    place = Launch.from_env()
    return place.local_rank, place.local_world_size, os.environ.get("NCCL_HOSTID")


def test_ranks_that_share_gpus_seem_to_be_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run_ranks(launch, 3, init=None) == [(0, 3, None), (1, 3, None), (2, 3, None)]
    assert gpu_ranks() == 2
    monkeypatch.setenv("BMT_TEST_RANKS_PER_GPU", "2")
    assert gpu_ranks() == 4
    places = run_ranks(launch, 3, init=None)
    assert [place[:2] for place in places] == [(0, 2), (1, 2), (0, 1)]
    hosts = [host for _, _, host in places]
    assert hosts[0] == hosts[1] != hosts[2] is not None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert run_ranks(launch, 2, init=None) == [(0, 2, None), (1, 2, None)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("BMT_TEST_RANKS_PER_GPU", "0")
    with pytest.raises(
        ValueError, match="BMT_TEST_RANKS_PER_GPU must be a number of ranks, at least 1, not '0'"
    ):
        gpu_ranks()


def test_a_gpu_test_is_skipped_where_fewer_ranks_than_it_needs_have_one(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        request.node, "own_markers", [pytest.mark.gpu(2).mark, pytest.mark.gpu(n=4).mark]
    )
    with pytest.raises(
        pytest.skip.Exception, match="needs CUDA devices for 4 ranks, and there are those for 2"
    ):
        pytest_plugin.pytest_runtest_setup(request.node)
    monkeypatch.setenv("BMT_TEST_RANKS_PER_GPU", "2")
    try:
        pytest_plugin.pytest_runtest_setup(request.node)
    except pytest.skip.Exception:
        pytest.fail("There are GPUs for four ranks.")


@pytest.mark.ranks(2)
def test_an_error_that_python_only_prints_is_a_failure() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(lose_an_error_on, 2, 1, init=None)
    assert failure.value.errors == {1: RankError("ValueError", "nobody would hear of it")}
    run_ranks(lose_an_error_on, 2, -1, init=None)


def test_a_run_follows_one_whose_shutdown_failed_on_one_rank() -> None:
    with pytest.raises(RankFailure, match=r"failed on 1 of 2 ranks[^$]*cannot leave"):
        run_ranks(fail_in_shutdown_on, 2, 1)
    assert run_ranks(rank, 2, timeout=20) == [0, 1]  # its ranks meet at the same keys of the store


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(
        RankFailure, match="PicklingError: The value that rank 0 returned cannot be pickled"
    ):
        run_ranks(return_a_lambda, 1, init=None)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(ValueError, match="top level of its module"):
        run_ranks(lambda: 0, 1, init=None)


def test_a_pool_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        RankPool(0)
