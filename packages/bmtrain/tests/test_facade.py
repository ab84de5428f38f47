"""The facade: its table, its stubs and what is there agree, and what is missing or wrong
says so.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bmtrain
from bmtrain._lazy import resolve
from bmtrain._table import (
    FILE_MODULES,
    INTERNALS,
    OLD_PATHS,
    TABLE,
    Home,
    submodules,
)

PACKAGES_DIRECTORY = Path(__file__).parents[2]


def is_installed(home: Home) -> bool:
    return importlib.util.find_spec(home.package) is not None


def stub_of(module: str) -> Path:
    path = Path(bmtrain.__file__).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.pyi" if submodules(module) else path.with_suffix(".pyi")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("module", TABLE)
def test_stub_says_what_the_table_says(module: str) -> None:
    imports = [
        node
        for node in ast.parse(stub_of(module).read_text()).body
        if isinstance(node, ast.ImportFrom)
    ]
    names = {
        alias.asname: (node.module, alias.name)
        for node in imports
        if not node.level
        for alias in node.names
    }
    children = {alias.asname for node in imports if node.level for alias in node.names}
    assert names == TABLE[module]
    assert children == set(submodules(module)) - set(TABLE[module])


def test_there_is_no_stub_beside_those_of_the_table() -> None:
    assert set(Path(bmtrain.__file__).parent.rglob("*.pyi")) == {
        stub_of(module) for module in TABLE
    }


@pytest.mark.parametrize("module", TABLE)
def test_names_are_what_their_packages_provide_or_name_the_missing_package(module: str) -> None:
    facade = importlib.import_module(module)
    for name, home in TABLE[module].items():
        if is_installed(home):
            assert getattr(facade, name) is getattr(
                importlib.import_module(home.module), home.attribute
            )
            assert name in dir(facade)
            continue
        with pytest.raises(ModuleNotFoundError, match=home.distribution):
            getattr(facade, name)
        assert name not in dir(facade)


@pytest.mark.parametrize("module", TABLE)
def test_names_are_public_where_they_come_from(module: str) -> None:
    for name, home in TABLE[module].items():
        if is_installed(home) and not name.startswith("_"):
            source = importlib.import_module(home.module)
            assert home.attribute in getattr(source, "__all__", dir(source))


@pytest.mark.parametrize("module", OLD_PATHS)
def test_old_paths_have_the_names_of_the_packages(module: str) -> None:
    old = importlib.import_module(module)
    there = {name: home for name, home in OLD_PATHS[module].items() if is_installed(home)}
    assert sorted(there) == [name for name in dir(old) if not name.startswith("__")]
    for name, home in there.items():
        assert getattr(old, name) is getattr(importlib.import_module(home.module), home.attribute)
    for name in OLD_PATHS[module].keys() - there:
        with pytest.raises(ModuleNotFoundError, match=OLD_PATHS[module][name].distribution):
            getattr(old, name)


def test_a_function_and_an_old_module_of_one_name_are_both_found() -> None:
    scope: dict[str, Any] = {}
    exec(
        "from bmtrain.benchmark.all_gather import all_gather; from bmtrain import benchmark", scope
    )
    assert scope["all_gather"] is scope["benchmark"].all_gather


@pytest.mark.parametrize(
    ("statement", "internal"),
    [
        *((f"import {module}", module) for module in INTERNALS),
        (
            "from bmtrain.block_layer import storage_type_cuda",
            "bmtrain.block_layer.storage_type_cuda",
        ),
        ("from bmtrain import hook_func", "bmtrain.hook_func"),
        ("from bmtrain.nccl import enums", "bmtrain.nccl.enums"),
        ("from bmtrain.distributed.ops import OpAllGather", "bmtrain.distributed.ops.OpAllGather"),
    ],
)
def test_importing_an_internal_of_bmtrain_says_what_it_is(statement: str, internal: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    name = internal.replace("bmtrain", "bmt")
    assert str(caught.value).startswith(
        f"{name} is an internal of BMTrain, and bmt has nothing like it."
    )
    assert "docs/migration.md" in str(caught.value)


def test_block_layer_has_the_round_up_that_scripts_import_from_it() -> None:
    names: dict[str, Any] = {}
    exec("from bmtrain.block_layer import round_up", names)
    assert names["round_up"] is bmtrain.utils.round_up


def test_asking_for_an_internal_of_bmtrain_says_what_it_is() -> None:
    with pytest.raises(AttributeError, match=r"^bmt.hook_func is an internal of BMTrain"):
        bmtrain.hook_func  # type: ignore[attr-defined]
    ops = importlib.import_module("bmtrain.distributed.ops")
    assert not hasattr(ops, "OpAllGather") and not hasattr(ops, "__wrapped__")
    with pytest.raises(
        AttributeError,
        match=r"^bmt.distributed.ops.OpAllGather is an .* bmt has all_gather, all_reduce,",
    ):
        ops.OpAllGather


def test_the_core_names_every_package_and_those_that_names_come_from() -> None:
    from bmt_core.packages import PACKAGES

    ours = {path.parent.name for path in PACKAGES_DIRECTORY.glob("*/pyproject.toml")}
    assert {package.module.replace("_", "-") for package in PACKAGES.values()} == ours
    homes = [home for names in TABLE.values() for home in names.values()]
    assert {home.distribution for home in homes} - {"bmtrain"} <= PACKAGES.keys()


def test_python_m_bmtrain_is_bmt_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bmtrain"])
    with pytest.raises(SystemExit):
        runpy.run_module("bmtrain", run_name="__main__")
    printed = capsys.readouterr().out
    assert f"bmt {bmtrain.__version__}; torch" in printed and "bmt doctor --all" in printed


ASK = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == {package!r} else found(name)
import bmtrain
try:
    bmtrain.{name}
except ModuleNotFoundError as error:
    message = f"{{error.name}}: {{error}}"
assert message == {message!r}, message
"""
IMPORT_FROM = """
import importlib.util
importlib.util.find_spec = lambda name: None
from bmtrain.pipe_layer import PipelineTransformerBlockList
"""
SYNCHRONIZE = """
from bmtrain.synchronize import synchronize
import bmtrain.synchronize as s, bmtrain
assert s is synchronize is bmtrain.synchronize and synchronize.__name__ == "synchronize"
"""
# Whatever a script imports first.
FIRST_NAMES = (
    "import bmtrain as bmt; bmt.init_distributed(device='cpu'); t = bmt.current().topology",
    "from bmtrain.init import init_distributed, topology; init_distributed(device='cpu'); t ="
    " topology({'dp': 1})",
    "import bmtrain.global_var as g, bmt_core; bmt_core.init_distributed(device='cpu'); t ="
    " g.config['topology']",
)


