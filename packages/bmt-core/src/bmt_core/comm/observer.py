"""``RunObserver``: what a package offers by the hook ``bmt_run_observer`` to watch the calls of a
run. This class itself does nothing, and is the observer of a run without such a package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bmt_core.errors import CallError, PluginError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from bmt_core.comm.protocols import Group

Awaited = tuple[str, tuple[int, ...]]
"""What a rank waits for, as messages say it, and the ranks from which it comes."""
NoteCall = Callable[[tuple[object, ...], "torch.Tensor"], None]
"""Notes a call: its name and all that must be equal on all ranks, and this rank's tensor."""


@dataclass(frozen=True, kw_only=True)
class ObserverContext:
    """What an observer is made with. ``server`` is the host that serves the ``store``,
    ``server_rank`` the rank whose process does; None if that is the launcher. ``timeout`` is in
    seconds; ``check_calls`` is the argument of ``init_distributed()``.
    """

    rank: int
    world_size: int
    store: Store
    server: str
    server_rank: int | None
    has_several_hosts: bool
    timeout: float
    check_calls: bool | None


class RunObserver:
    """Is told what a rank does, and knows whether the run can go on. Threads may call each method
    but :meth:`observed`, :meth:`in_step` and :meth:`leave`.
    """

    @property
    def failure(self) -> str | None:
        """Why the run has ended, the same on every rank; None while it goes on. Once it is set,
        calls raise :class:`CallError`.
        """
        return None

    @property
    def store_answers(self) -> bool:
        """False if the rendezvous store is gone, or has not answered for too long."""
        return True

    def observed(self, group: Group, name: str) -> Group:
        """Return what the run uses as ``group``, whose ``name`` is the same on its members. A
        :class:`LazyGroup` is connected at its first operation.
        """
        return group

    def calls(self, name: str, ranks: tuple[int, ...]) -> NoteCall:
        """Return what notes calls on GPUs that these ranks make without a group, under ``name``."""
        return lambda operation, tensor: None

    def raise_failure(self) -> None:
        """Raise :class:`CallError` if the run has ended."""
        if self.failure is not None:
            raise CallError(self.failure)

    def wait_for_failure(self) -> str | None:
        """Return why the run has ended, if that becomes known in some seconds; else None."""
        return self.failure

    def fail(self, why: str) -> None:
        """End the run on all ranks, because of ``why``."""

    def announce(self, error: str) -> None:
        """End the run on all ranks, because ``error`` ends this one, before it leaves."""

    def on_failure(self, call: Callable[[str], None]) -> None:
        """Call ``call(failure)`` once, on another thread, if the run fails, to free a device."""

    def waits(self, awaited: Callable[[], Awaited | None]) -> None:
        """Ask ``awaited()`` now and then what this rank's GPU waits for, outside of groups."""

    def in_step(self, number: int, gives_up: str = "", stays_with: tuple[int, ...] = ()) -> None:
        """Note the number of a pipeline's present step, 0 outside of steps. ``gives_up`` is the
        error for which this rank makes no more calls in it, but those with the ranks
        ``stays_with``. If another rank waits for it in this step, the run ends.
        """

    def leave(self, error: str) -> None:
        """Tell the other ranks that this one leaves, and the ``error`` that ends it, or ""."""


def only_one(answers: Mapping[str, RunObserver | None]) -> RunObserver:
    """Return the observer that a plugin has made, by what messages call it; without any one that
    does nothing. PluginError if two have made one.
    """
    found = {title: observer for title, observer in answers.items() if observer is not None}
    if len(found) > 1:
        for observer in found.values():
            observer.leave("")
        raise PluginError(
            f"Two plugins watch the run, and only one may: the {' and the '.join(found)}. Turn one"
            " of them off by BMT_DISABLE_PLUGINS."
        )
    return next(iter(found.values()), RunObserver())
