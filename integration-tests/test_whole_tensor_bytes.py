"""What an optimizer over whole tensors sends, counted by the recording backend, and Muon on
a GPT.
"""

from __future__ import annotations

import bmt_recording
import muon_training
import pytest
import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current
from bmt_optim import whole
from bmt_params import DistributedParameter
from bmt_testing import on_ranks, run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_muon_trains_a_gpt_as_plain_torch_and_sends_each_part_once_and_back(ranks: int) -> None:
    expected = muon_training.plain(6, torch.float64)
    results = run_ranks(
        muon_training.on_this_rank, ranks, 6, torch.float64, init={"comm_backend": "recording"}
    )
    for losses, sent in results:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert sent.found == sent.by_formula


@on_ranks(2, 4, init={"comm_backend": "recording"})
def test_a_tensor_in_equal_parts_costs_its_other_parts_and_as_many_back(world_size: int) -> None:
    params = [DistributedParameter(torch.ones(shape)) for shape in [(8, 8), (16, 4), (4, 8)]]
    optimizer = whole(torch.optim.Muon, params)
    for _ in range(3):  # in the first step owners read the values, too
        for p in params:
            p.grad = torch.ones_like(p)
        bmt_recording.clear()
        optimizer.step()
    sent = sum(call.bytes for call in bmt_recording.calls if call.op == "send")
    others = [call.op for call in bmt_recording.calls if call.op not in ("send", "recv")]
    of_all = all_gather_object(sent, current().world)
    nbytes = sum(p.whole_shape.numel() * p.dtype.itemsize for p in params)
    assert sum(of_all) == 2 * (world_size - 1) * nbytes // world_size
    assert optimizer.bytes_per_step() == sum(of_all)
    assert others == ["all_reduce"]  # by which ranks find out which parameters have gradients
