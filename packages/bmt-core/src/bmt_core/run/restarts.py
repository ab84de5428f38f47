"""``meet_in_attempt``: what the ranks of one attempt of torchrun have in common and no other has.

[Note: attempts of torchrun] After a failure, and when a host comes or leaves, torchrun starts all
ranks again, with the same store. It tells each rank how often its own host has failed, which is not
the same number on all hosts. But it starts no rank before all ranks of the attempt before have
ended. So rank 0 opens an attempt with a new name, and every other rank answers the newest attempt,
with a token of its own. Rank 0 writes down all answers. A rank that finds its token there is in
this attempt; one that has answered the attempt of a rank 0 that has ended finds a newer one soon.
"""

from __future__ import annotations

import json
import logging
import time
import uuid

import torch.distributed as dist

from bmt_core.errors import RemoteError
from bmt_core.run.start_section import WARN_AFTER, missing_after, missing_of, read

logger = logging.getLogger("bmt_core")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks for rank 0


def meet_in_attempt(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Return the name of this attempt, the same on all ranks. Collective.

    Raises :class:`RemoteError`, with the ranks that are missing, after ``timeout`` seconds.
    """
    return (
        _open(store, world_size, timeout)
        if rank == 0
        else _answer(store, rank, world_size, timeout)
    )


def _open(store: dist.Store, world_size: int, timeout: float) -> str:
    name = str(store.add("attempts", 1))
    answers = _answers(name, world_size)
    store.set(answers[0], "")
    store.set("newest", name)
    if missing := missing_after(timeout, answers, store, 0):
        raise RemoteError(missing)
    tokens = [token.decode() for token in store.multi_get(answers)]
    store.set(f"{name}/all", json.dumps(tokens))
    return name


def _answer(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    token, name, pause = uuid.uuid4().hex, "", _FIRST_PAUSE
    begin = time.monotonic()
    warns = True
    while True:
        newest = read("newest", store)
        if newest != name:
            name = newest
            store.set(f"{name}/{rank}", token)
        if name and token in json.loads(read(f"{name}/all", store) or "[]"):
            return name
        waited = time.monotonic() - begin
        if waited + pause > timeout:
            raise RemoteError(
                f"After {timeout:g} s these ranks have not started:"
                f" {_missing(store, name, world_size)}. Look at their output, or raise timeout."
            )
        if warns and waited > WARN_AFTER:
            warns = False
            logger.warning(
                "bmt: after %g s rank %d still waits for ranks that have not started: %s.",
                WARN_AFTER,
                rank,
                _missing(store, name, world_size),
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _missing(store: dist.Store, name: str, world_size: int) -> str:
    if store.check([f"{name}/all"]):  # of an attempt before
        return "0"
    return missing_of(_answers(name, world_size), store) or "0"


def _answers(name: str, world_size: int) -> list[str]:
    return [f"{name}/{rank}" for rank in range(world_size)]
