"""Settings of all tests."""

import os

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("bmt", deadline=None)
settings.load_profile("bmt")

# Each connection to a store makes torch ask the name server for the name of 127.0.0.1. If an answer
# is lost, the C library asks again after a second and not after five. Inherited by the processes
# of ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