MISSING = [
    (
        "optim.OptimManager",
        (
            "bmt_optim: bmt.optim.OptimManager is provided by bmt-optim, which is not"
            " installed. Install it with: pip install ./packages/bmt-core"
            " ./packages/bmt-params ./packages/bmt-optim"
            " (in a clone of bmt), or, if your index has it: "
            'pip install "bmt-train[optim]"'
        ),
    ),
    (
        "pipe_layer.PipelineTransformerBlockList",
        (
            "bmt_pipeline: bmt.pipe_layer.PipelineTransformerBlockList is provided by"
            " bmt-pipeline, which is not installed. Install it with: "
            "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-watch"
            " ./packages/bmt-zero ./packages/bmt-pipeline"
            " (in a clone of bmt), "
            'or, if your index has it: pip install "bmt-train[pipeline]"'
        ),
    ),
]


def test_missing_packages_are_named_with_the_line_to_type_and_names_found_by_any_import() -> None:
    asked = [ASK.format(package=m.partition(":")[0], name=n, message=m) for n, m in MISSING]
    used = [f"{code}; assert (t.stages, t.tp_id, t.zero_id) == (1, 0, 0)" for code in FIRST_NAMES]
    misspelt = ["import bmtrain; bmtrain.Blok", "import bmtrain; bmtrain.optim.OptimManger"]
    codes = [*asked, *used, SYNCHRONIZE]
    errors = errors_in_fresh_processes([*codes, IMPORT_FROM, *misspelt])
    assert errors[: len(codes)] == [""] * len(codes)
    missing, *hinted = errors[len(codes) :]
    assert "bmt.pipe_layer.PipelineTransformerBlockList is provided by bmt-pipeline" in missing
    for error in hinted:  # one hint of ours, and none of Python's
        assert "AttributeError" in error and error.count("Did you mean") == 1, error


