#!/usr/bin/env python3
"""Several hosts on one machine: run a command on each of them, over a network as slow as you like.

    python tools/hosts.py --hosts 2 --rate 1gbit -- sh -c \\
        'torchrun --nnodes=$HOSTS --rdzv-backend=c10d --rdzv-endpoint=$FIRST_HOST:29500 train.py'

A host is a set of Linux namespaces: it has a name, a network interface ``eth0`` with an address,
ports and processes of its own, and shares files, memory and cores with the machine. A bridge in a
namespace of its own connects the hosts, so the machine's own network is left as it is, and no host
reaches anything but the others. That takes root, and the programs of iproute2 and util-linux.

The command finds ``HOST_NUMBER`` (from 0), ``HOSTS`` (how many there are) and ``FIRST_HOST`` (the
first one's address) in its environment. ``/etc/hosts`` of every host has the names of all. Gloo
listens at the address that its host's name stands for, and torchrun announces that name, so neither
needs ``GLOO_SOCKET_IFNAME`` or ``--local-addr``. Each line of output begins with the host's name.
The exit status is that of the first host whose command failed, or 0.

Nothing remains afterwards, even if this program is killed: each host lives as long as one process
that reads a pipe of this program's. When that process ends, Linux ends all others of the host and
removes its namespaces, which have no names that could be left over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import slow_cable

PROGRAMS = ("ip", "tc", "mount", "nsenter", "setpriv", "unshare")
MOST_HOSTS = 250
_SWITCH = "switch"
_NAMESPACES = ("--net", "--uts", "--mount", "--pid")
# Bytes that may be sent at once. Below 64 KiB, the largest piece that Linux hands to a device, tbf
# would cut each piece; at 10 Gbit/s this is less than half a millisecond.
_BURST = "512kb"
_PATIENCE = 10.0  # seconds until the processes of a host have ended

# The first process of a host. Its number on the machine is what /proc shows before the host has a
# /proc of its own. It ignores SIGCHLD, so that processes whose parents have ended leave no zombies,
# and ends when the pipe is closed.
_FIRST_PROCESS = """
set -e
read -r pid rest < /proc/self/stat
mount -t proc proc /proc
hostname "$1"
names=$(mktemp)
printf '%s' "$2" > "$names"
chmod 644 "$names"
mount --bind "$names" /etc/hosts
rm "$names"
echo "$pid"
trap '' CHLD
exec cat > /dev/null
"""


class HostsError(Exception):
    """Hosts cannot be made on this machine, or not as they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of several hosts on this machine; see :func:`hosts`."""

    name: str
    address: str
    variables: dict[str, str]
    """What :meth:`command` adds to the environment."""
    pid: int
    """The host's first process, by its number on the machine."""
    switch_pid: int
    """The first process of the switch to which the host is connected."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on this host, in the present directory.

        When the returned command is ended by a signal, ``argv`` gets SIGTERM.

        >>> host = Host(name="host0", address="10.0.0.1", variables={}, pid=7, switch_pid=6)
        >>> host.command(["hostname"])[:3]
        ['nsenter', '--target', '7']
        """
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES]
        # The program is another process than nsenter, which does not pass signals on.
        enter += ["setpriv", "--pdeathsig", "TERM"]
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return [*enter, "env", f"--chdir={os.getcwd()}", *variables, *argv]

    def disconnect(self) -> None:
        """Pull the host's cable out: what it sends, and what others send to it, is lost without
        an error.
        """
        _run_in_network(self.switch_pid, ["ip", "link", "set", self.name, "down"])

    def reconnect(self) -> None:
        """Undo :meth:`disconnect`. Connections that were not given up meanwhile go on."""
        _run_in_network(self.switch_pid, ["ip", "link", "set", self.name, "up"])


