"""All methods by name. Each method is one file of this folder, named after the method, or a user's own file.
Files with a leading underscore contain code that several methods share.
"""

import importlib
import pkgutil

from hpcfl.config.own_code import OwnFile
from hpcfl.methods.base import Context, Method, Params


def _methods() -> dict[str, type[Method]]:
    """Return the class with a summary of each file of this folder; its name is that of the file."""
    found: dict[str, type[Method]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            is_here = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_here and issubclass(kind, Method) and "summary" in vars(kind):
                found[file.name] = kind
                kind.name = file.name
    return found


METHODS = _methods()


def own_method(file: OwnFile) -> type[Method]:
    """Return the one method that a user's Python file defines; UserError otherwise."""
    method: type[Method] = file.only_class(Method)
    complete(method, file.path.stem, f"from {file.path.name}")
    return method


def complete(method: type[Method], name: str, summary: str) -> None:
    """Give a class the name and the summary that it does not define itself."""
    for key, value in (("name", name), ("summary", summary)):
        if key not in vars(method):
            setattr(method, key, value)


__all__ = ["METHODS", "Context", "Method", "Params", "complete", "own_method"]
