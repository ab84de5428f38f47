"""save_checkpoint and load_checkpoint: going on as if the program had never stopped, or not
at all.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dying_saves import OF_TRAINING, die_at_every_moment
from scratch_axes import grid_with

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_checkpoint.random_state import data_rank_and_grid, random_states, restore_random_states
from bmt_core.errors import CheckpointError
from bmt_core.settings import MeshAxis
from bmt_testing import on_ranks, run_ranks

INDEX = "model.safetensors.index.json"

# No dependency; its generator is restored where it is installed.
numpy = pytest.importorskip("numpy")


class Net(bmt_params.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt_params.DistributedParameter(torch.linspace(-1, 1, 35).view(7, 5))
        self.bias = bmt_params.DistributedParameter(torch.zeros(7))
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.nn.functional.linear(x, self.weight, self.bias))


class Momentum:
    """An optimizer with a state, which is a manager of itself and knows its logical state."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters: list[Any] = list(model.parameters())
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        with torch.no_grad():
            for parameter, moment in zip(self.parameters, self.moments, strict=True):
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(moment, alpha=0.1)
                parameter.grad = None

    def logical_state(self, named_parameters: Sequence[tuple[str, Any]]) -> dict[str, Any] | None:
        whole = {
            name: parameter.gather_like(moment)
            for (name, parameter), moment in zip(named_parameters, self.moments, strict=True)
        }
        return {"moments": whole, "steps": self.steps} if bmt_core.rank() == 0 else None

    def load_logical_state(
        self, named_parameters: Sequence[tuple[str, Any]], state: dict[str, Any] | None
    ) -> None:
        state = bmt_core.comm.broadcast_object(state, bmt_core.current().world)
        assert state is not None
        self.steps = state["steps"]
        for (name, parameter), moment in zip(named_parameters, self.moments, strict=True):
            moment.copy_(parameter.local_part(state["moments"][name]))

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for own, saved in zip(self.moments, state["moments"], strict=True):
            own.copy_(saved)


class LocalMomentum(Momentum):
    """Knows its local state only, as torch's optimizers do."""

    logical_state = None  # type: ignore[assignment]


def train(model: Net, manager: Momentum, steps: int) -> list[float]:
    """Draw from every generator there is."""
    losses = []
    for _ in range(steps):
        scale = random.random() + numpy.random.rand()
        loss = (model(torch.randn(4, 5)) * scale - 1).pow(2).mean()
        (loss / bmt_core.world_size()).backward()
        manager.step()
        losses.append(loss.item())
    return losses


def result_of(model: Net, manager: Momentum) -> Any:
    with torch.no_grad():
        moments = [
            p.gather_like(m).tolist()
            for p, m in zip(manager.parameters, manager.moments, strict=True)
        ]
        return [p.gather().tolist() for p in manager.parameters], moments, manager.steps


def uninterrupted(folder: str, kind: type[Momentum], own_streams: bool) -> Any:
    if own_streams:
        random.seed(100 + bmt_core.rank())
    model = Net()
    manager = kind(model)
    train(model, manager, 3)
    extra = {"position": 17, "order": torch.arange(3), "name": "a"}
    path = bmt_checkpoint.save_checkpoint(folder, model, manager, step=manager.steps, extra=extra)
    assert path == Path(folder) / "step-3"
    return train(model, manager, 3), result_of(model, manager)


def resumed(folder: str, kind: type[Momentum]) -> Any:
    torch.rand(bmt_core.rank() + 1)
    random.seed(bmt_core.rank())
    numpy.random.rand(bmt_core.rank() + 2)
    model = Net()
    manager = kind(model)
    found = bmt_checkpoint.load_checkpoint(folder, model, manager)
    assert found["step"] == 3
    assert found["extra"]["position"] == 17 and found["extra"]["order"].tolist() == [0, 1, 2]
    return train(model, manager, 3), result_of(model, manager)


@pytest.mark.parametrize(("world_size", "kind"), [(1, Momentum), (2, LocalMomentum), (4, Momentum)])
def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(
    world_size: int, kind: type[Momentum], tmp_path: Path
) -> None:
    expected = run_ranks(uninterrupted, world_size, str(tmp_path), kind, own_streams=True)
    for folder in (tmp_path, tmp_path / "step-3"):
        assert run_ranks(resumed, world_size, str(folder), kind) == expected


