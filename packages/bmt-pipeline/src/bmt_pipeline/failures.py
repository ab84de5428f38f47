"""The first failure of a step, announced to the ranks of all pipelines through the
rendezvous store.

[Note: several pipelines] Ranks with the same stage in different pipelines gather and reduce its
parameters together. If the stage fails in one pipeline, the ranks with this stage in other
pipelines wait for it, and their pipelines wait for them; none of them knows the cause. So the rank
that fails first writes the cause to the store, and says that it makes no more calls in this step
but those with its pipeline. If a rank, or its GPU, waits for it in another call, all calls of the
run fail, and the ranks raise the cause. If the stage fails in all pipelines nobody waits, and
training can go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from bmt_core.run.runtime import Runtime, current
from bmt_pipeline.pipeline_ranks import num_stages, pipeline_group


class _Steps:
    """The number of the run's present step, and what ended a step before its last transfer."""

    def __init__(self, runtime: Runtime) -> None:
        self.number = 0
        self.broken_by: str | None = None


class Failure(NamedTuple):
    """The failure of ``rank``, as it is in the store."""

    rank: int
    text: str


def begin_step() -> None:
    """Count a new step, call of a list, or backward of such a call, so that a failure of an earlier
    one is not raised again.

    Raises ``RuntimeError`` if a step ended before its last transfer.
    """
    steps = current().state(_Steps)
    if steps.broken_by is not None:
        raise RuntimeError(
            f"{steps.broken_by} ended a step of the pipeline in the middle of its transfers, so the"
            " stages no longer agree on what they send next. End all ranks, and start again from"
            " a checkpoint."
        )
    steps.number += 1
    current().observer.in_step(steps.number)


@contextmanager
def step_transfers() -> Iterator[None]:
    """Inside, a stage makes the transfers of a step. If something raises here
    (``KeyboardInterrupt``), no step can follow.
    """
    try:
        yield
    except BaseException as error:
        if num_stages() > 1:
            name = type(error).__name__
            current().state(_Steps).broken_by = f"{name}: {error}" if str(error) else name
        raise


def give_up(text: str) -> None:
    """Announce why this rank computes nothing more in this step, and tell the ranks that wait for
    it in the calls of its layers: see [Note: several pipelines].
    """
    told = announce_failure(text)
    if _has_several_pipelines():
        number = current().state(_Steps).number
        current().observer.in_step(number, told.text, pipeline_group().ranks)


def step_ends() -> None:
    """Note that this rank has left the step, perhaps after :func:`give_up`."""
    current().observer.in_step(0)


def announce_failure(text: str) -> Failure:
    """Announce why this rank fails, unless another rank has failed before. Return the
    first failure.
    """
    own = Failure(current().rank, text)
    if not _can_ask_store():
        return own
    try:
        told = _store().compare_set(_key(), "", f"{own.rank} {text}")
    except dist.DistError:
        # The store has ended with the rank that serves it: the failure cannot be announced.
        return own
    return _failure(told)


def first_failure() -> Failure | None:
    """Return the first failure of this step in any pipeline; None if there is none."""
    if not _can_ask_store():
        return None
    try:
        return _failure(_store().get(_key())) if _store().check([_key()]) else None
    except dist.DistError:  # see announce_failure
        return None


def _has_several_pipelines() -> bool:
    return current().world_size > num_stages() > 1


def _can_ask_store() -> bool:
    """Whether there are other pipelines, and the store through which they talk answers."""
    return _has_several_pipelines() and current().observer.store_answers


def _store() -> dist.Store:
    store = current().backend.context.store
    assert store is not None  # there are several ranks
    return dist.PrefixStore("bmt-pipeline", store)


def _key() -> str:
    return f"failure/{current().state(_Steps).number}"


def _failure(told: bytes) -> Failure:
    rank, _, text = told.decode().partition(" ")
    return Failure(int(rank), text)
