"""``implemented_hooks``: check a plugin's hook implementations when it is registered."""

from __future__ import annotations

import inspect

import pluggy

from bmt_core.errors import PluginError, unknown_name
from bmt_core.plugins import hookspecs

# Options of pluggy that bmt does not support: it calls hooks in the order of the plugins' names,
# and wraps none.
_REFUSED_OPTIONS = ("tryfirst", "trylast", "wrapper", "hookwrapper")


def implemented_hooks(manager: pluggy.PluginManager, plugin: object, title: str) -> tuple[str, ...]:
    """Return the names of the hooks that ``plugin`` implements, sorted; PluginError when an
    implementation is wrong.

    Error messages call the plugin ``title``.
    """
    known = [
        name
        for name in dir(hookspecs)
        if hasattr(getattr(hookspecs, name), f"{hookspecs.PROJECT}_spec")
    ]
    hooks = []
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            _check_not_forgotten(plugin, attribute, known, title)
            continue
        hook = options.get("specname") or attribute
        refused = [option for option in _REFUSED_OPTIONS if options.get(option)]
        if refused:
            raise PluginError(
                f"The {title} asks for {refused[0]} in {hook}(): bmt calls hooks in the order of"
                " the plugins' names. Write @hookimpl without options."
            )
        if hook in known:
            _check_arguments(plugin, attribute, hook, title)
        elif not options.get("optionalhook"):
            raise PluginError(
                f"The {title} implements an unknown hook. {unknown_name('hook', hook, known)}"
            )
        hooks.append(hook)
    if not hooks:
        raise PluginError(
            f"The {title} implements no hook. Its entry point must name the module with the"
            " @hookimpl functions."
        )
    return tuple(sorted(hooks))


def _check_not_forgotten(plugin: object, attribute: str, known: list[str], title: str) -> None:
    if attribute not in known:
        return
    function = inspect.getattr_static(plugin, attribute)
    if inspect.isfunction(function) and not hasattr(function, f"{hookspecs.PROJECT}_spec"):
        raise PluginError(
            f"The {title} defines {attribute}() without @hookimpl, so that it would never be"
            " called. Add @hookimpl."
        )


def _check_arguments(plugin: object, attribute: str, hook: str, title: str) -> None:
    parameters = inspect.signature(getattr(plugin, attribute)).parameters.values()
    expected = inspect.signature(getattr(hookspecs, hook)).parameters
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            # pluggy 1.5 and 1.6 do not pass such arguments, 1.7 does.
            raise PluginError(
                f"The {title} gives argument {parameter.name!r} of {hook}() a default value. "
                f"Hook implementations take no defaults: write {hook}({', '.join(expected)})."
            )
        if parameter.name not in expected or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginError(
                f"The {title} has an argument {parameter} in {hook}(), which takes"
                f" ({', '.join(expected)})."
            )
