"""Core, params, zero and optim know axes of the rank grid as data: one file alone knows the two
that BMTrain has.
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = Path(__file__).parents[2]
THE_FILE = "bmt_core/run/bmtrain_names.py"
WORD = re.compile(r"""['"](?:tp|pp)['"]|\b_*(?:tp|pp)_\w+""")
# Arguments that BMTrain named, where they are arguments.
ARGUMENTS = {
    "bmt_core/run/runtime.py": {"tp_size"},
    "bmt_core/settings.py": {"tp_size"},
    "bmt_params/locality.py": {"tp_mode", "tp_split_dim"},
    "bmt_params/parameter.py": {"tp_mode", "tp_split_dim"},
}


def test_no_other_file_names_the_axes_of_tensor_parallelism_and_pipelines() -> None:
    sources = {
        str(path.relative_to(PACKAGES / package / "src")): path.read_text()
        for package in ("bmt-core", "bmt-params", "bmt-zero", "bmt-optim")
        for path in (PACKAGES / package / "src").rglob("*.py")
    }
    found = {file: set(WORD.findall(text)) for file, text in sources.items()}
    assert found.pop(THE_FILE) >= {'"tp"', '"pp"', "tp_size"}
    assert {file: words for file, words in found.items() if words} == ARGUMENTS
