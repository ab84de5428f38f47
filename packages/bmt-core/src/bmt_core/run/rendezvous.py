"""``rendezvous_store``: the store in which the ranks of a run meet."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist

from bmt_core.errors import ConfigError, RemoteError
from bmt_core.launch import Launch, rendezvous_address
from bmt_core.run.restarts import meet_in_attempt

# One store per process and address, as long as the process lives: other ranks would fail if the
# server closed while they still use it. Every start has its own prefix in the store.
_stores: dict[tuple[str, ...], dist.Store] = {}
_BETWEEN_TRIES = 0.2  # seconds
_LONGEST_SILENCE = 32_767  # seconds, the largest that Linux takes


def rendezvous_store(
    init_method: str, launch: Launch, start: int, timeout: float
) -> dist.Store | None:
    """Return a store that is empty at first, for the ``start``-th start of bmt in this process;
    None for a run of one rank.

    Raises :class:`ConfigError` or :class:`RemoteError` if no other rank, or another run, is met
    within ``timeout`` seconds.
    """
    if launch.world_size == 1:
        return None
    address = server_address(init_method, launch)
    key = (init_method, str(address), str(launch.rank))
    if key not in _stores:
        _stores.clear()
        _stores[key] = (
            _of_method(init_method, launch, timeout)
            if address is None
            else _of_server(*address, launch, timeout)
        )
    store = dist.PrefixStore(f"bmt/{start}", _stores[key])
    store.set_timeout(timedelta(seconds=timeout))
    if address is not None:
        limit_silence(address[1], timeout)
    return store


def limit_silence(port: int, timeout: float) -> None:
    """Let Linux end those connections of this process to the store at ``port`` that have been
    without an answer for ``timeout`` seconds.

    A request to a store has no timeout, and if the host that serves it vanishes, Linux waits for a
    quarter of an hour by itself. A host that comes back in time loses nothing.
    """
    if sys.platform != "linux":
        return
    seconds = int(min(max(timeout, 1), _LONGEST_SILENCE))
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with _same_socket(number) as connection:
                    if _port_of_peer(connection) == port:
                        _limit_silence_of(connection, seconds)


@contextmanager
def _same_socket(number: int) -> Iterator[socket.socket]:
    # With a default timeout Python would make the socket one that does not block, for torch too.
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            yield connection
    finally:
        socket.setdefaulttimeout(default)


def _port_of_peer(connection: socket.socket) -> int | None:
    is_tcp = connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM
    return connection.getpeername()[1] if is_tcp else None


def _limit_silence_of(connection: socket.socket, seconds: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
    # While a rank waits for an answer it sends nothing: then Linux asks whether the host is there.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 4))


def launcher_serves_store() -> bool:
    """Whether torchrun serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def server_address(init_method: str, launch: Launch) -> tuple[str, int] | None:
    """Return host and port of the rendezvous; None if it is no server, but a file for example."""
    url = urlparse(init_method)
    if url.scheme == "env":
        return rendezvous_address(launch)
    return (url.hostname, url.port) if url.scheme == "tcp" and url.hostname and url.port else None


def _of_method(init_method: str, launch: Launch, timeout: float) -> dist.Store:
    url = urlparse(init_method)
    # Torch would look for the folder for five minutes, whatever the timeout is.
    if url.scheme == "file" and not os.path.isdir(folder := os.path.dirname(url.path)):
        raise ConfigError(f"{init_method} is in the folder {folder!r}, which does not exist.")
    patience = timedelta(seconds=timeout)
    store: dist.Store = next(
        dist.rendezvous(init_method, launch.rank, launch.world_size, timeout=patience)
    )[0]
    store.set_timeout(patience)
    # The file may be left from an earlier run.
    attempt = meet_in_attempt(store, launch.rank, launch.world_size, timeout)
    return dist.PrefixStore(f"attempt/{attempt}", store)


def _of_server(host: str, port: int, launch: Launch, timeout: float) -> dist.Store:
    """Return this program's part of the store at ``host`` and ``port``, which outlives programs and
    attempts of torchrun.

    If rank 0 serves it, it does not wait for the others here. Torch's own rendezvous would wait,
    and not name the ranks that are missing.
    """
    deadline = time.monotonic() + timeout
    while True:
        server = _connect(host, port, launch, deadline - time.monotonic())
        attempt = _attempt(server, launch, deadline - time.monotonic())
        store = dist.PrefixStore(f"attempt/{attempt}", server)
        earlier = _earlier_processes(store, launch.rank)
        if earlier == [] or (earlier and launcher_serves_store()):
            return dist.PrefixStore(f"program/{len(earlier)}", store)
        # The rank 0 of an earlier program still runs and serves the port: a step of Slurm may run a
        # shell script with several.
        if time.monotonic() + _BETWEEN_TRIES > deadline:
            raise ConfigError(
                f"{earlier[-1] if earlier else 'Another process'} has joined the rendezvous at"
                f" {host}:{port} as rank {launch.rank} already. Start one process for each rank, or"
                " set another MASTER_PORT if that one belongs to another run."
            )
        time.sleep(_BETWEEN_TRIES)


def _attempt(server: dist.Store, launch: Launch, timeout: float) -> str:
    """Return what tells this attempt of torchrun from others that use the same store."""
    if "TORCHELASTIC_MAX_RESTARTS" not in os.environ:  # not torchrun
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not launcher_serves_store():
        return "0"  # the store ends with rank 0
    server.set_timeout(timedelta(seconds=timeout))
    store = dist.PrefixStore("attempts", server)
    return meet_in_attempt(store, launch.rank, launch.world_size, timeout)


def _connect(host: str, port: int, launch: Launch, timeout: float) -> dist.Store:
    serves = launch.rank == 0 and not launcher_serves_store()
    patience = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(
            host,
            port,
            launch.world_size,
            serves,
            patience,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if serves:
            raise ConfigError(
                f"Rank 0 cannot serve the rendezvous at port {port} of this host, which another run"
                f" may use: {error} Set another MASTER_PORT on all ranks."
            ) from None
        raise RemoteError(
            f"Rank {launch.rank} cannot reach {host}:{port}, where rank 0 or the launcher should"
            f" be: {error} Look at the output of rank 0, which may not have started, and at"
            " MASTER_ADDR and MASTER_PORT."
        ) from None


def _earlier_processes(store: dist.Store, rank: int) -> list[str] | None:
    """Note in ``store`` that this process has joined as ``rank``, and return which other ones had
    before it.

    None if the server has just ended.
    """
    own, earlier = f"Process {os.getpid()} of host {socket.gethostname()}", list[str]()
    try:
        while True:
            joined = store.compare_set(f"process/{rank}/{len(earlier)}", "", own).decode()
            if joined == own:
                return earlier
            earlier.append(joined)
    except dist.DistNetworkError:
        return None
