"""How long a training step takes while the cable between two hosts is cut and comes back in time.

    python integration-tests/cut_link.py --seconds 20 --timeout 60

The hosts are namespaces of this machine (tools/hosts.py: it takes root), with a rank each. With
``--loss 1%`` the cable also loses packets, all the time. The exit status is 1 if the training does
not go on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from test_hosts import begin, line_of, start_ranks

from hosts import hosts

BEFORE = 3
"""Steps before the cable is cut."""
STEPS = 20
"""After the cable has been connected again."""


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
        ranks = start_ranks(made, 1, "until-a-call-fails", "all", str(options.timeout))
        for process in ranks:
            ends.enter_context(process)
            ends.callback(process.kill)
        begin([ranks], BEFORE)
        before, slowest, after = time.monotonic(), 0.0, 0
        made[1].disconnect()
        again = threading.Timer(options.seconds, made[1].reconnect)
        again.daemon = True
        again.start()
        while after < STEPS:
            line = line_of(ranks[0])
            if not line.startswith("step "):
                print(f"the training has ended: {line}")
                return 1
            now = time.monotonic()
            slowest, before = max(slowest, now - before), now
            after += not again.is_alive()
    print(f"cut for {options.seconds:g} s: the slowest step took {slowest:.1f} s; {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