def state_at(folder: str) -> Any:
    model = Net()
    manager = Momentum(model)
    bmt_checkpoint.load_checkpoint(folder, model, manager)
    return result_of(model, manager), torch.rand(3).tolist(), random.random()


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (4, 2)])
def test_logical_state_resumes_at_another_world_size(
    saving: int, loading: int, tmp_path: Path
) -> None:
    run_ranks(uninterrupted, saving, str(tmp_path), Momentum, own_streams=False)
    expected = run_ranks(state_at, saving, str(tmp_path))[0]
    # All generators were alike on all ranks, so they go on alike.
    assert run_ranks(state_at, loading, str(tmp_path)) == [expected] * loading


def test_generators_that_differed_start_anew_at_another_world_size_and_a_line_says_so(
    tmp_path: Path,
) -> None:
    run_ranks(uninterrupted, 2, str(tmp_path), Momentum, own_streams=True)
    one, other = (run_ranks(state_and_output, 4, str(tmp_path)) for _ in range(2))
    assert one == other
    draws = [draw for (_, _, draw), _ in one]
    assert len(set(draws)) == 4
    assert all(result[:2] == one[0][0][:2] for result, _ in one)
    lines = [output for _, output in one]
    assert "saved by 2 rank(s) and is loaded by 4" in lines[0] and "(python)" in lines[0]
    assert lines[1:] == ["", "", ""]


def state_and_output(folder: str) -> tuple[Any, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        state = state_at(folder)
    return state, output.getvalue()


def test_every_kind_of_generator_is_restored() -> None:
    random.gauss(0, 1)  # leaves a second number behind
    numpy.random.randn()
    states = random_states()
    first = (
        torch.rand(2).tolist(),
        random.gauss(0, 1),
        random.random(),
        numpy.random.randn(2).tolist(),
    )
    assert restore_random_states([states], [data_rank_and_grid()], 0, [data_rank_and_grid()]) == []
    second = (
        torch.rand(2).tolist(),
        random.gauss(0, 1),
        random.random(),
        numpy.random.randn(2).tolist(),
    )
    assert first == second


def restored_on(grids: tuple[list[int], list[int]]) -> list[Any]:
    """Which rank's state each rank gets that goes on; the data rank of rank i of a grid
    is given.
    """
    saved_on, here_on = (
        [{"data_rank": rank, "grid": data_ranks} for rank in data_ranks] for data_ranks in grids
    )
    generators = [torch.Generator().manual_seed(place["data_rank"]) for place in saved_on]
    saved = [{"torch": generator.get_state()} for generator in generators]
    found = []
    for rank in range(len(here_on)):
        seeded = restore_random_states(saved, saved_on, rank, here_on)
        found.append("seeded" if seeded else torch.initial_seed())
    return found


def test_a_rank_goes_on_with_the_random_numbers_of_its_data() -> None:
    with torch.random.fork_rng():
        assert restored_on(([0, 0, 1, 1], [0, 1])) == [0, 1]  # tp 2 x dp 2, then dp 2
        assert restored_on(([0, 1], [0, 1, 0, 1])) == [0, 1, 0, 1]
        assert restored_on(([0, 1], [0, 1, 2])) == ["seeded"] * 3
        assert restored_on(([0, 0], [0, 1])) == [0, 0]


def save_some(folder: str, steps: list[int], keep: int | None) -> list[str]:
    model = Net()
    for step in steps:
        bmt_checkpoint.save_checkpoint(folder, model, step=step, keep=keep)
    found = bmt_checkpoint.latest(folder)
    assert found is not None
    return [found.name, *sorted(path.name for path in Path(folder).glob("[!.]*"))]


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert bmt_checkpoint.latest(tmp_path) is None
    folder = str(tmp_path)
    assert run_ranks(save_some, 1, folder, [8, 9, 10], None) == [
        ["step-10", "latest", "step-10", "step-8", "step-9"]
    ]
    assert run_ranks(save_some, 1, folder, [11], 2) == [["step-11", "latest", "step-10", "step-11"]]
    # The one just saved stays.
    assert run_ranks(save_some, 1, folder, [5], 1) == [["step-5", "latest", "step-5"]]
    with pytest.raises(ValueError, match="keep is the number of checkpoints"):
        bmt_checkpoint.save_checkpoint(tmp_path, Net, keep=0)
    with pytest.raises(ValueError, match="keep=2 needs step"):
        bmt_checkpoint.save_checkpoint(tmp_path, Net, keep=2)


@pytest.mark.parametrize("step", [-1, 5.0, True, torch.tensor(5)])
def test_a_step_under_which_no_load_would_find_the_checkpoint_is_refused(
    tmp_path: Path, step: Any
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"an int from 0 on, not {step!r}.")):
        bmt_checkpoint.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), step=step)
    with pytest.raises(ValueError, match="an int from 1 on, not '2'"):
        bmt_checkpoint.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), step=1, keep="2")
    assert not any(tmp_path.iterdir())


