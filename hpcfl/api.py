"""Runs from Python: from a script or a notebook, alone or under mpirun."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.commands.run import run as run_in_folder
from hpcfl.commands.run import started_world
from hpcfl.communication.communicator import run_collectively
from hpcfl.config.key_errors import OF_PYTHON
from hpcfl.config.keys import Config, flatten
from hpcfl.config.load import allow_named
from hpcfl.config.own_code import allow_files, check_options
from hpcfl.data.arrays import arrays_of
from hpcfl.data.sources import SOURCES, Source
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, Method, Params, complete
from hpcfl.registries import merge, read_keys, resolve
from hpcfl.results.run import Run, load_run
from hpcfl.simulation.stopping import StopFlag
from hpcfl.terminal import LOG

Setting = str | Path | Mapping[str, Any]

_added: set[str] = set()
"""Names of methods that the caller of `run` passed as classes."""


def run(
    *settings: Setting,
    method: str | type[Method] | None = None,
    dataset: Any = None,
    out: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    own_code: str | Path | Sequence[str | Path] = (),
) -> Run | None:
    """Start a run in its folder, or resume it, as `hpcfl run` does. Collective.

    Rank 0 gives warnings to the logger `hpcfl`, and those of libraries to `py.warnings`; it prints them where
    `hpcfl` has no handler.

    Args:
        settings: YAML files, `key=value` words and dictionaries of keys (nested, or as `train.rounds`), the
            later over the earlier.
        method: a method's name, or a class of your own derived from `Method`.
        dataset: a torch Dataset, or any sequence of (image [C, H, W] or [H, W], label), in place of
            `data.source`; all ranks must give the same.
        out: run folder; default: runs/<name>.
        fresh: move an old run folder aside and start over.
        quiet: print nothing but warnings and errors.
        own_code: Python files that may run if a YAML file names them (`method.path` and the like); those that
            words and dictionaries name may run in any case.

    Returns:
        What `hpcfl.load_run` returns, also where a signal has stopped the run early; None on all ranks but 0.

    Raises:
        hpcfl.errors.UserError: settings, method or dataset are impossible, or the folder holds another run.
        hpcfl.errors.StorageError: the run folder cannot be written.
    """
    with started_world(prints_warnings=not LOG.hasHandlers()) as world, ExitStack() as at_exit:
        config = run_collectively(world, lambda: _config(settings, method, dataset, own_code))
        stop = StopFlag()
        at_exit.callback(stop.restore)
        folder = Path("runs") / config.run_name() if out is None else Path(out)
        run_in_folder(config, folder, world, stop, "hpcfl.run(...)", fresh=fresh, quiet=quiet)
        return load_run(folder) if world.is_server else None


def _config(
    settings: tuple[Setting, ...],
    method: str | type[Method] | None,
    dataset: Any,
    own_code: str | Path | Sequence[str | Path],
) -> Config:
    allow_files("own_code", own_code)
    tree: dict[str, Any] = {}
    for setting in settings:
        if isinstance(setting, Mapping):
            allow_named(flatten(setting))
            tree = merge(tree, setting)
        elif isinstance(setting, str) and "=" in setting:
            tree = merge(tree, [setting])
        elif isinstance(setting, Path) or (isinstance(setting, str) and setting.endswith((".yaml", ".yml"))):
            tree = merge(tree, read_keys(Path(setting)))
        else:
            raise UserError(
                f"{setting!r} is not a setting; give a YAML file, a word such as 'train.rounds=5', or a "
                "dictionary of keys"
            )
    if method is not None:
        tree = merge(tree, {"method.name": method if isinstance(method, str) else _add_method(method)})
    if dataset is not None:
        tree = merge(tree, {"data.source": _add_source(dataset)})
    return resolve(tree)


def _add_method(method: type[Method]) -> str:
    """Register a class as a method in this process, and return its name."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"method={method!r} is not a method; give a name, or a class derived from Method")
    if METHODS.get(getattr(method, "name", "")) is method:
        return method.name
    check_options(f"method={method.__name__}", "method", method.Params, Params)
    complete(method, method.__name__.lower(), f"the class {method.__name__}")
    if method.name in METHODS and method.name not in _added:
        raise UserError(
            f"{method.__name__} has the name of a method of hpcfl, {method.name}; set {method.__name__}.name "
            "to another"
        )
    _added.add(method.name)
    METHODS[method.name] = method
    return method.name


def _add_source(dataset: Any) -> str:
    """Register samples as a source. Its name contains their digest, so other samples make another run."""
    try:
        pairs = [dataset[number] for number in range(len(dataset))]
        x = np.stack([np.asarray(image) for image, _ in pairs])
        # a fraction is no label
        y = np.array([index(label) for _, label in pairs])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"dataset: {error}; give a sequence of (image, label), the images tensors or arrays of one shape "
            "[C, H, W] or [H, W]"
        ) from error
    arrays = arrays_of(x[:, None] if x.ndim == 3 else x, y, "dataset")
    digest = hashlib.sha256(arrays.x.tobytes() + arrays.y.tobytes()).hexdigest()[:8]
    name = f"{OF_PYTHON}{digest}"
    SOURCES[name] = Source(f"{len(y)} samples given to hpcfl.run", read=lambda _: arrays)
    return name
