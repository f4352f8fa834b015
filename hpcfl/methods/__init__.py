"""All methods by name. Each method is one file of this folder, named after the method, or a user's own file.

Files whose names begin with an underscore hold code that several methods share.
"""

import importlib
import pkgutil

from hpcfl.config.own_code import run_own_file
from hpcfl.methods.base import Context, Method, Params


def _find(name: str) -> type[Method]:
    """Return the method of that name from the module of that name."""
    module = importlib.import_module(f"{__name__}.{name}")
    for member in vars(module).values():
        if isinstance(member, type) and issubclass(member, Method) and getattr(member, "name", None) == name:
            return member
    raise ImportError(f"{module.__file__} has no Method with name = {name!r}")


METHODS: dict[str, type[Method]] = {
    module.name: _find(module.name)
    for module in pkgutil.iter_modules(__path__)
    if module.name not in ("adapter", "base", "diagnostics") and not module.name.startswith("_")
}


def add_own_method(path: str, expected: str | None = None) -> tuple[str, str]:
    """Add the one method that a user's Python file defines; return its name and a digest of the file.

    The name is the class's own `name`, or else the file's. Raises UserError where there is no such file, its
    digest is not the expected one, it does not run, or it does not define one Method with a name of its own.
    """
    file = run_own_file("method.path", path, expected)
    kind = file.only_class(Method)
    file.check_options(kind.Params, Params)
    for name, default in (("name", file.name), ("summary", f"from {file.path.name}")):
        if name not in vars(kind):
            setattr(kind, name, default)
    file.add_to(METHODS, kind.name, kind)
    return kind.name, file.code


__all__ = ["METHODS", "Context", "Method", "Params", "add_own_method"]
