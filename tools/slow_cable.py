"""A cable between a host and the switch on which frames are under way for a while, or are lost.

tools/hosts.py starts this program in the network of the switch. Its two ends are devices of Linux
("taps") whose other side is a program: what is sent into one end comes out at the other, here after
a delay where it goes to the host, if it is not lost. So a frame from one host to another is late
once, and drawn once. Linux's netem does the same, but kernels of virtual machines often lack it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

MTU = 65000
"""Bytes of a packet. Large ones, because this program takes some microseconds for each of them."""
READY = "ready"
"""What this program prints when both ends are there. It ends when its input ends."""
_ETHERNET = 18  # bytes of a frame beside its packet
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def main(name: str, seconds: str, lost: str, host_pid: str) -> int:
    """Join the device ``name``, here, and ``eth0``, in the network of process ``host_pid``. Of the
    frames to the host the fraction ``lost`` is lost, and the others come after ``seconds``.
    """
    delay, loss = float(seconds), float(lost)
    switch, host = _tap(name), _tap(f"{name}-end")
    move = ["ip", "link", "set", f"{name}-end", "netns", host_pid, "name", "eth0"]
    subprocess.run(move, check=True)
    with contextlib.suppress(OSError):  # else frames wait for training on the same cores
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(READY, flush=True)
    late: deque[tuple[float, bytes]] = deque()  # when it is due, and the frame
    while True:
        patience = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([switch, host, sys.stdin], [], [], patience)
        if sys.stdin in ready:
            return 0
        if host in ready:
            _send(switch, os.read(host, MTU + _ETHERNET))
        if switch in ready:
            frame = os.read(switch, MTU + _ETHERNET)
            if random.random() >= loss:
                late.append((time.monotonic() + delay, frame))
        while late and late[0][0] <= time.monotonic():
            _send(host, late.popleft()[1])


def _tap(name: str) -> int:
    """Make a device of Linux, and return the file of its other side."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _send(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down: the frame is lost
        os.write(tap, frame)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))  # in one line, which tools/hosts.py shows
