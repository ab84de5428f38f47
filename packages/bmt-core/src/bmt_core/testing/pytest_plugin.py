"""The old path of ``bmt_testing.pytest_plugin``, for ``pytest -p`` and for one release."""

from typing import Any

from bmt_core.moved_modules import moved_attribute

# pytest looks for hooks and fixtures among a module's own names.
_names: dict[str, Any] = moved_attribute(__name__, "bmt_testing.pytest_plugin", "__dict__")
globals().update({name: value for name, value in _names.items() if not name.startswith("__")})
