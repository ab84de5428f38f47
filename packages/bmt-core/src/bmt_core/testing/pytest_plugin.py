"""The old path of ``bmt_testing.pytest_plugin``, for ``pytest -p`` and for one release."""

import sys

from bmt_core.moved_modules import moved_attribute

_NEW = "bmt_testing.pytest_plugin"

moved_attribute(__name__, _NEW, "pytest_configure")  # imports the new module, and warns
# pytest looks for hooks and fixtures among a module's own names.
globals().update(
    {name: value for name, value in vars(sys.modules[_NEW]).items() if not name.startswith("__")}
)
