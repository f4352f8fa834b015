"""Python files of the user's own: each defines a method, a model, a partition or a source."""

from __future__ import annotations

import contextlib
import dis
import hashlib
import inspect
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfl.config.keys import Settings
from hpcfl.errors import DifferentTensorsError, UserError, one_line

OWN_MODULE = "hpcfl_own_"
"""Prefix of the module names of such files."""

OWN_CODE_FOLDER = "own_code"
"""Where a run folder keeps the text of such files."""

OF_PYTHON = "dataset-"
"""How the names of sources begin that `hpcfl.run` makes."""

RESERVED_OPTIONS = ("name", "path", "code")
"""Keys of every group with a `name`; no option may have one of these names."""

_added: dict[tuple[str, str], Path] = {}
"""The file that has added a name, by its key and this name."""

_allowed: dict[str, tuple[str, bytes]] = {}
"""Path and text of each file that may run, by the digest of the text."""

_classes: dict[tuple[str, str], str] = {}
"""The digest of a class given to `hpcfl.run`, by the key of files of its kind and its name."""


def add_class(key: str, name: str, given: type) -> None:
    """Remember a class that a caller gives in place of a file named by `key`.

    It keeps a digest of the functions and plain values of the class, of those that it inherits from other
    classes of the caller's, and of its parameters. A function counts as Python has compiled it, since the
    text in its file may have changed, with its defaults and the values that it has from around it.
    """
    _classes[key, name] = digest("\n".join(_of_class(given, set())).encode())


def _of_class(given: type, inside: set[int]) -> list[str]:
    known = ("hpcfl.", "pydantic.")
    own = [kind for kind in given.__mro__ if kind is not object and not kind.__module__.startswith(known)]
    items = [item for kind in own for item in vars(kind).items() if item[0] not in ("name", "summary")]
    written = [(name, value) for name, value in items if inspect.isfunction(value) or name[:2] != "__"]
    return [text for name, value in written for text in [name, *_texts(value, inside)]]


_INSIDE = ("fget", "fset", "fdel", "__func__", "func", "args", "keywords")
"""Attributes of what Python wraps functions in that have the functions and their arguments."""


def _texts(value: Any, inside: set[int]) -> list[str]:
    """Return what a value of a class or a function is, as texts; [] for what is no function or plain value.

    `inside` has the ids of the values that hold this one: one of them is left out, not followed for ever.
    """
    if id(value) in inside:
        return []
    inside = {*inside, id(value)}
    if isinstance(value, property | staticmethod | classmethod | cached_property | partial | partialmethod):
        parts: Iterable[Any] = [getattr(value, name) for name in _INSIDE if hasattr(value, name)]
    elif isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif inspect.isfunction(value):
        return _of_function(value, inside)
    elif "__wrapped__" in getattr(value, "__dict__", ()):
        # functools.cache
        return _texts(value.__wrapped__, inside)
    elif isinstance(value, type):
        return _of_class(value, inside) if issubclass(value, Settings) else []
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=lambda one: _texts(one, inside))
    elif isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type == "meta":
            return []
        # bytes, since NumPy lacks bfloat16
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        return [f"{value.dtype} {value.shape} {digest(data)}"]
    elif isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return [f"{array.dtype} {array.shape} {digest(array.data)}"] if array.dtype.kind in "biufc" else []
    else:
        plain = str | int | float | complex | bytes | range
        return [repr(value)] if value is None or isinstance(value, plain) else []
    # with brackets, since [[0], [1]] is not [[0, 1]]
    return [f"{type(value).__name__}(", *(text for one in parts for text in _texts(one, inside)), ")"]


def _of_function(function: types.FunctionType, inside: set[int]) -> list[str]:
    """Return what a function does, with its defaults and the values from around it.

    Values that it sets itself, such as a counter, lists around it, which may collect results, and values of
    its module change while a run is going: they do not count.
    """
    texts, is_set = _compiled(function.__code__)
    for value in (function.__defaults__, function.__kwdefaults__):
        texts += _texts(value, inside)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty one
            if name not in is_set and not isinstance(cell.cell_contents, list):
                texts += _texts(cell.cell_contents, inside)
    return texts


