"""``choose_format``: the format of a file, by name, by object, or by its suffix; ``open_checkpoint``: a file or a directory."""

from __future__ import annotations

from pathlib import Path

from bmt_core.checkpoint.directory_reader import INDEX_SUFFIX, open_directory, open_index
from bmt_core.checkpoint.format import CheckpointFormat, CheckpointReader
from bmt_core.checkpoint.torch_format import TorchFormat
from bmt_core.errors import CheckpointError, PluginError
from bmt_core.plugins import Registry
from bmt_core.run.runtime import current, is_initialized

FormatChoice = str | CheckpointFormat | type[CheckpointFormat] | None

# Suffixes of other formats: a file of torch under such a name would mislead.
_SUFFIXES_OF_OTHERS = (".gguf", ".json", ".npz", ".h5", ".onnx")


def choose_format(path: Path, choice: FormatChoice = None) -> CheckpointFormat:
    """Return the format that ``choice`` is or names; for None the one of ``path``'s suffix, or else the torch format.

    Raises :class:`CheckpointError` for a suffix of a format that no installed package provides; :class:`PluginError` for an
    unknown name.
    """
    if isinstance(choice, CheckpointFormat):
        return choice
    if isinstance(choice, type):
        return choice()
    registry = current().registry if is_initialized() else Registry.load()
    if choice is not None:
        return _instantiate(registry.find("checkpoint format", choice))
    by_suffix = _by_suffix(registry)
    fitting = [suffix for suffix in by_suffix if path.name.endswith(suffix)]
    if fitting:
        return by_suffix[max(fitting, key=len)]
    if path.suffix in _SUFFIXES_OF_OTHERS:
        known = ", ".join(f"{form.name} ({suffix})" for suffix, form in by_suffix.items())
        raise CheckpointError(
            f"No installed package reads or writes {path.suffix} files, as {path} would have to be. Known: {known}."
            " Choose another suffix, or install a package that announces the format by the hook bmt_checkpoint_formats."
        )
    return TorchFormat()


def open_checkpoint(path: Path, choice: FormatChoice = None) -> CheckpointReader:
    """Open a file, a directory in the layout of Hugging Face, or the index file of one."""

    def open_file(file: Path) -> CheckpointReader:
        return choose_format(file, choice).open(file)

    if path.is_dir():
        return open_directory(path, open_file)
    return open_index(path, open_file) if path.name.endswith(INDEX_SUFFIX) else open_file(path)


def _by_suffix(registry: Registry) -> dict[str, CheckpointFormat]:
    found: dict[str, CheckpointFormat] = {}
    for kind in registry.checkpoint_formats.values():
        form = _instantiate(kind)
        for suffix in form.suffixes:
            other = found.setdefault(suffix, form)
            if other is not form:
                raise PluginError(
                    f"Files ending in {suffix} are claimed by the checkpoint formats {other.name!r} and {form.name!r}."
                    " Choose one by name: format=…"
                )
    return found


def _instantiate(kind: type) -> CheckpointFormat:
    if not issubclass(kind, CheckpointFormat):
        raise PluginError(
            f"{kind.__qualname__} is announced as a checkpoint format but is no subclass of CheckpointFormat."
        )
    return kind()
