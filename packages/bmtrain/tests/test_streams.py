"""Streams and events of BMTrain's config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bmtrain
from bmt_testing import run_ranks
from bmtrain._streams import EVENTS, STREAMS, HostEvent, wait_loader


def of_two_runs(device: str) -> tuple[list[Any], list[Any]]:
    seen = []
    for _ in range(2):
        bmtrain.init_distributed(device=device)
        made = [bmtrain.config[name] for name in (*STREAMS, *EVENTS)]
        assert [id(bmtrain.config[name]) for name in (*STREAMS, *EVENTS)] == [
            id(one) for one in made
        ]
        seen.append(made)
        bmtrain.shutdown()
    return seen[0], seen[1]


def host_streams() -> None:
    first, second = of_two_runs("cpu")
    assert len({id(one) for one in first + second}) == 12
    *streams, event = first
    for stream in streams:
        stream.wait_stream(streams[0])
        stream.wait_event(event)
        stream.synchronize()
        assert stream.record_event(event) is event and isinstance(stream.record_event(), HostEvent)
    event.record(streams[1])
    event.wait(streams[1])
    event.synchronize()


def test_a_run_on_the_cpu_has_streams_of_its_own_that_never_wait() -> None:
    run_ranks(host_streams, 1, init=None)


def device_streams() -> None:
    first, _ = of_two_runs("cuda")
    calc, load, *others, event = first
    assert (
        calc == torch.cuda.current_stream()
        and len({stream.cuda_stream for stream in (calc, load, *others)}) == 5
    )
    x = torch.zeros(2**24, device="cuda")
    load.wait_stream(calc)
    with torch.cuda.stream(load):
        for _ in range(100):
            x += 1
    load.record_event(event)
    calc.wait_event(event)
    assert x.eq(100).all()


@pytest.mark.gpu
def test_a_run_on_a_device_has_streams_that_wait_for_each_other() -> None:
    run_ranks(device_streams, 1, init=None)


def test_wait_loader_asks_for_no_run() -> None:
    wait_loader()
