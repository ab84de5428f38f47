"""The old path of ``bmt_testing.pytest_plugin``, for ``pytest -p`` and for one release. Pytest
finds the new one by itself.
"""

from bmt_core.moved_modules import moved_attribute

_NEW = "bmt_testing.pytest_plugin"

moved_attribute(__name__, _NEW, "pytest_configure")  # imports the new module, and warns
pytest_plugins = [_NEW]  # where pytest does not look for installed plugins
