"""``ModelOrder``: initialises layers of several ranks as one process would, in its order and with
its random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from bmt_core.comm.collective_section import SectionResults, collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_params.parameter_holders import in_one_order


class ModelOrder:
    """The whole model's order of parameters or modules, merged from the ``names`` of each rank in
    that rank's order.

    If ranks have layers of their own, as pipeline stages do, they take turns: each continues the
    random numbers of the rank with the layers before. ``owners`` are the ranks that together have
    the whole model. Making it and :meth:`run` are collective over them.
    """

    def __init__(self, names: Iterable[str], owners: Group) -> None:
        names_of_ranks = all_gather_object(list(names), owners)
        sets = [set(of_rank) for of_rank in names_of_ranks]
        self._owners = owners
        self._holders = {
            name: [name in of_rank for of_rank in sets] for name in in_one_order(names_of_ranks)
        }

    def on_any_rank(self, names: Iterable[str]) -> set[str]:
        """Return the names that any rank passes. Collective."""
        return set[str]().union(*all_gather_object(set(names), self._owners))

    def run(self, initialize: Callable[[str], object]) -> None:
        """Call ``initialize`` with each name that this rank has, when it is its turn.

        An error on one rank is raised on all, as by :func:`collective_section`.
        :class:`ConfigError` if the ranks' generators differ before, or after a module that all
        ranks have and that draws more on some of them.
        """
        failure: Exception | None = None
        if self._holders and len(set(all_gather_object(_digest(), self._owners))) > 1:
            raise ConfigError(
                f"Ranks {self._owners.ranks} would initialise a model with different random"
                " numbers. Seed torch alike on all of them, torch.manual_seed(0), say, or draw what"
                " differs between ranks from a generator of its own."
            )
        after = dict(pairwise(self._holders))
        for name, holders in self._holders.items():
            if holders[self._owners.rank] and failure is None:
                try:
                    initialize(name)
                except Exception as error:
                    # Raised in the next exchange, where the other ranks wait for this one.
                    failure = error
            if all(holders):
                self._compare(name, failure)
            # Other ranks have the next one, and go on from this rank's random numbers.
            elif name not in after or self._holders[after[name]] != holders:
                self._hand_over(holders.index(True), failure)

    def _compare(self, name: str, failure: Exception | None) -> None:
        with self._section(failure) as told:
            told.own = _digest() if self._owners.size > 1 else b""
        if len(set(told.of_ranks)) > 1:
            raise ConfigError(
                f"The initialisation of {name or 'the model'}, which all ranks have, drew other"
                f" random numbers on some of ranks {self._owners.ranks} than on others, because it"
                " goes through layers that only some ranks have. Initialise these layers in their"
                " own reset_parameters() or init_method, or by init=, a function that is called"
                " with each module."
            )

    def _hand_over(self, holder: int, failure: Exception | None) -> None:
        """Set this rank's generators to the states of rank ``holder`` of the owners."""
        with self._section(failure) as told:
            told.own = _states() if self._owners.rank == holder else None
        host, *on_device = told.of_ranks[holder]
        torch.set_rng_state(host)
        for state in on_device:
            torch.cuda.set_rng_state(state, current().device)

    @contextmanager
    def _section(self, failure: Exception | None) -> Iterator[SectionResults]:
        """Exchange what the body sets; raise on all ranks if one has a ``failure``. Collective."""
        with collective_section(self._owners, "the initialisation of its layers") as told:
            if failure is not None:
                raise failure
            yield told


def _states() -> list[torch.Tensor]:
    device = current().device
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


def _digest() -> bytes:
    """Return what is equal on ranks that would draw the same numbers now."""
    return hashlib.blake2b(b"".join(bytes(state.tolist()) for state in _states())).digest()
