"""All methods by name. A method is a file of this folder, called as the method.

Files whose names begin with an underscore hold what several methods have in common.
"""

import importlib
import pkgutil

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
    if module.name != "base" and not module.name.startswith("_")
}

__all__ = ["METHODS", "Context", "Method", "Params"]