def _compiled(code: types.CodeType) -> tuple[list[str], set[str]]:
    """Return what a function does, and the names of the values from around it that it sets."""
    texts = [code.co_code.hex(), *code.co_names]
    is_set = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_DEREF"}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            inner_texts, inner_is_set = _compiled(one)
            texts, is_set = texts + inner_texts, is_set | inner_is_set
        else:
            texts.append(repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one))
    return texts, is_set


def class_code(key: str, name: str) -> str | None:
    """Return the digest of the class of this name that a caller of this process has given; None without."""
    return _classes.get((key, name))


def code_in_use(key: str, name: str, kind: type) -> str | None:
    """Return the digest of the caller's class or file that a name means now, None if it is hpcfl's."""
    of_file = kind.__module__.rpartition("_")[2] if kind.__module__.startswith(OWN_MODULE) else None
    return class_code(key, name) or of_file


def is_own(key: str, name: str) -> bool:
    """Return whether a user's file, named by `key`, has added this name."""
    return (key, name) in _added


@dataclass(frozen=True)
class OwnFile:
    """A user's file after it was executed; errors call it `key=path`."""

    key: str
    path: Path
    module: types.ModuleType
    code: str
    """A digest of its text, 16 hexadecimal digits."""

    @property
    def place(self) -> str:
        return f"{self.key}={self.path}"

    def only(self, is_wanted: Callable[[Any], bool], wanted: str, if_none: str = "") -> Any:
        """Return the only object of a kind that the file defines; UserError if it defines none or several.

        `if_none` ends the error where there is none.
        """
        found = {name: value for name, value in vars(self.module).items() if is_wanted(value)}
        if len(found) != 1:
            names = ", ".join(found) or "none"
            raise UserError(
                f"{self.place} defines {len(found)} {wanted} ({names}); it needs one" + if_none * (not found)
            )
        return next(iter(found.values()))

    def only_instance(self, kind: type, divided: type | None = None) -> Any:
        """Return the one instance of a class that the file defines; UserError as `only`.

        `divided` is what the `build` of an instance divides: a file may define that alone by mistake.
        """
        if_none = ""
        for name, value in vars(self.module).items():
            if self._is_own_class(value, kind):
                if_none = f": add a line {name.upper()} = {name}(...)"
                break
            if divided is not None and self._is_own_class(value, divided):
                if_none = f", whose build returns {name} as Network(body, head); see docs/own_model.md"
        return self.only(lambda value: isinstance(value, kind), f"instances of {kind.__name__}", if_none)

    def only_class(self, base: type) -> Any:
        """Return the one class derived from `base` that the file itself defines; UserError as `only`."""
        return self.only(
            lambda value: self._is_own_class(value, base), f"classes derived from {base.__name__}"
        )

    def _is_own_class(self, value: Any, base: type) -> bool:
        is_class = isinstance(value, type) and issubclass(value, base)
        return is_class and value.__module__ == self.module.__name__

    def add_to(self, known: dict[str, Any], name: str, value: Any, *, is_recorded: bool) -> str:
        """Register what the file defines; returns its name.

        What a run has recorded can still be read when hpcfl or another file has come to use its name: it is
        then called `name@` and the first digits of the file's digest.

        Raises:
            UserError: the name is in use, and the file is not the recorded one of a run.
        """
        file = self.path.resolve()
        # in a notebook, a file may have another text than before
        if name in known and known[name] is not value and _added.get((self.key, name)) != file:
            if not is_recorded:
                raise UserError(
                    f"{self.place} defines {name}, but that name is already in use; choose another"
                )
            name = f"{name}@{self.code[:8]}"
        known[name] = value
        _added[self.key, name] = file
        return name


def check_options(place: str, group: str, options: type[Settings], base: type[Settings]) -> None:
    """Raise UserError unless options derive from `base` and do not redefine a group's own keys."""
    if not (isinstance(options, type) and issubclass(options, base)):
        raise UserError(f"{place}: its options must be a class derived from {base.__name__}")
    for key in RESERVED_OPTIONS:
        if key in options.model_fields:
            raise UserError(f"{place}: {group}.{key} is reserved; rename {key} of {options.__name__}")


