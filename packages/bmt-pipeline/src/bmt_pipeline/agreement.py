"""Exchanges between a pipeline's stages before and after a step, to compare shapes and to learn
whether a stage has failed.
"""

from __future__ import annotations

import traceback
from typing import NoReturn

import torch
from torch.distributed import DistError

from bmt_core.comm.annotate import PLACES, annotate
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import BmtError, ConfigError, RemoteError
from bmt_core.run.runtime import current
from bmt_params.guards.equal_values import digest_of, first_difference
from bmt_pipeline.failures import Failure, begin_step, first_failure, step_ends
from bmt_pipeline.wait_errors import waiting_for_all

# Each stage sends this many numbers: digests of ``alike`` and ``own``, and whether it has failed.
_OF_EACH = 3


def agreed_key(
    group: Group, alike: str, own: str, problem: Exception | None = None
) -> tuple[int, ...]:
    """Return a key made from the texts of all stages; equal texts give equal keys. Collective over
    ``group``, a pipeline.

    Raises :class:`ConfigError` on all ranks if ``alike`` is not the same on all stages; ``own`` may
    differ. If a stage has a ``problem``, that stage raises it, and the others raise an error that
    quotes it.
    """
    begin_step()
    told = _tell(group, digest_of(alike), digest_of(own), problem is not None)
    if any(told[2::_OF_EACH]):
        _raise(group, problem, "the arguments of")
    first = told[0]
    if any(number != first for number in told[::_OF_EACH]):
        texts = all_gather_object(alike, group)
        other = next(stage for stage, text in enumerate(texts) if text != texts[0])
        one, another = first_difference(texts[0], texts[other])
        raise ConfigError(
            "All ranks of a pipeline must take a step with arguments of the same shapes, the same"
            f" other values and the same settings, but rank {group.ranks[0]} has {one}, and rank"
            f" {group.ranks[other]} {another}. Pad the batches to one shape, and pass values that"
            " differ between ranks as tensors."
        )
    return tuple(told)


def raise_together(group: Group, error: Exception | None, has_failed: bool) -> None:
    """Raise on all stages if one has failed: that stage raises its ``error``, the others an error
    with its traceback. Collective.

    Raises also if a stage of another pipeline has failed: see [Note: several pipelines].
    """
    try:
        any_has_failed = any(_tell(group, 0, 0, has_failed)[2::_OF_EACH])
        step_ends()
    except RemoteError:
        raise_own(error)
        raise
    if any_has_failed:
        _raise(group, error, "the computation of")
    told = first_failure()
    if told is not None:
        raise RemoteError(told.text)


def raise_own(error: Exception | None) -> None:
    """Raise ``error``, with which this stage's computation has failed, when an exchange fails later
    in the step, perhaps because other ranks wait for this one in other pipelines. Nothing if there
    is none, or if it only says that another rank has failed.
    """
    if error is not None and not _is_of_another(first_failure(), error):
        raise error from error.__cause__  # not from the failure of the exchange


def failure_text(error: Exception, rank: int, stage: int, what: str) -> str:
    """Return a text that says where and why a stage has failed."""
    text = str(error)
    if not isinstance(error, BmtError):
        lines = traceback.format_exception(error)
        text = f"{type(error).__name__}: {text}\n{''.join(lines)}"
    place = f", {PLACES.now}" if PLACES.now else ""
    return f"Stage {stage} of the pipeline (rank {rank}) failed in {what} a step{place}: {text}"


def _is_of_another(told: Failure | None, error: Exception) -> bool:
    """Whether ``error`` is only a failed communication, caused by the failure of another rank that
    is in ``told``.
    """
    is_of_communication = type(error) is RuntimeError or isinstance(error, (RemoteError, DistError))
    return told is not None and told.rank != current().rank and is_of_communication


def _tell(group: Group, *numbers: int) -> list[int]:
    told = torch.empty(group.size * _OF_EACH, dtype=torch.int64, device="cpu")
    what = "to begin or to end the same step"
    with waiting_for_all(what), annotate(what):
        group.all_gather(told, torch.tensor(numbers, device="cpu")).wait()
    return told.tolist()


def _raise(group: Group, error: Exception | None, what: str) -> NoReturn:
    report = None
    if error is not None:
        kind = type(error) if isinstance(error, BmtError) else RemoteError
        report = (kind, failure_text(error, group.ranks[group.rank], group.rank, what))
    with waiting_for_all("to say what has failed"):
        reports = all_gather_object(report, group)
    told = first_failure()
    if error is not None and not _is_of_another(told, error):
        raise error
    if told is not None and told.rank not in group.ranks:
        raise RemoteError(told.text) from None
    kind, text = next(found for found in reports if found is not None)
    raise kind(text)
