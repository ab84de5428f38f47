"""``verify_trainings``: compare many drawn trainings, and shrink the first that differs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bmt_testing.settings import TrainingSettings
from bmt_testing.strategies import property_settings

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Compare = Callable[[TrainingSettings], Counter[str]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A drawn training, and how many numbers of each kind were compared."""

    settings: TrainingSettings
    compared: Counter[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The simplest settings that were found whose training differs, and the message about it."""

    settings: TrainingSettings
    message: str


@dataclass
class Verification:
    """The trainings that were compared: ``examples`` are equal to plain torch.

    ``failure`` is None if all are. Else ``needed`` is the number of the first example that differs,
    and ``simpler`` how many simpler ones were tried after it.
    """

    examples: list[Example] = field(default_factory=list)
    failure: Failure | None = None
    needed: int = 0
    simpler: int = 0
    seconds: float = 0.0


def verify_trainings(
    compare: Compare,
    strategy: SearchStrategy[TrainingSettings],
    *,
    examples: int,
    seed: int,
    progress: Callable[[Verification, TrainingSettings], None],
) -> Verification:
    """Call ``compare`` with settings drawn from ``strategy``, until one raises AssertionError or
    ``examples`` have not, and then with simpler ones to find the simplest that raises.

    ``progress`` is called before each comparison. Other errors than AssertionError end it.
    """
    import hypothesis

    result = Verification()
    # Hypothesis tries some settings again, and what they compute is known.
    known: dict[str, Failure | None] = {}
    start = time.monotonic()

    def try_settings(drawn: TrainingSettings) -> None:
        if repr(drawn) not in known:
            progress(result, drawn)
            known[repr(drawn)] = _try(compare, drawn, result)
        # The last one that is raised, and caught below, is the simplest.
        if (failure := known[repr(drawn)]) is not None:
            raise _Differs(failure)

    run = hypothesis.settings(
        property_settings(examples),
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    test = hypothesis.seed(seed)(run(hypothesis.given(strategy)(try_settings)))
    try:
        test()
    except _Differs as differs:
        result.failure = differs.failure
    except _OtherError as other:
        raise other.error from None
    result.seconds = time.monotonic() - start
    return result


class _Differs(Exception):
    """Settings whose training differs."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _OtherError(BaseException):  # no Exception, which hypothesis would shrink
    """An error that says that nothing can be compared."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _try(compare: Compare, drawn: TrainingSettings, result: Verification) -> Failure | None:
    start = time.monotonic()
    result.simpler += result.needed > 0
    try:
        compared = compare(drawn)
    except AssertionError as error:
        result.needed = result.needed or len(result.examples) + 1
        return Failure(settings=drawn, message=str(error))
    except Exception as error:
        raise _OtherError(error) from error
    if not result.needed:
        seconds = time.monotonic() - start
        result.examples.append(Example(settings=drawn, compared=compared, seconds=seconds))
    return None
