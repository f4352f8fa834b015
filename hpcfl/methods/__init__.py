"""All methods by name. Each method is one file of this folder, named after the method, or a user's own file.
Files with a leading underscore contain code that several methods share.
"""

import importlib
import pkgutil

from hpcfl.config.own_code import OwnFile
from hpcfl.methods.base import Context, Method, Params


def _find(name: str) -> type[Method]:
    """Return the method of that name from the module of that name."""
    module = importlib.import_module(f"{__name__}.{name}")
    for member in vars(module).values():
        if isinstance(member, type) and issubclass(member, Method) and getattr(member, "name", None) == name:
            return member
    raise ImportError(f"{module.__file__} has no Method with name = {name!r}")


_OTHERS = {"adapter", "base", "buffers", "checks", "context", "diagnostics", "hook_results", "traits"}
"""Files that are not methods."""

METHODS: dict[str, type[Method]] = {
    module.name: _find(module.name)
    for module in pkgutil.iter_modules(__path__)
    if module.name not in _OTHERS and not module.name.startswith("_")
}


def own_method(file: OwnFile) -> type[Method]:
    """Return the one method that a user's Python file defines; UserError otherwise."""
    method: type[Method] = file.only_class(Method)
    complete(method, file.name, f"from {file.path.name}")
    return method


def complete(method: type[Method], name: str, summary: str) -> None:
    """Give a class the name and the summary that it does not define itself."""
    for key, value in (("name", name), ("summary", summary)):
        if key not in vars(method):
            setattr(method, key, value)


__all__ = ["METHODS", "Context", "Method", "Params", "complete", "own_method"]
