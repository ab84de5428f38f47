"""Imports the installed package before pytest collects doctests: the modules in ``src`` lie without
their binaries.
"""

import bmt_kernels  # noqa: F401
