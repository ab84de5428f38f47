"""Threads that wait inside of torch when an error ends the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SERVER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
input()
"""

PROGRAM = """
import atexit, os, signal, sys, time
import torch.distributed as dist
from bmt_core.threads import start_thread_that_may_stay

class EndsServer:  # when the interpreter is taken apart
    def __del__(self, kill=os.kill, server=int(sys.argv[2]), number=signal.SIGKILL, nap=time.sleep):
        kill(server, number)
        nap(1)  # the thread comes back from the store

atexit.register(print, "a function of atexit")
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
os.kill(int(sys.argv[2]), signal.SIGSTOP)
start_thread_that_may_stay(lambda: store.check(["key"]), name="asks")
ends_server = EndsServer()
raise ValueError("of the program")
"""


@pytest.mark.slow("bmt-core")
def test_a_thread_that_waits_for_the_store_does_not_abort_a_program_that_an_error_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, port, str(server.pid)], capture_output=True, text=True
        )
        os.kill(server.pid, signal.SIGKILL)
    assert program.returncode == 1, program.stderr
    assert program.stdout == "a function of atexit\n"
    assert program.stderr.rstrip().endswith("ValueError: of the program")