def save_in_background(folder: str, kind: type[Momentum]) -> Any:
    model = Net()
    manager = kind(model)
    train(model, manager, 3)
    extra = {"position": 17, "order": torch.arange(3)}
    bmt_checkpoint.save_checkpoint(folder, model, manager, step=3, extra=extra, non_blocking=True)
    extra["order"].zero_()
    return train(model, manager, 3), result_of(model, manager)


@pytest.mark.parametrize("kind", [Momentum, LocalMomentum])
def test_a_checkpoint_written_in_the_background_is_that_of_the_call(
    kind: type[Momentum], tmp_path: Path
) -> None:
    expected = run_ranks(save_in_background, 2, str(tmp_path), kind)
    assert run_ranks(resumed, 2, str(tmp_path), kind) == expected


def fail_in_background(folder: str) -> list[str]:
    bmt_checkpoint.save_checkpoint(folder, Net(), step=1)
    bmt_checkpoint.save_checkpoint(folder, Net(), step=2, extra=Net, non_blocking=True)
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.load_checkpoint(folder, Net())
    assert bmt_checkpoint.load_checkpoint(folder, Net())["step"] == 1  # told once
    return [str(caught.value), *sorted(path.name for path in Path(folder).glob("[!.]*"))]


def test_an_error_in_the_background_comes_out_of_the_next_call_and_the_previous_checkpoint_stays(
    tmp_path: Path,
) -> None:
    for message, *files in run_ranks(fail_in_background, 2, str(tmp_path), timeout=30):
        assert "extra=" in message and files == ["latest", "step-1"]


# ---- what does not fit ----


def load_errors(folder: str, kind: type[Momentum] | None) -> tuple[str, bool]:
    model = Net()
    manager = None if kind is None else kind(model)
    before, state = result_of(model, manager or Momentum(model)), torch.get_rng_state()
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.load_checkpoint(folder, model, manager)
    unchanged = result_of(model, manager or Momentum(model)) == before
    return str(caught.value), unchanged and torch.equal(torch.get_rng_state(), state)


def save_without_manager(folder: str) -> None:
    bmt_checkpoint.save_checkpoint(folder, Net(), step=1)


def check_errors(world_size: int, folder: Path, kind: type[Momentum] | None, *parts: str) -> None:
    for message, unchanged in run_ranks(load_errors, world_size, str(folder), kind, timeout=30):
        assert unchanged
        for part in parts:
            assert part in message, message


def test_local_state_is_refused_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(uninterrupted, 2, str(tmp_path), LocalMomentum, own_streams=False)
    check_errors(4, tmp_path, LocalMomentum, "each of 2 ranks, and this run has 4", "Start 2 ranks")
    (tmp_path / "step-3" / "optimizer-rank-1.pt").unlink()
    check_errors(2, tmp_path, LocalMomentum, "There is no checkpoint file", "optimizer-rank-1.pt")


def save_local_state(folder: str) -> None:
    model = Net()
    bmt_checkpoint.save_checkpoint(folder, model, LocalMomentum(model))


def test_local_state_is_refused_in_another_grid_of_as_many_ranks(tmp_path: Path) -> None:
    grid = grid_with(MeshAxis("tp", 2, 100, shards_data=False))
    run_ranks(save_local_state, 2, str(tmp_path), init=grid)
    found = "each rank of the grid {'tp': 2}, and this run has {'dp': 2}. Start ranks in that grid"
    check_errors(2, tmp_path, LocalMomentum, found)


def test_manager_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run_ranks(save_without_manager, 2, str(tmp_path))
    check_errors(2, tmp_path, Momentum, "saved without a manager", "manager=None")
    run_ranks(uninterrupted, 2, str(tmp_path / "logical"), Momentum, own_streams=False)
    check_errors(
        2, tmp_path / "logical", LocalMomentum, "LocalMomentum has no load_logical_state()"
    )