@contextlib.contextmanager
def hosts(
    number: int, rate: str | None = None, delay: str | None = None, loss: str | None = None
) -> Iterator[list[Host]]:
    """Make ``number`` hosts that reach each other; all their processes are killed at the end.

    ``rate`` is what each host can send, and receive, per second (``"1gbit"``); ``delay`` is how
    long a packet is under way (``"0.2ms"``), and ``loss`` how many packets are lost (``"1%"``), all
    as ``tc`` writes them. With a delay or loss packets are large (:data:`slow_cable.MTU`). Between
    the ranks of one host nothing is slower. Raises :class:`HostsError` where that cannot be made.
    """
    if not 1 <= number <= MOST_HOSTS:
        raise HostsError(f"The number of hosts must be 1 to {MOST_HOSTS}, not {number}.")
    _check_machine()
    names = [f"host{index}" for index in range(number)]
    addresses = [f"10.0.0.{index + 1}" for index in range(number)]
    with contextlib.ExitStack() as stack:
        switch = _start(_SWITCH, "127.0.0.1 localhost\n", stack)
        made = []
        for index, (name, address) in enumerate(zip(names, addresses, strict=True)):
            variables = {
                "HOST_NUMBER": str(index),
                "HOSTS": str(number),
                "FIRST_HOST": addresses[0],
            }
            lines = ["127.0.0.1 localhost"]
            lines += [f"{found} {other}" for found, other in zip(addresses, names, strict=True)]
            pid = _start(name, "\n".join(lines) + "\n", stack)
            made.append(
                Host(name=name, address=address, variables=variables, pid=pid, switch_pid=switch)
            )
        bridge = [f"link add {_SWITCH} type bridge", f"link set {_SWITCH} up"]
        _run_in_network(switch, ["ip", "-batch", "-"], "\n".join(bridge))
        cable = None
        if delay is not None or loss is not None:
            cable = _seconds(delay or "0s"), _fraction(loss or "0%")
        for host in made:
            _connect(switch, host, cable, stack)
            if rate is not None:
                _slow_down(switch, host, rate)
        yield made


def why_no_hosts(
    rate: str | None = None, delay: str | None = None, loss: str | None = None
) -> str | None:
    """Return in one sentence why :func:`hosts` cannot make hosts here, None if it can."""
    try:
        with hosts(1, rate, delay, loss):
            return None
    except HostsError as error:
        return str(error)