def digest(source: bytes | memoryview) -> str:
    """Return a hash of a file's text, or of other bytes, 16 hexadecimal digits."""
    return hashlib.sha256(source).hexdigest()[:16]


def allow(key: str, path: str) -> None:
    """Allow this process to run a file in its present state: the user named it in a command or argument.

    A file that only a configuration, a table or a run folder names does not run: these may come from others.

    Raises:
        UserError: there is no such file.
    """
    source = _read(key, path)
    _allowed[digest(source)] = path, source


def allow_files(paths: str | Path | Sequence[str | Path]) -> None:
    """Allow this process to run the file, or several, of an argument `own_code`; see `allow`."""
    for path in [paths] if isinstance(paths, str | Path) else paths:
        allow("own_code", str(path))


def text_of(code: str) -> bytes | None:
    """Return the text with this digest, if it is that of a file that may run."""
    return _allowed[code][1] if code in _allowed else None


def _read(key: str, path: str, advice: str = "give a Python file") -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{key}={path}: {reason}; {advice}") from error


def run_own_file(key: str, path: str, expected: str | None = None) -> OwnFile:
    """Run a file, once in a process for each version of its text.

    `expected` is the digest that a run has recorded: the user may have named this file by another path.

    Raises:
        UserError: there is no such file, its digest is not the expected one, it is not allowed to run, or it
            does not run.
    """
    if expected in _allowed:
        path, _ = _allowed[expected]
    place = f"{key}={path}"
    advice = "give a Python file" if expected is None else "give its present place by --own-code FILE"
    source = _read(key, path, advice)
    code = digest(source)
    if expected not in (None, code):
        group = key.rpartition(".")[0]
        raise UserError(
            f"{place} is not the file of this configuration: its code is {code}, not {expected}; name that "
            f"version with --own-code FILE (a run folder keeps it in {OWN_CODE_FOLDER}/), or delete the key "
            f"{group}.code to run the file as it is now"
        )
    if code not in _allowed:
        raise UserError(
            f"{place}: refused to run this Python file, which your command does not name; read it, then add "
            f"--own-code {shlex.quote(path)} (in Python: own_code=...)"
        )
    name = f"{OWN_MODULE}{Path(path).stem}_{code}"
    module = sys.modules.get(name)
    if module is None:
        module = types.ModuleType(name)
        module.__file__ = path
        # pydantic looks up the annotations of classes there
        sys.modules[name] = module
        try:
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
        except BaseException as error:
            # not half of it: the next call runs it again
            del sys.modules[name]
            if not isinstance(error, Exception | SystemExit):
                raise
            reason = traceback.format_exception_only(error)[-1].strip()
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            number = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
            line = "" if number is None else f", line {number}"
            raise UserError(f"{place}{line}: {reason}") from error
    return OwnFile(key, Path(path), module, code)


def mistake_in_own_code(error: BaseException) -> str | None:
    """Return a line about an exception that a user's file has raised, alone or by what it asked of hpcfl, or
    that names a class of it, as errors of hooks do; None for any other, such as a bug below a user's call."""
    text = "; ".join([one_line(error), *getattr(error, "__notes__", ())])
    modules = [module for name, module in sys.modules.items() if name.startswith(OWN_MODULE)]
    files = [str(module.__file__) for module in modules]
    known = (*files, str(Path(__file__).parents[1]))
    for one in filter(None, (error, error.__cause__)):
        # not those in other libraries
        frames = [f for f in traceback.extract_tb(one.__traceback__) if f.filename.startswith(known)]
        own = [frame for frame in frames if frame.filename in files]
        # hpcfl raises errors about what it is asked for; its bugs are no raise statements
        if own and (frames[-1] is own[-1] or (frames[-1].line or "").startswith("raise ")):
            return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {text}"
    of_any, owner = isinstance(error, DifferentTensorsError), str(error).partition(".")[0]
    owners = [str(one.__file__) for one in modules if of_any or isinstance(vars(one).get(owner), type)]
    return f"{', '.join(owners)}: {text}" if owners else None
