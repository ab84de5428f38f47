"""Import paths of what bmt-core once had and only the facade uses."""

from __future__ import annotations

import importlib

import pytest

import bmtrain as bmt
from bmt_core.modules.batch_parts import BatchParts

MOVED = {
    "bmt_core.inspect.BatchParts": BatchParts,
    "bmt_core.inspect.format_summary": bmt.inspect.format_summary,
    "bmt_core.inspect.inspect_model": bmt.inspect.inspect_model,
    "bmt_core.inspect.inspect_tensor": bmt.inspect.inspect_tensor,
    "bmt_core.inspect.record_tensor": bmt.inspect.record_tensor,
    "bmt_core.inspect.summary_table": bmt.inspect.summary_table,
    "bmt_core.loss.FusedCrossEntropy": bmt.loss.FusedCrossEntropy,
    "bmt_core.nn.Linear": bmt.nn.Linear,
    "bmt_core.nn.OpLinear": bmt.nn.OpLinear,
}


@pytest.mark.parametrize("path", MOVED)
def test_old_path_is_the_same_thing_and_warns(path: str) -> None:
    module, _, name = path.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"^{path} is now bmt") as told:
        value = getattr(importlib.import_module(module), name)
    assert value is MOVED[path]
    assert [warning.filename for warning in told] == [__file__]