def run_everywhere(found: Sequence[Host], argv: Sequence[str]) -> Iterator[int]:
    """Run ``argv`` on all hosts at the same time, and give their exit statuses in turn.

    Lines of output are printed with the host's name in front. A command that a signal ended has the
    status that a shell gives it.
    """
    lock = threading.Lock()
    processes = []
    for host in found:
        process = subprocess.Popen(
            host.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        thread = threading.Thread(
            target=_print_lines, args=(host.name, process.stdout, lock), daemon=True
        )
        thread.start()
        processes.append((process, thread))
    for process, thread in processes:
        status = process.wait()
        thread.join()
        yield status if status >= 0 else 128 - status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on several hosts, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--rate", help="per host and direction, such as 1gbit (default: no limit)")
    parser.add_argument("--delay", help="of each packet, such as 0.2ms (default: none)")
    parser.add_argument("--loss", help="of packets, such as 1%% (default: none)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --, with arguments")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell has SIGINT ignored
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with hosts(options.hosts, options.rate, options.delay, options.loss) as found:
            statuses = list(run_everywhere(found, options.command))
    except HostsError as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return 1
    return next((status for status in statuses if status != 0), 0)


def _check_machine() -> None:
    if sys.platform != "linux":
        raise HostsError("Hosts on one machine are made of Linux namespaces: this is not Linux.")
    if os.geteuid() != 0:
        raise HostsError("Hosts on one machine take root: run this as root.")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise HostsError(
            f"Hosts on one machine take {', '.join(missing)}: install iproute2 and util-linux."
        )


def _start(name: str, names_file: str, stack: contextlib.ExitStack) -> int:
    """Start the first process of a host, which ``stack`` ends; return its number."""
    enter_new = ["unshare", *_NAMESPACES, "--fork", "--kill-child"]
    process = subprocess.Popen(
        [*enter_new, "sh", "-c", _FIRST_PROCESS, "sh", name, names_file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends commands first, and then the hosts
    )
    _end_with(process, stack)
    assert process.stdout is not None and process.stderr is not None
    said = process.stdout.readline().strip()
    if not said:
        raise HostsError(f"Linux does not let us make a host: {_in_one_line(process.stderr)}.")
    return int(said)


def _end_with(process: subprocess.Popen[str], stack: contextlib.ExitStack) -> None:
    """Let ``stack`` end a process that ends with its input."""
    assert process.stdin is not None
    stack.callback(_wait_for_end, process)
    # Closed before any of them is waited for, because callbacks run in the opposite order.
    stack.callback(process.stdin.close)


def _wait_for_end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def _connect(
    switch_pid: int, host: Host, cable: tuple[float, float] | None, stack: contextlib.ExitStack
) -> None:
    """Connect ``host`` to the switch. A ``cable`` has a delay in seconds, and loses a fraction of
    the packets.
    """
    size = ""
    if cable is None:
        veth = ["ip", "link", "add", host.name, "type", "veth"]
        _run_in_network(switch_pid, [*veth, "peer", "name", "eth0", "netns", str(host.pid)])
    else:
        _start_cable(switch_pid, host, *cable, stack)
        size = f"mtu {slow_cable.MTU}"
    up = f"link set {host.name} {size} master {_SWITCH} up"
    _run_in_network(switch_pid, ["ip", "-batch", "-"], up)
    lines = [
        f"address add {host.address}/24 dev eth0",
        f"link set eth0 {size} up",
        "link set lo up",
    ]
    _run_in_network(host.pid, ["ip", "-batch", "-"], "\n".join(lines))


def _start_cable(
    switch_pid: int, host: Host, delay: float, loss: float, stack: contextlib.ExitStack
) -> None:
    """Start the program that is the cable of ``host``, which ``stack`` ends."""
    enter = ["nsenter", "--target", str(switch_pid), "--net"]
    arguments = [host.name, str(delay), str(loss), str(host.pid)]
    process = subprocess.Popen(
        [*enter, sys.executable, slow_cable.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _end_with(process, stack)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline().strip() != slow_cable.READY:
        why = _in_one_line(process.stderr)
        raise HostsError(f"A delay, or a loss, needs /dev/net/tun, and cannot be made here: {why}.")


def _slow_down(switch_pid: int, host: Host, rate: str) -> None:
    """Limit what a host sends at its own end of the cable, and what it receives at the switch's."""
    for pid, device in ((host.pid, "eth0"), (switch_pid, host.name)):
        _run_in_network(pid, ["tc", "qdisc", "add", "dev", device, "root", *_rate_limit(rate)])


def _seconds(delay: str) -> float:
    """Return a time as ``tc`` writes it.

    >>> _seconds("0.5ms"), _seconds("2s")
    (0.0005, 2.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", delay)
    if found is None:
        raise HostsError(
            f"--delay must be a number and its unit us, ms or s, such as 0.2ms, not {delay!r}."
        )
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _fraction(loss: str) -> float:
    """Return a fraction as ``tc`` writes it.

    >>> _fraction("2.5%")
    0.025
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", loss)
    if found is None or float(found[1]) > 100:
        raise HostsError(f"--loss must be a percentage, such as 1%, not {loss!r}.")
    return float(found[1]) / 100


def _rate_limit(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", _BURST, "latency", "50ms"]


def _run_in_network(pid: int, argv: Sequence[str], given: str | None = None) -> None:
    """Run a program of iproute2 in the network of process ``pid``."""
    command = ["nsenter", "--target", str(pid), "--net", *argv]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode == 0:
        return
    if "qdisc kind is unknown" in done.stderr:
        raise HostsError("This kernel has no tbf, which a rate needs: leave it out.")
    why = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    raise HostsError(f"`{' '.join(argv)}` failed: {why or f'exit status {done.returncode}'}.")


def _in_one_line(stream: IO[str]) -> str:
    return "; ".join(line.strip() for line in stream if line.strip()).rstrip(".") or "no reason"


def _print_lines(name: str, lines: IO[str], lock: threading.Lock) -> None:
    for line in lines:
        with lock:
            sys.stdout.write(f"{name}: {line.rstrip()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
