"""Runs from Python: from a script or a notebook, alone or under mpirun."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfl.commands.run import run as run_in_folder
from hpcfl.commands.run import started_world
from hpcfl.communication.communicator import run_collectively
from hpcfl.config.keys import Config, flatten
from hpcfl.config.load import allow_named
from hpcfl.config.own_code import OF_PYTHON, add_class, allow_files, check_options, class_code, digest
from hpcfl.data.arrays import arrays_of
from hpcfl.data.npz import IMAGE_CHANNELS
from hpcfl.data.sources import SOURCES, Source
from hpcfl.errors import UserError
from hpcfl.methods import METHODS, Method, Params, complete
from hpcfl.registries import REGISTRIES, merge, read_keys, resolve
from hpcfl.results.run import Run, load_run
from hpcfl.simulation.stopping import StopFlag
from hpcfl.terminal import LOG

Setting = str | Path | Mapping[str, Any]

_ONE_AT_A_TIME = threading.RLock()
"""Held by a run: torch's generators, and where warnings go, belong to the process."""


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
    `hpcfl` has no handler. Of several threads' runs, each waits for the one before.

    Args:
        settings: YAML files, then `key=value` words and dictionaries of keys (nested, or as `train.rounds`),
            the later over the earlier.
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
        KeyboardInterrupt: Ctrl-C has stopped a run without mpirun; it has its checkpoint.
        hpcfl.errors.DivergedError: numbers became nan or infinite (`run.on_divergence`).
        hpcfl.errors.UserError: settings, method or dataset are impossible, or the folder holds another run.
        hpcfl.errors.StorageError: the run folder cannot be written.
    """
    with ExitStack() as at_exit:
        at_exit.enter_context(_ONE_AT_A_TIME)
        world = at_exit.enter_context(started_world(prints_warnings=not LOG.hasHandlers()))
        config = run_collectively(world, lambda: _config(settings, method, dataset, own_code))
        stop = StopFlag()
        at_exit.callback(stop.restore)
        at_exit.enter_context(_libraries_of_a_new_process())
        folder = Path("runs") / config.run_name() if out is None else Path(out).expanduser()
        run_in_folder(config, folder, world, stop, "hpcfl.run(...)", fresh=fresh, quiet=quiet)
        if stop.is_interrupted and world.size == 1:
            raise KeyboardInterrupt
        return load_run(folder.absolute()) if world.is_server else None


@contextmanager
def _libraries_of_a_new_process() -> Iterator[None]:
    """Give a run torch's own defaults, and the caller theirs back, and NumPy's and Python's generators."""
    with ExitStack() as at_exit:
        at_exit.callback(np.random.set_state, np.random.get_state())
        at_exit.callback(random.setstate, random.getstate())
        at_exit.callback(torch.set_num_threads, torch.get_num_threads())
        at_exit.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        cudnn = torch.backends.cudnn
        at_exit.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        _default_precision(at_exit)
        for kind in ("cpu", "cuda"):
            at_exit.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        if torch.get_default_device().type != "cpu":
            at_exit.enter_context(torch.device("cpu"))
        at_exit.enter_context(torch.inference_mode(False))
        at_exit.enter_context(torch.enable_grad())
        yield


def _default_precision(at_exit: ExitStack) -> None:
    """Give products torch's own precision, which it keeps twice since 2.9, and give the caller's back."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    products: Any = torch.backends.cuda.matmul
    older: list[tuple[Callable[..., None], Any]] = []
    # torch cannot tell where the two differ
    with suppress(RuntimeError):
        older.append((partial(setattr, cudnn, "allow_tf32"), cudnn.allow_tf32))
    with suppress(RuntimeError):
        older.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    names = ("matmul", "conv", "rnn")
    kinds = [getattr(backend, name, None) for backend in (cudnn, mkldnn) for name in names]
    # one without a value of its own reads as that of all, so these come first, and are restored last
    for backend in (torch.backends, cudnn, mkldnn, products, *kinds):
        if hasattr(backend, "fp32_precision"):
            at_exit.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
            backend.fp32_precision = "none"
    # as the older one sets both, it is restored before
    for restore, value in older:
        at_exit.callback(restore, value)
    torch.set_float32_matmul_precision("highest")


def _config(
    settings: tuple[Setting, ...],
    method: str | type[Method] | None,
    dataset: Any,
    own_code: str | Path | Sequence[str | Path],
) -> Config:
    allow_files(own_code)
    tree: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for setting in settings:
        if isinstance(setting, Mapping):
            keys |= _keys_of(setting)
        elif isinstance(setting, str) and "=" in setting:
            keys |= flatten(merge({}, [setting]))
        elif not isinstance(setting, str | Path):
            raise UserError(
                f"{setting!r} is not a setting; give a YAML file, a word such as 'train.rounds=5', or a "
                "dictionary of keys"
            )
        elif keys:
            raise UserError(f"{setting} comes after words or dictionaries; give YAML files before them")
        else:
            tree = merge(tree, read_keys(Path(setting)))
    if method is not None:
        keys["method.name"] = method if isinstance(method, str) else _add_method(method)
    if dataset is not None:
        keys["data.source"] = _add_source(dataset)
    return resolve(merge(tree, keys))


def _keys_of(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dictionary, flat; it may name files of own code."""
    keys = flatten(setting)
    allow_named(keys)
    return keys | {key: str(value) for key, value in keys.items() if isinstance(value, Path)}


def _add_method(method: type[Method]) -> str:
    """Register a class as a method in this process, and return its name."""
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"method={method!r} is not a method; give a name, or a class derived from Method")
    key = REGISTRIES.method.own_key
    if METHODS.get(getattr(method, "name", "")) is method and not class_code(key, method.name):
        return method.name
    check_options(f"method={method.__name__}", "method", method.Params, Params)
    complete(method, method.__name__.lower(), f"the class {method.__name__}")
    if method.name in METHODS and not class_code(key, method.name):
        raise UserError(
            f"{method.__name__} has the name of a method of hpcfl, {method.name}; set {method.__name__}.name "
            "to another"
        )
    add_class(key, method.name, method)
    METHODS[method.name] = method
    return method.name


def _add_source(dataset: Any) -> str:
    """Register samples as a source. Its name contains their digest, so other samples make another run."""
    try:
        pairs = [dataset[number] for number in range(len(dataset))]
        if any(isinstance(pair, Mapping) for pair in pairs):
            raise TypeError("a sample is a dictionary")
        x = np.stack([np.asarray(image) for image, _ in pairs])
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"dataset: {error}; give a sequence of (image, label), the images tensors or arrays of one shape "
            "[C, H, W] or [H, W], or features [F] in their place"
        ) from error
    if x.ndim == 4 and x.shape[3] in IMAGE_CHANNELS and x.shape[1] not in IMAGE_CHANNELS:
        raise UserError(
            f"dataset: the images have the shape {list(x.shape[1:])}, with channels last; give them as "
            "[C, H, W], such as by torchvision.transforms.ToTensor()"
        )
    try:
        # a fraction is no label
        y = np.array([index(label) for _, label in pairs])
    except TypeError as error:
        raise UserError("dataset: a label is not an integer; give labels as integers from 0 on") from error
    arrays = arrays_of(x[:, None] if x.ndim == 3 else x, y, "dataset")
    kind = f"{arrays.x.dtype} {arrays.x.shape}".encode()
    name = f"{OF_PYTHON}{digest(kind + arrays.x.tobytes() + arrays.y.tobytes())[:8]}"
    SOURCES[name] = Source(f"{len(y)} samples given to hpcfl.run", read=lambda _: arrays)
    return name
