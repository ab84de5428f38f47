"""Settings of all tests."""

import os

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("bmt", deadline=None)
settings.load_profile("bmt")

# For each connection to a store torch asks for the name of ::ffff:127.0.0.1, which /etc/hosts does
# not have. Where the name server leaves a question unanswered now and then, a start would wait 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
