"""``waiting_for``: turns errors of communication into errors that name the stages for which this
stage has waited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from bmt_core.errors import CallError, RemoteError
from bmt_core.run.runtime import current
from bmt_pipeline.failures import Failure, announce_failure, first_failure
from bmt_pipeline.pipeline_ranks import own_stage, pipeline_group


@contextmanager
def waiting_for(stages: Sequence[int], what: str) -> Iterator[None]:
    """Turn an error of communication into a :class:`RemoteError` that names ``stages`` and ``what``
    they should have done.

    If the first failure was announced before, by this rank or one of another pipeline, the error
    begins with it, unless it is part of the error of communication.
    """
    try:
        yield
    except RuntimeError as error:
        # It already says what failed.
        if isinstance(error, RemoteError) and not isinstance(error, CallError):
            raise
        run, ranks = current(), pipeline_group().ranks
        names = " and ".join(f"stage {stage} (rank {ranks[stage]})" for stage in stages)
        text = f"Stage {own_stage()} (rank {run.rank}) waited for {names} {what}: {error}"
        told: Failure | None
        if isinstance(error, CallError):
            # It names the rank that has failed, or for which others wait, so nothing is announced.
            told = first_failure()
        else:
            others = " and ".join(f"rank {ranks[stage]}" for stage in stages)
            text += (
                f" Look at the output of {others}: it has ended, failed, or taken more than the"
                f" timeout of {run.settings.timeout:g} s."
            )
            told = announce_failure(text)
        if told is not None and told.text not in text:
            text = f"{told.text} {text}"
        raise RemoteError(text) from None


def waiting_for_all(what: str) -> AbstractContextManager[None]:
    """Return :func:`waiting_for` all other stages."""
    return waiting_for(
        [stage for stage in range(pipeline_group().size) if stage != own_stage()], what
    )
