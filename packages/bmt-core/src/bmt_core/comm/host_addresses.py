"""``check_host_addresses``: whether other hosts can reach the addresses at which the ranks'
gloo listens.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from bmt_core.errors import ConfigError

INTERFACE = "GLOO_SOCKET_IFNAME"


def check_host_addresses(store: dist.Store, rank: int, world_size: int) -> bool:
    """Return whether the ranks lie on several hosts. Raise :class:`ConfigError` on every rank if
    they do and the name of one leads to itself alone.

    Gloo listens at the address that its host's name stands for. On many Debian machines that is
    127.0.1.1: ranks of other hosts fail to connect after a while, or wait for minutes. A rank for
    which ``GLOO_SOCKET_IFNAME`` names an interface is not asked.
    """
    host = socket.gethostname()
    share = partial(_judged_by_rank_0, store, rank, world_size)
    if not share("host", host, lambda hosts: len(set(hosts)) > 1):
        return False
    address = None if INTERFACE in os.environ else _own_address(host)
    unreachable = share("address", [host, address], _unreachable)
    if unreachable:
        raise ConfigError(
            "The names of these hosts lead to themselves alone, where other hosts cannot connect:"
            f" {', '.join(unreachable)}. Set {INTERFACE} there to the network interface that the"
            " hosts share, such as eth0 (`ip -brief address` lists them), or take the name of the"
            " host out of the lines of /etc/hosts that begin with 127."
        )
    return True


def _unreachable(found: Sequence[Sequence[str | None]]) -> list[str]:
    """Return the hosts, each once, and the addresses of those that have one."""
    addresses = {host: address for host, address in found if address is not None}
    return [f"{host} ({address})" for host, address in addresses.items()]


def _judged_by_rank_0(
    store: dist.Store,
    rank: int,
    world_size: int,
    what: str,
    own: object,
    judge: Callable[[list[Any]], object],
) -> Any:
    """Return on every rank what rank 0 finds in the values that all ranks have given. Both go
    through JSON. Rank 0 alone reads all: see :mod:`bmt_core.run.start_section`.
    """
    keys = [f"bmt-hosts/{what}/{other}" for other in range(world_size)]
    verdict = f"bmt-hosts/{what}/verdict"
    store.set(keys[rank], json.dumps(own))
    if rank == 0:
        store.set(
            verdict, json.dumps(judge([json.loads(found) for found in store.multi_get(keys)]))
        )
    return json.loads(store.get(verdict))


def _own_address(host: str) -> str | None:
    """Return where gloo would listen if no other host can connect there, else None."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "no address: torch takes 127.0.0.1"
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else None
