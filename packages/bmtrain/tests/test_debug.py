"""The scratch store."""

from __future__ import annotations

from bmtrain import debug


def test_debug_is_a_scratch_store() -> None:
    debug.clear()
    assert debug.get("loss") is None and debug.get("loss", 1) == 1
    debug.set("loss", 2)
    debug.append("norms", 1.0)
    debug.append("norms", 2.0)
    debug.extend("norms", (3.0, 4.0))
    debug.extend("empty", [])
    assert (
        debug.get("loss") == 2
        and debug.get("norms") == [1.0, 2.0, 3.0, 4.0]
        and debug.get("empty") == []
    )
    debug.clear("norms")
    debug.clear("never there")
    assert debug.get("norms") is None and debug.get("loss") == 2
    debug.clear()
    assert debug.get("loss") is None
