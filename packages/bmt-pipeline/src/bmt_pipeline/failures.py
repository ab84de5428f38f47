"""The first failure of a step, made known to the ranks of all pipelines through the rendezvous store.

[Note: several pipelines] The ranks that have the same stage of several pipelines gather and reduce its parameters together. If it
fails in one pipeline, those of the others wait for it, and further ranks wait for those, none of which knows what has failed.
So the rank that fails first says why, in the store. The others raise that when their wait ends: when the rank that failed has
ended, or after the timeout.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from bmt_core.run.runtime import Runtime, current
from bmt_pipeline.pipeline_ranks import num_stages

_steps: WeakKeyDictionary[Runtime, int] = WeakKeyDictionary()


class Failure(NamedTuple):
    """What a rank has told the others."""

    rank: int
    text: str


def begin_step() -> None:
    """Count a step, a call of a list, or its backward: what failed in one before, and was caught, is over."""
    _steps[current()] = _steps.get(current(), 0) + 1


def tell_failure(text: str) -> Failure:
    """Tell the other pipelines why this rank fails, unless another rank has failed before; return what was told first."""
    own = Failure(current().rank, text)
    if not _has_several_pipelines():
        return own
    try:
        told = _store().compare_set(_key(), "", f"{own.rank} {text}")
    except dist.DistError:  # the store has ended with the rank that serves it: nobody can be told
        return own
    return _failure(told)


def told_failure() -> Failure | None:
    """Return what was told first in this step, by a rank of any pipeline; None if nothing was."""
    if not _has_several_pipelines():
        return None
    try:
        return _failure(_store().get(_key())) if _store().check([_key()]) else None
    except dist.DistError:  # see tell_failure
        return None


def _has_several_pipelines() -> bool:
    return current().world_size > num_stages() > 1


def _store() -> dist.Store:
    store = current().backend.context.store
    assert store is not None  # there are several ranks
    return dist.PrefixStore("bmt-pipeline", store)


def _key() -> str:
    return f"failure/{_steps.get(current(), 0)}"


def _failure(told: bytes) -> Failure:
    rank, _, text = told.decode().partition(" ")
    return Failure(int(rank), text)