def test_import_error_inside_an_installed_package_passes_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bmt_broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ModuleNotFoundError, match="No module named 'a_module_that_nobody_has'"
    ) as caught:
        resolve(Home("bmt_broken", "Thing"), "bmt.Thing")
    assert caught.value.name == "a_module_that_nobody_has"


def test_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(
        AttributeError,
        match=r"^bmt.init_distribute does not exist. Did you mean 'init_distributed'\?$",
    ):
        bmtrain.init_distribute  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError,
        match=r"^bmt.optim.OptimManger does not exist. Did you mean 'OptimManager'\?$",
    ):
        bmtrain.optim.OptimManger  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError,
        match=r"^bmt.optim.Adam does not .* 'AdamOffloadOptimizer', 'AdamOptimizer', 'AdamW'\?$",
    ):
        bmtrain.optim.Adam  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^bmt.qqq does not exist.$"):
        bmtrain.qqq  # type: ignore[attr-defined]
    assert not hasattr(bmtrain, "qqq")


def test_importing_the_facade_imports_none_of_its_packages() -> None:
    result = python(
        "import bmtrain, sys; print([name for name in sys.modules if"
        " name.startswith(('torch', 'bmt_'))])"
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


IN_FORKS = """
import json, os, sys, traceback
import torch
found = []
for code in json.load(sys.stdin):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            exec(code, {})
        except BaseException:
            error = traceback.format_exc()
        os.write(writer, error.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found.append(stream.read())
    os.waitpid(child, 0)
json.dump(found, sys.stdout)
"""


def errors_in_fresh_processes(codes: list[str]) -> list[str]:
    """Run each of ``codes`` in a process that has imported torch and nothing of ours; return each
    one's error, "" for none.
    """
    command = [sys.executable, "-c", IN_FORKS]
    result = subprocess.run(
        command, input=json.dumps(codes), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    # A run that starts prints a line.
    found: list[str] = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == len(codes)
    return found


def test_modules_with_files_come_by_attribute_and_have_no_stub() -> None:
    codes = []
    for module in FILE_MODULES:
        name = module.removeprefix("bmtrain.")
        codes += [
            (
                f"import bmtrain, sys; assert {module!r} not in sys.modules; assert"
                f" bmtrain.{name}.__name__ == {module!r}"
            ),
            f"from bmtrain import {name}; import {module} as m; assert m is {name}",
        ]
        assert name in dir(bmtrain) and Path(bmtrain.__file__).with_name(f"{name}.py").is_file()
    assert not list(filter(None, errors_in_fresh_processes(codes)))


def test_every_module_can_be_imported_first() -> None:
    modules = [*TABLE, *FILE_MODULES]
    *errors, of_nothing = errors_in_fresh_processes(
        [f"import {module}" for module in (*modules, "bmtrain.nothing")]
    )
    assert not {m: e for m, e in zip(modules, errors, strict=True) if e}
    assert "No module named" in of_nothing


def test_every_installed_package_announces_the_same_version() -> None:
    assert importlib.metadata.version("bmt-core") == bmtrain.__version__
