"""Import paths from before checkpoints were a package of their own."""

from __future__ import annotations

import importlib

import pytest

import bmt_checkpoint

NAMES = [
    *(
        "CheckpointFormat",
        "CheckpointReader",
        "DcpFormat",
        "Index",
        "SafetensorsFormat",
        "StoredTensor",
        "TensorEntry",
    ),
    *(
        "TensorName",
        "TensorPart",
        "TorchFormat",
        "latest",
        "load",
        "load_checkpoint",
        "save",
        "save_checkpoint",
    ),
    "wait_for_saves",
]
OF_THE_CORE = [
    *(
        "CheckpointFormat",
        "SafetensorsFormat",
        "TorchFormat",
        "latest",
        "load",
        "load_checkpoint",
        "save",
    ),
    *("save_checkpoint", "wait_for_saves"),
]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("bmt_core.checkpoint", name) for name in NAMES),
        *(("bmt_core", name) for name in OF_THE_CORE),
    ],
)
def test_old_path_is_the_same_thing_and_warns(module: str, name: str) -> None:
    old = importlib.import_module(module)
    with pytest.warns(
        DeprecationWarning, match=rf"^{module}\.{name} is now bmt_checkpoint\.{name}; "
    ) as told:
        value = getattr(old, name)
    assert value is getattr(bmt_checkpoint, name)
    assert [warning.filename for warning in told] == [__file__]


def test_a_format_of_an_older_plugin_is_still_one() -> None:
    with pytest.warns(DeprecationWarning):
        from bmt_core.checkpoint import CheckpointFormat
    assert issubclass(bmt_checkpoint.TorchFormat, CheckpointFormat)


def test_a_name_that_never_was_is_an_error_without_a_warning() -> None:
    for module in ("bmt_core.checkpoint", "bmt_core"):
        with pytest.raises(AttributeError, match="saev"):
            importlib.import_module(module).saev
