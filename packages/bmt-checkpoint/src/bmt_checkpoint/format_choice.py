"""``choose_format``: the format of a file, by name, by object, or by its suffix;
``open_checkpoint``: a file or a directory.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from bmt_checkpoint.directory_reader import INDEX_SUFFIX, open_directory, open_index
from bmt_checkpoint.format import CheckpointFormat, CheckpointReader
from bmt_checkpoint.torch_format import TorchFormat
from bmt_core.errors import CheckpointError, PluginError
from bmt_core.plugins import Registry
from bmt_core.run.runtime import current, is_initialized

FormatChoice = str | CheckpointFormat | type[CheckpointFormat] | None

# Suffixes of other formats: a file of torch under such a name would mislead.
_SUFFIXES_OF_OTHERS = (".gguf", ".json", ".npz", ".h5", ".onnx")


def choose_format(path: Path, choice: FormatChoice = None) -> CheckpointFormat:
    """Return the format that ``choice`` is or names. None: the format of ``path``'s suffix, or the
    torch format if there is none.

    Raises :class:`CheckpointError` for a suffix of a format that no installed package provides;
    :class:`PluginError` for an unknown name.
    """
    if isinstance(choice, CheckpointFormat):
        return choice
    if isinstance(choice, type):
        return choice()
    if choice is not None:
        return _instantiate(_registry().find("checkpoint format", choice))
    found = _format_of_suffix(path)
    if found is not None:
        return found
    if path.suffix in _SUFFIXES_OF_OTHERS or _misspelt_suffix(path):
        raise _unknown_suffix(path)
    return TorchFormat()


def choose_known_format(path: Path) -> CheckpointFormat:
    """Return the format of ``path``'s suffix; :class:`CheckpointError` if there is none."""
    found = _format_of_suffix(path)
    if found is None:
        raise _unknown_suffix(path)
    return found


def _format_of_suffix(path: Path) -> CheckpointFormat | None:
    """Return the format that the suffix of ``path`` belongs to, if any."""
    by_suffix = _by_suffix()
    fitting = [suffix for suffix in by_suffix if path.name.endswith(suffix)]
    return by_suffix[max(fitting, key=len)] if fitting else None


def choose_directory_format(path: Path) -> CheckpointFormat | None:
    """Return the format of the suffix of ``path`` if it is one of directories, otherwise None."""
    fitting = [
        form for form in _formats() if form.is_directory and path.name.endswith(form.suffixes)
    ]
    return fitting[0] if fitting else None


def open_checkpoint(path: Path, choice: FormatChoice = None) -> CheckpointReader:
    """Open a file, a directory of a format or in the layout of Hugging Face, or the index file
    of one.
    """

    def open_file(file: Path) -> CheckpointReader:
        return choose_format(file, choice).open(file)

    if choice is None and path.is_dir():
        formats = (form for form in _formats() if form.is_directory and form.recognises(path))
        form = next(formats, None)
        return open_directory(path, open_file) if form is None else form.open(path)
    return open_index(path, open_file) if path.name.endswith(INDEX_SUFFIX) else open_file(path)


def _registry() -> Registry:
    return current().registry if is_initialized() else Registry.load()


def _formats() -> list[CheckpointFormat]:
    return [_instantiate(kind) for kind in _registry().checkpoint_formats.values()]


def _by_suffix() -> dict[str, CheckpointFormat]:
    found: dict[str, CheckpointFormat] = {}
    for form in _formats():
        for suffix in form.suffixes:
            other = found.setdefault(suffix, form)
            if other is not form:
                raise PluginError(
                    f"Files ending in {suffix} are claimed by the checkpoint formats {other.name!r}"
                    f" and {form.name!r}. Choose one by name: format=…"
                )
    return found


def _misspelt_suffix(path: Path) -> str | None:
    """Return the suffix of a format other than torch's that the suffix of ``path`` nearly is, such
    as ``.safetensor``.
    """
    others = [suffix for suffix, form in _by_suffix().items() if not isinstance(form, TorchFormat)]
    return next(iter(get_close_matches(path.suffix, others, n=1, cutoff=0.9)), None)


def _unknown_suffix(path: Path) -> CheckpointError:
    meant = _misspelt_suffix(path)
    known = ", ".join(f"{form.name} ({suffix})" for suffix, form in _by_suffix().items())
    return CheckpointError(
        "No installed package reads or writes"
        f" {path.suffix or 'files without a suffix'}{' files' if path.suffix else ''}, as {path}"
        f" would have to be.{f' Did you mean {meant}?' if meant else ''} Known: {known}. Choose"
        " another suffix, or install a package that announces the format by the hook"
        " bmt_checkpoint_formats."
    )


def _instantiate(kind: type) -> CheckpointFormat:
    if not issubclass(kind, CheckpointFormat):
        raise PluginError(
            f"{kind.__qualname__} is announced as a checkpoint format but is no subclass of"
            " CheckpointFormat. Derive it from bmt_checkpoint.CheckpointFormat."
        )
    return kind()
