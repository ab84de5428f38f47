"""How long a training step takes while the cable between two hosts is cut and comes back in time.

    python integration-tests/cut_link.py --seconds 20 --timeout 60

The hosts are namespaces of this machine (tools/hosts.py: it takes root), with a rank each. With
``--loss 1%`` the cable also loses packets, all the time. The exit status is 1 if the training does
not begin or does not go on.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from hosts_training import FAILS_IN
from test_hosts import read_lines, say, start_ranks

from hosts import Host, hosts

STEPS = 20
"""After the cable has been connected again."""
IMPORTS = 120.0
"""Seconds in which a rank has imported torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Cut the cable, print how long the slowest step took, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the cable is cut")
    parser.add_argument("--timeout", type=float, default=60.0, help="of init_distributed")
    parser.add_argument("--loss", help="of packets, such as 1%% (default: none)")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as ends, hosts(2, loss=options.loss) as made:
        processes = start_ranks(made, 1, "until-a-call-fails", "all", str(options.timeout))
        for process in processes:
            ends.enter_context(process)
            ends.callback(process.kill)
        try:
            slowest, line = train(processes, made[1], options.seconds, options.timeout)
        except TrainingError as error:
            print(f"the training has ended: {error}")
            return 1
    print(f"cut for {options.seconds:g} s: the slowest step took {slowest:.1f} s; {line}")
    return 0


class TrainingError(Exception):
    """A rank has ended, or has shown nothing for too long."""


class Rank:
    """A rank whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines = queue.Queue[str]()
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()

    def _read(self) -> None:
        read_lines(self.process, self._lines)
        self._lines.put("")  # it has ended

    def line(self, timeout: float) -> str:
        """Return the next line. Raises :class:`TrainingError` if none comes in ``timeout``
        seconds.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TrainingError(f"a rank has shown nothing for {timeout:g} s") from None
        if not line:
            self.process.kill()
            assert self.process.stderr is not None
            raise TrainingError(self.process.stderr.read().strip() or "a rank was killed")
        return line


def train(
    processes: Sequence[subprocess.Popen[str]], cut: Host, seconds: float, timeout: float
) -> tuple[float, str]:
    """Cut the cable of a host for ``seconds``, and return how long the slowest step took and the
    last line of the training. Raises :class:`TrainingError` if it does not go on.
    """
    ranks = [Rank(process) for process in processes]
    for rank in ranks:  # the start of a run has the same timeout as its calls
        rank.line(IMPORTS)
    for process in processes:
        say(process)
    # A call that fails waits for less than 2 * timeout + 7 s (see failed_trainings()), and then the
    # process ends.
    patience = 2 * timeout + 30
    for rank in ranks:
        while not rank.line(patience).startswith(f"step {FAILS_IN - 1}: "):
            pass
    for process in processes:
        say(process)
    before, slowest, after = time.monotonic(), 0.0, 0
    cut.disconnect()
    again = threading.Timer(seconds, cut.reconnect)
    again.start()
    try:
        while after < STEPS:
            line = ranks[0].line(patience)
            now = time.monotonic()
            slowest, before = max(slowest, now - before), now
            after += not again.is_alive()
    finally:
        again.cancel()
        again.join()  # the host remains until then
    return slowest, line


if __name__ == "__main__":
    sys.exit(main())
