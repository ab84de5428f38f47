"""``GlooAddresses``: a store through which the members of a group learn where gloo listens on each
of them.

Gloo connects every member with every other one, and for that it asks its store for one member after
another: three requests for each, so all members together make requests by the square of their
number. Here the first member joins the addresses of all, and every other member makes three
requests, however many there are.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CONNECTS_WHEN_USED = "TORCH_GLOO_LAZY_INIT"


class GlooAddresses(dist.Store):
    """What gloo needs of a store while it connects a group whose ``name`` no other group has.

    Gloo sets one key on each member, then reads those of all. ``set`` puts it into ``store`` and
    waits, at most for the timeout of ``store``, until the keys of all ``size`` members are there;
    ``rank`` is this one's index. Raises :class:`torch.distributed.DistStoreError` if one does not
    come. The caller keeps this object until gloo has connected: torch keeps only its part in C++.
    """

    def __init__(self, store: dist.Store, name: str, *, rank: int, size: int) -> None:
        super().__init__()
        self._store: Any = store  # torch's stub of set() takes no bytes
        self._prefix = f"addresses/{name}"
        self._rank = rank
        self._size = size
        self._exchanges = 0
        self._addresses: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Put the address ``value`` into the store, and wait for those of all members."""
        assert isinstance(value, bytes)  # torch's stub says str
        prefix = f"{self._prefix}/{self._exchanges}"
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        self._exchanges += 1
        self._store.set(keys[self._rank], json.dumps([key, value.hex()]))
        if self._rank == 0:
            found = [json.loads(each) for each in self._store.multi_get(keys)]
            self._store.set(f"{prefix}/all", zlib.compress(json.dumps(found).encode()))
        else:
            found = json.loads(zlib.decompress(self._store.get(f"{prefix}/all")))
        self._addresses.update((key, bytes.fromhex(address)) for key, address in found)

    def get(self, key: str) -> bytes:
        """Return a member's address."""
        return self._addresses[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing: the addresses are there."""

    def check(self, keys: list[str]) -> bool:
        """Whether the addresses are there."""
        return all(key in self._addresses for key in keys)

    def has_extended_api(self) -> bool:
        """Say that gloo must not ask for several keys at once."""
        return False


def use_short_addresses() -> None:
    """Let gloo number connections by ranks. By default each has a number of its own, and the
    address of a member grows with the number of members.

    Gloo reads this setting once, before its first connection.
    """
    os.environ.setdefault("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")


@contextmanager
def gloo_connects(*, when_used: bool) -> Iterator[None]:
    """Let gloo connect the members of a process group that is made in the ``with`` statement when
    two of them first talk, or all at once.
    """
    before = os.environ.get(_CONNECTS_WHEN_USED)
    os.environ[_CONNECTS_WHEN_USED] = str(int(when_used))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CONNECTS_WHEN_USED]
        else:
            os.environ[_CONNECTS_WHEN_USED] = before