def test_damaged_and_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    nowhere = tmp_path / "runs" / "nowhere"
    absent = f"{nowhere} does not exist; {tmp_path} is empty."
    check_errors(2, nowhere, None, f"There is no checkpoint in {nowhere}: ", absent)
    run_ranks(save_without_manager, 2, str(tmp_path))
    absent = f"{tmp_path / 'step-2'} does not exist; {tmp_path} holds latest, step-1."
    check_errors(2, tmp_path / "step-2", None, absent)
    (tmp_path / "latest").rename(tmp_path / "last")
    check_errors(2, tmp_path, None, f"{tmp_path} holds last, step-1. Name the")
    (tmp_path / "last").rename(tmp_path / "latest")
    training = tmp_path / "step-1" / "training.pt"
    data = training.read_bytes()
    training.write_bytes(data[: len(data) // 2])
    check_errors(2, tmp_path, None, "not a whole file", "training.pt")
    torch.save({"step": 3}, training)
    check_errors(2, tmp_path, None, "was not written by save_checkpoint()")
    training.write_bytes(data)
    index = tmp_path / "step-1" / "model" / INDEX
    whole = index.read_bytes()
    index.write_bytes(b"")
    check_errors(2, tmp_path, None, "is not the file that was saved with training.pt", INDEX)
    index.write_bytes(whole)
    shard = next(index.parent.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    check_errors(2, tmp_path, None, "its size or its header differs", shard.name)


class Phases(bmt_params.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        phases = torch.polar(torch.ones(5).double(), torch.arange(5.0).double())
        self.phases = bmt_params.DistributedParameter(phases)


@on_ranks(2)
def test_a_dtype_that_safetensors_lacks_is_held_in_the_way_that_the_error_names(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path)
    model = Phases()
    manager = Momentum(model)
    manager.moments = [torch.full_like(p, 1 + 2j) for p in manager.parameters]
    before = result_of_phases(model, manager)
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.save_checkpoint(folder, model, manager, step=1)
    assert "phases is of torch.complex128, which safetensors files cannot hold" in str(caught.value)
    remedy = re.search(r'save_checkpoint\(\.\.\., format="(\w+)"\)', str(caught.value))
    assert remedy
    bmt_checkpoint.save_checkpoint(folder, model, manager, step=1, format=remedy[1])
    with torch.no_grad():
        for tensor in (*model.parameters(), *manager.moments):
            tensor.zero_()
    assert result_of_phases(model, manager) != before
    bmt_checkpoint.load_checkpoint(folder, model, manager)
    assert result_of_phases(model, manager) == before
    path = f"{folder}/model.pt"
    bmt_checkpoint.save(model, path)  # the other way that the error names
    bmt_checkpoint.load(model, path)
    assert result_of_phases(model, manager) == before


def result_of_phases(model: Phases, manager: Momentum) -> Any:
    (parameter,), (moment,) = manager.parameters, manager.moments
    return [model.phases.tolist(), parameter.gather_like(moment).tolist()]


@on_ranks(2)
def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    if bmt_core.rank() == 0:
        torch.save({}, path)
    bmt_core.synchronize()
    said = r"checkpoint.pt is a file(?s:.*)bmt.load\(model, "
    with pytest.raises(CheckpointError, match=said):
        bmt_checkpoint.latest(path)
    with pytest.raises(CheckpointError, match=said):
        bmt_checkpoint.save_checkpoint(path, Net(), step=1)


def mutations(folder: Path) -> dict[str, tuple[str, Callable[[], object]]]:
    """Ways to spoil the checkpoint ``folder/step-3`` of 2 ranks: what -> (what the error must say,
    the change).
    """
    latest, training, index = (
        folder / "latest",
        folder / "step-3" / "training.pt",
        folder / "step-3" / "model" / INDEX,
    )

    def with_entries(**changes: Any) -> Callable[[], object]:
        return lambda: torch.save({**torch.load(training, weights_only=True), **changes}, training)

    def with_random(kind: str, state: Any) -> Callable[[], object]:
        states = torch.load(training, weights_only=True)["random"]
        return with_entries(random=[states[0], {**states[1], kind: state}])

    numpy_state = torch.load(training, weights_only=True)["random"][0]["numpy"]
    return {
        "latest binary": ("latest holds", lambda: latest.write_bytes(bytes(range(128, 256)))),
        "latest elsewhere": ("latest holds", lambda: latest.write_text("../elsewhere/step-3")),
        "latest absolute": ("latest holds", lambda: latest.write_text(str(folder / "step-3"))),
        "latest empty": ("latest holds", lambda: latest.write_text("")),
        "latest long": ("latest holds", lambda: latest.write_text("step-" + "3" * 5000)),
        "random empty": ("not those of 2 rank(s)", with_entries(random=[])),
        "random text": ("not those of 2 rank(s)", with_entries(random=["a", "b"])),
        "random torch": (
            "rank 1's random generator 'torch' is damaged",
            with_random("torch", torch.zeros(3)),
        ),
        "random python": ("'python' is damaged", with_random("python", {"version": 3})),
        "random numpy": (
            "'numpy' is damaged",
            with_random("numpy", {**numpy_state, "words": torch.zeros(2)}),
        ),
        "step": ("is damaged: step = 'three'", with_entries(step="three")),
        "optimizer": ("is damaged: optimizer = ", with_entries(optimizer=torch.zeros(2))),
        "no optimizer state": (
            "is damaged: optimizer_state = ",
            with_entries(optimizer_state=None),
        ),
        "incomplete": ("step-3, is not there or lacks", lambda: training.unlink()),
        "foreign optimizer state": (
            "does not fit this Momentum",
            with_entries(optimizer_state={"a": torch.zeros(2)}),
        ),
        "places": (
            "The data ranks and grids are not those of 2",
            with_entries(places=[{"data_rank": 0}] * 2),
        ),
        "of another": (
            "is not the file that was saved with training.pt",
            lambda: index.write_text("{}"),
        ),
    }


@on_ranks(2)
def test_malformed_checkpoints_are_one_error_on_every_rank_and_change_nothing(
    tmp_path: Path,
) -> None:
    uninterrupted(str(tmp_path), Momentum, own_streams=False)
    training = tmp_path / "step-3" / "training.pt"
    data, expected = training.read_bytes(), mutations(tmp_path)
    for what, (part, change) in expected.items():
        bmt_core.synchronize()
        if bmt_core.rank() == 0:
            training.write_bytes(data)
            (tmp_path / "latest").write_text("step-3\n")
            change()
        bmt_core.synchronize()
        message, unchanged = load_errors(str(tmp_path), Momentum)
        assert unchanged and part in message, (what, message)


class TwoMoments(LocalMomentum):
    """Has more state than was saved, which rank 1 notices when it has changed a part."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "second": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert bmt_core.rank() == 0 or state["second"] == 0


def test_manager_that_fails_on_one_rank_leaves_the_model_and_itself_as_they_were(
    tmp_path: Path,
) -> None:
    run_ranks(uninterrupted, 2, str(tmp_path), LocalMomentum, own_streams=False)
    said = "does not fit this TwoMoments (KeyError: 'second')"
    check_errors(2, tmp_path, TwoMoments, said)


def load_step_watched(folder: str) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        return load_step(folder), output.getvalue()


def test_a_save_that_did_not_finish_is_named_and_the_next_one_deletes_it(tmp_path: Path) -> None:
    run_ranks(save_some, 2, str(tmp_path), [4], None)
    for left in ("step-3.tmp", "step-6.tmp"):
        (tmp_path / left).mkdir()
    line = (
        f"bmt: the save {tmp_path / 'step-6.tmp'} did not finish; step-4, the newest that did,"
        " is loaded.\n"
    )
    assert run_ranks(load_step_watched, 2, str(tmp_path)) == [(4, line), (4, "")]
    assert run_ranks(save_some, 2, str(tmp_path), [5], None)[0] == [
        "step-5",
        "latest",
        "step-4",
        "step-5",
    ]


def load_step(folder: str) -> int:
    return int(bmt_checkpoint.load_checkpoint(folder, Net())["step"])


# ---- when the program dies ----


@pytest.mark.slow("bmt-checkpoint")
@pytest.mark.parametrize(
    ("step", "left"), [(2, ["latest", "step-1", "step-2"]), (1, ["latest", "step-1"])]
)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    step: int, left: list[str], tmp_path: Path
) -> None:
    """Of another step, and of the same one, whose directory must be replaced."""
    count, entries = die_at_every_moment(OF_TRAINING, tmp_path / "run", str(step))
    assert count > 15 and entries == left
