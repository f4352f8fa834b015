"""All methods by name. A method is a file of this folder, called as the method, or a user's own file.

Files whose names begin with an underscore hold what several methods have in common.
"""

import hashlib
import importlib
import pkgutil
import sys
import traceback
import types
from pathlib import Path

from hpcfl.errors import UserError
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


_OWN_MODULE = "hpcfl_own_method_"

RESERVED_KEYS = ("name", "path", "code")
"""Keys under `method.*` that are no method's hyper-parameters."""


def is_own(method: type[Method]) -> bool:
    """Whether a method comes from a user's own file."""
    return method.__module__.startswith(_OWN_MODULE)


def add_own_method(path: str, expected: str | None = None) -> tuple[str, str]:
    """Add the one method that a user's Python file defines; return its name and a digest of the file.

    The name is the class's own `name`, or else the file's. Raises UserError where there is no such file, its
    digest is not the expected one, it does not run, or it does not define one Method with a name of its own.
    """
    place = f"method.path={path}"
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}; give a Python file that defines a Method") from error
    digest = hashlib.sha256(source).hexdigest()[:16]
    if expected not in (None, digest):
        raise UserError(
            f"{place} is not the file of this configuration: its code is {digest}, not {expected}; drop "
            "method.code to run the file as it is now"
        )
    module_name = f"{_OWN_MODULE}{Path(path).stem}_{digest}"
    module = sys.modules.get(module_name)
    if module is None:
        module = types.ModuleType(module_name)
        module.__file__ = path
        # pydantic looks up the annotations of classes there
        sys.modules[module_name] = module
        try:
            exec(compile(source, path, "exec"), vars(module))
        except Exception as error:
            del sys.modules[module_name]
            said = traceback.format_exception_only(error)[-1].strip()
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            line = f", line {frames[-1].lineno}" if frames else ""
            raise UserError(f"{place}{line}: {said}") from error
    kinds = [
        member
        for member in vars(module).values()
        if isinstance(member, type) and issubclass(member, Method) and member.__module__ == module_name
    ]
    if len(kinds) != 1:
        found = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise UserError(f"{place} defines {len(kinds)} classes derived from Method ({found}); it needs one")
    kind = kinds[0]
    for key in RESERVED_KEYS:
        if key in kind.Params.model_fields:
            raise UserError(f"{place}: its Params has {key}, as method.{key} is another thing; rename it")
    for name, default in (("name", Path(path).stem), ("summary", f"from {Path(path).name}")):
        if name not in vars(kind):
            setattr(kind, name, default)
    if METHODS.setdefault(kind.name, kind) is not kind:
        raise UserError(
            f"{place} defines a method named {kind.name}, as hpcfl or another file does; give the class "
            "another name"
        )
    return kind.name, digest


__all__ = ["METHODS", "Context", "Method", "Params", "add_own_method", "is_own"]
