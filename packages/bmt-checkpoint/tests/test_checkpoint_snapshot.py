"""The snapshot of a save in the background: its memory, what ranks tell each other while the
program waits, and its errors.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bmt_checkpoint
import bmt_core
from bmt_checkpoint import background, saving, wait_for_saves
from bmt_checkpoint.snapshot import _memory
from bmt_core.comm import objects
from bmt_core.errors import CheckpointError, RemoteError
from bmt_params.parameter import DistributedParameter
from bmt_testing import run_ranks


def net(value: float, dtype: torch.dtype = torch.float32, size: int = 1000) -> nn.Module:
    model = nn.Module()
    for name in ("a", "b"):
        model.register_parameter(
            name, DistributedParameter(torch.full((size,), value, dtype=dtype))
        )
    model.register_buffer("steps", torch.full((3, 2), value, dtype=torch.int64))
    return model


class Counter(nn.Module):
    """Its state is a dict that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"seen": [0]}

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


def save_what_is_no_tensor(folder: str) -> list[Any]:
    found = []
    for name in ("model.pt", "model/"):
        model = Counter()
        with pytest.MonkeyPatch.context() as patch:
            held: list[Any] = []
            patch.setattr(saving, "start_save", lambda what, write, held=held: held.append(write))
            bmt_checkpoint.save(model, f"{folder}/{name}", non_blocking=True)
        model.counts["seen"][0] = 7
        for write in held:
            write()
        bmt_core.synchronize()
        bmt_checkpoint.load(model, f"{folder}/{name}")
        found.append(model.counts)
    return found


def test_extra_state_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    assert run_ranks(save_what_is_no_tensor, 2, str(tmp_path)) == [[{"seen": [0]}] * 2] * 2


def addresses() -> set[int]:
    return {tensor.data_ptr() for tensors in _memory.values() for tensor in tensors}


def kept_bytes() -> int:
    return sum(tensor.nbytes for tensors in _memory.values() for tensor in tensors)


def save_several(folder: str) -> list[Any]:
    before = kept_bytes()
    bmt_checkpoint.save(net(1), f"{folder}/1/", non_blocking=True)
    first = addresses()
    bmt_checkpoint.save(net(2), f"{folder}/2/", non_blocking=True)  # waits for the first
    again = addresses()
    bmt_checkpoint.save(net(3, torch.bfloat16, 50), f"{folder}/3/", non_blocking=True)
    wait_for_saves()
    return [before, len(first), first == again, kept_bytes()]


def test_each_snapshot_uses_the_memory_of_the_one_before_and_is_whole(tmp_path: Path) -> None:
    for _ in range(2):  # the second time in the same processes, after shutdown()
        found = run_ranks(save_several, 2, str(tmp_path))
        # Rank 0 writes the buffer.
        assert found == [[0, 3, True, 2 * 25 * 2 + 6 * 8], [0, 2, True, 2 * 25 * 2]]
        for value in (1, 2, 3):
            read: dict[str, torch.Tensor] = {}
            for file in (tmp_path / str(value)).glob("*.safetensors"):
                read |= load_file(file)
            assert sorted(read) == ["a", "b", "steps"]
            assert all((tensor == value).all() for tensor in read.values())


def exchanges_in_the_pause(folder: str) -> int:
    model, exchange, seen = net(1), objects._all_gathered, []

    def counted(obj: object, group: Any) -> list[Any]:
        seen.append(threading.current_thread())
        return exchange(obj, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_all_gathered", counted)
        patch.setattr(objects, "_broadcasted", None)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(saving, "start_save", lambda what, write: None)
            bmt_checkpoint.save(model, folder, non_blocking=True)
    return len(seen)


def fail_in_the_pause(folder: str) -> list[str]:
    """What a save raises for a dtype that its files cannot hold, and the next call where there was
    no memory on rank 1.
    """
    messages = []
    with pytest.raises(CheckpointError) as refused:
        bmt_checkpoint.save(net(1, torch.complex128), folder, non_blocking=True)
    messages.append(str(refused.value))
    with pytest.MonkeyPatch.context() as patch:
        if bmt_core.rank() == 1:
            patch.setattr(saving, "snapshot", no_memory)
        bmt_checkpoint.save(net(1), folder, non_blocking=True)
    with pytest.raises(CheckpointError if bmt_core.rank() == 1 else RemoteError) as caught:
        wait_for_saves()
    messages.append(str(caught.value))
    wait_for_saves()  # told once
    return messages


def no_memory(*parts: object) -> None:
    raise MemoryError("no memory for 5 bytes")


def test_the_pause_has_one_exchange_and_what_cannot_be_saved_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    folder = f"{tmp_path}/model/"
    assert run_ranks(exchanges_in_the_pause, 2, folder) == [1, 1]
    for dtype, memory in run_ranks(fail_in_the_pause, 2, folder, timeout=30):
        assert "torch.complex128, which safetensors files cannot hold" in dtype
        assert "In the background, saving" in memory and "no memory for 5 bytes" in memory
    assert list(tmp_path.iterdir()) == []


def test_who_interrupts_the_wait_for_a_save_waits_for_it_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def write() -> None:
        may_end.wait(60)
        raise IndexError("an error of a format")

    background.start_save("saving model.pt", write)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "bmt saving model.pt"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(thread, "join", interrupted)
        background.join_last_save()
    may_end.set()
    with pytest.raises(
        CheckpointError, match=r"In the background, saving model.pt failed: IndexError: an error"
    ):
        background.join_last_save()
    assert not thread.is_alive()
    background.join_last_save()  # told once


def interrupted() -> None:
    raise KeyboardInterrupt
