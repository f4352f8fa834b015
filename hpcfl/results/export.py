"""Export a run's models for use without hpcfl: weights, a JSON description, and the network's source."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from hpcfl import __version__
from hpcfl.errors import UserError
from hpcfl.parameters import Tensors
from hpcfl.results.export_source import UntraceableError, written
from hpcfl.results.models import GLOBAL, ClientName, TrainedModels
from hpcfl.storage.reading import Columns

ALL: Literal["all"] = "all"
SOURCE_NAME = "model.py"
ONE_NETWORK = "one network, whose state the tensors are"


def export(
    models: TrainedModels, client: ClientName | Literal["all"], out: Path, clients: Columns
) -> list[Path]:
    """Write models of a run, and return the files; `clients` are the columns of clients.csv, if it is there.

    A folder gets, of each model, `client3` or `global`, the weights as .pt (a state dict) and .safetensors,
    and the description as .json; FILE.pt or FILE.safetensors is one file of weights, with the description
    beside it. model.py in the same folder builds the network and loads the weights; a method that does not
    predict by one network has no model.py.

    Raises:
        UserError: there are no such models, the ending is unknown, or the files cannot be written.
    """
    is_file = out.suffix in WRITERS
    if is_file and client == ALL:
        raise UserError(f"--out {out} is one file, and --client all are several models; give --out FOLDER")
    ending = out.suffix.removeprefix(".")
    # a name such as lr0.1 is a folder
    if not is_file and ending.isalnum() and ending[0].isalpha() and not out.is_dir():
        raise UserError(
            f"--out {out} has an ending that is not known; allowed: a folder, FILE.pt or FILE.safetensors"
        )
    folder = out.parent if is_file else out
    names = range(models.num_clients) if client == ALL else [client]
    files: list[Path] = []
    try:
        for name in names:
            stem = out.with_suffix("") if is_file else folder / (name if name == GLOBAL else f"client{name}")
            suffixes = [out.suffix] if is_file else list(WRITERS)
            files += _export_one(models, name, stem, suffixes, clients)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; give another --out") from error
    return list(dict.fromkeys(files))


def _export_one(
    models: TrainedModels, client: ClientName, stem: Path, suffixes: list[str], clients: Columns
) -> Iterator[Path]:
    """Write one model's files, and yield them."""
    source = None
    if models.is_network:
        network = models.network(client)
        parts = getattr(network, "parts", ONE_NETWORK)
        try:
            source, weights = written(network, models.data)
        except UntraceableError as error:
            weights = models.tensors(client)
            parts = f"{parts}; there is no {SOURCE_NAME}: {error}"
    else:
        weights = models.tensors(client)
        parts = (
            f"parts that {models.config.method.name} combines by a rule of its own: there is no {SOURCE_NAME}"
        )
    if source is None:
        warnings.warn(f"{stem}: {parts}; its tensors are exported", stacklevel=2)
    recipe = _recipe(models, client, weights, parts, clients)
    stem.parent.mkdir(parents=True, exist_ok=True)
    if source is not None:
        yield _write_source(stem.parent / SOURCE_NAME, source)
    for suffix in suffixes:
        file = stem.with_name(f"{stem.name}{suffix}")
        WRITERS[suffix](weights, recipe, file)
        yield file
    beside = stem.with_name(f"{stem.name}.json")
    beside.write_text(json.dumps(recipe, indent=1) + "\n")
    yield beside


def _recipe(
    models: TrainedModels, client: ClientName, weights: Tensors, parts: str, clients: Columns
) -> dict[str, Any]:
    """Return the description: what the weights are, and the input that the network needs."""
    config, data = models.config, models.data
    tree = config.tree()
    recipe = {
        "hpcfl": __version__,
        "run": models.path.resolve().parent.name,
        "method": tree["method"],
        "client": client,
        "round": models.round,
        "model": tree["model"],
        "source": config.data.source,
        "image_shape": list(data.image_shape),
        "image_type": data.dtype,
        "scale": data.scale,
        "mean": list(data.mean),
        "std": list(data.std),
        "normalisation": "(image / scale - mean) / std, a mean and a std a channel",
        "classes": list(range(data.num_classes)),
        "outputs": "logits, in the order of classes, which are the labels of the data set",
        "parts": parts,
        "tensors": {name: list(tensor.shape) for name, tensor in weights.items()},
    }
    if client != GLOBAL and clients:
        # the model's accuracy at the end of the run, on the client's own samples
        recipe |= {"split": config.run.eval_split, "accuracy": float(clients["accuracy"][client])}
        if "unseen" in clients:
            recipe["unseen"] = bool(clients["unseen"][client])
    return recipe


def _write_source(path: Path, source: str) -> Path:
    """Write model.py; UserError if another model.py exists."""
    if path.is_file() and path.read_text() != source:
        raise UserError(f"{path} exists, for another network; give another folder with --out")
    path.write_text(source)
    return path


def _write_pt(weights: Tensors, recipe: dict[str, Any], path: Path) -> None:
    torch.save(weights, path)


def _write_safetensors(weights: Tensors, recipe: dict[str, Any], path: Path) -> None:
    """Write weights with the description as metadata; entries that are not text are JSON."""
    try:
        save_file = importlib.import_module("safetensors.torch").save_file
    except ImportError as error:
        raise UserError(
            f"{path} needs the package safetensors: pip install safetensors; or give --out FILE.pt"
        ) from error
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in recipe.items()}
    save_file(weights, path, metadata)


WRITERS: dict[str, Callable[[Tensors, dict[str, Any], Path], None]] = {
    ".pt": _write_pt,
    ".safetensors": _write_safetensors,
}
"""Writers by the ending of a weights file."""
