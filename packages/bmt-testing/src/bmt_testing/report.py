"""``report_of``: what an assertion says about a training that differs."""

from __future__ import annotations

from collections.abc import Sequence

from bmt_testing.comparison import Difference
from bmt_testing.settings import TrainingSettings
from bmt_testing.user_model import UserModel

_LISTED = 5


def report_of(unlike: Sequence[Difference], settings: TrainingSettings, user: UserModel) -> str:
    """Return what was compared, and the first values that are ``unlike``."""
    first = unlike[0]
    number = f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''}"
    lines = [f"A training on {number} differs from {compared_with(user)}.", ""]
    where = "on no rank" if first.rank is None else f"on rank {first.rank}"
    at = f", at {list(first.index)}" if first.index else ""
    if first.problem:
        lines.append(f"first: {first.name}, {where}: {first.problem}")
    else:
        lines += [
            f"first: {first.name}, {where}{at}",
            f"  expected: {first.expected:.10g}",
            f"  found:    {first.found:.10g}, off by {first.distance:.3g}",
        ]
        if first.rounding:
            lines.append(f"  rounding: plain torch is {first.rounding:.3g} from itself in float64")
    if further := unlike[1:]:
        lines.append(f"and {len(further)} more, such as:")
        lines += [f"  {difference}" for difference in further[:_LISTED]]
    return "\n".join(lines)


def compared_with(user: UserModel) -> str:
    """Return in words what ranks are compared with."""
    if user.train is not None:
        return "the same loop in one process of plain torch"
    if user.noise:
        return "one process of plain torch that takes the ranks' rows and random numbers one by one"
    if user.of_parts:
        return "one process of plain torch that takes the ranks' rows one by one"
    return "one process of plain torch on the whole batch"
