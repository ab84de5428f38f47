"""``Hosts``: on which hosts the ranks run, and whether others can reach the addresses at which
gloo listens there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bmt_core.errors import ConfigError

INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """What rank 0 finds in the names and addresses of all ranks' hosts."""

    are_several: bool
    unreachable: Sequence[str]
    """The hosts, each once, whose name leads to themselves alone, with the address."""

    def check_addresses(self) -> None:
        """Raise :class:`ConfigError` if there are several hosts, and the name of one leads to
        itself alone.

        Gloo listens at the address that its host's name stands for. On many Debian machines that
        is 127.0.1.1: ranks of other hosts fail to connect after a while, or wait for minutes.
        """
        if self.are_several and self.unreachable:
            raise ConfigError(
                "The names of these hosts lead to themselves alone, where other hosts cannot"
                f" connect: {', '.join(self.unreachable)}. Set {INTERFACE} there to the network"
                " interface that the hosts share, such as eth0 (`ip -brief address` lists them), or"
                " take the name of the host out of the lines of /etc/hosts that begin with 127."
            )


def hosts_of(found: Sequence[Sequence[str | None]]) -> dict[str, Any]:
    """Return, as JSON can write it, the :class:`Hosts` that the ranks' results of
    :func:`name_and_address` show.
    """
    addresses = {host: address for host, address in found if address is not None}
    hosts = Hosts(
        are_several=len({host for host, _ in found}) > 1,
        unreachable=[f"{host} ({address})" for host, address in addresses.items()],
    )
    return asdict(hosts)


def name_and_address() -> tuple[str, str | None]:
    """Return the name of this host, and where gloo would listen if no other host can connect there,
    else None. A rank for which ``GLOO_SOCKET_IFNAME`` names an interface is not asked.
    """
    host = socket.gethostname()
    return host, None if INTERFACE in os.environ else _own_address(host)


def _own_address(host: str) -> str | None:
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return "no address: torch takes 127.0.0.1"
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else None
