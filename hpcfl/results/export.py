"""Export a run's models for use without hpcfl: weights, whole models, and a JSON description."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpcfl import __version__
from hpcfl.errors import UserError, one_line
from hpcfl.parameters import Tensors
from hpcfl.results.models import GLOBAL, ClientName, TrainedModels
from hpcfl.storage.atomic import replace_file, writing
from hpcfl.storage.reading import Columns
from hpcfl.storage.snapshot import DataRecord

LOG = logging.getLogger(__name__)

ALL: Literal["all"] = "all"
KINDS = (".pt", ".safetensors", ".pt2")
"""Endings: a state dict, the same as safetensors, and a whole model."""


class Deployed(nn.Module):
    """A network with all that it needs before and after it: from samples as stored to probabilities."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, data: DataRecord) -> None:
        super().__init__()
        self.network, self.scale, self.takes_tokens = network, data.scale, data.sample.kind == "tokens"
        self.register_buffer("mean", data.sample.by_channel(data.mean))
        self.register_buffer("std", data.sample.by_channel(data.std))

    def forward(self, samples: Tensor) -> Tensor:
        """Return class probabilities [n, classes] of samples [n, ...]."""
        if not self.takes_tokens:
            samples = (samples.to(torch.float32) / self.scale - self.mean) / self.std
        logits: Tensor = self.network(samples)
        return logits.softmax(dim=1)


def export(
    models: TrainedModels, client: ClientName | Literal["all"], out: Path, clients: Columns
) -> list[Path]:
    """Write models of a run, and return the files; `clients` are the columns of clients.csv, if it is there.

    A folder gets, of each model, `client3` or `global`, the weights as .pt (a state dict) and .safetensors,
    the whole model as .pt2 (torch.export), and the description as .json; FILE.pt, FILE.safetensors or
    FILE.pt2 is one of these, with the description beside it. There is no .pt2, and a warning, where a method
    does not predict by one network, or torch.export cannot follow the network.

    Raises:
        UserError: there are no such models, the ending is unknown, or the files cannot be written.
        StorageError: there is no room.
    """
    is_file = out.suffix in KINDS
    if is_file and client == ALL:
        raise UserError(f"--out {out} is one file, and --client all are several models; give --out FOLDER")
    ending = out.suffix.removeprefix(".")
    # a name such as lr0.1 is a folder
    if not is_file and ending.isalnum() and ending[0].isalpha() and not out.is_dir():
        allowed = ", ".join(f"FILE{kind}" for kind in KINDS)
        raise UserError(f"--out {out} has an unknown ending; allowed: a folder, {allowed}")
    files: list[Path] = []
    if client not in (ALL, GLOBAL):
        client = models.number(client)
    with writing(out, "give another --out"):
        for name in range(models.num_clients) if client == ALL else [client]:
            stem = out.with_suffix("") if is_file else out / (name if name == GLOBAL else f"client{name}")
            files += _export_one(models, name, stem, [out.suffix] if is_file else KINDS, clients)
    return files


def _export_one(
    models: TrainedModels,
    client: ClientName,
    stem: Path,
    kinds: Sequence[str],
    clients: Columns,
) -> Iterator[Path]:
    """Write one model's files, and yield them."""
    # parts of one large tensor would be saved with the whole of it
    weights = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in models.tensors(client).items()
    }
    recipe = _recipe(models, client, weights, clients)
    stem.parent.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        file = stem.with_name(f"{stem.name}{kind}")
        if kind == ".pt":
            torch.save(weights, whole := io.BytesIO())
            replace_file(file, whole.getvalue())
        elif kind == ".safetensors":
            _write_safetensors(weights, recipe, file)
        elif not _write_whole(models, client, file):
            continue
        yield file
    beside = stem.with_name(f"{stem.name}.json")
    replace_file(beside, json.dumps(recipe, indent=1) + "\n")
    yield beside


def _recipe(models: TrainedModels, client: ClientName, weights: Tensors, clients: Columns) -> dict[str, Any]:
    """Return the description: what the weights are, and the input that the network needs."""
    config, data = models.config, models.data
    tree = config.tree()
    parts = f"parts that {config.method.name} combines by a rule of its own"
    if models.is_network:
        parts = getattr(models.network(client), "parts", "one network, whose state the tensors are")
    is_text, is_csv = data.sample.kind == "tokens", config.data.source == "csv"
    labels = "the sorted values of data.target" if is_csv else "the labels of the data set"
    recipe = {
        "hpcfl": __version__,
        "run": models.path.resolve().parent.name,
        "method": tree["method"],
        "client": client,
        "round": models.round,
        "model": tree["model"],
        "source": config.data.source,
        "kind": data.sample.kind,
        "sample_shape": list(data.sample.shape),
        "sample_type": data.dtype,
        "vocabulary": data.sample.vocabulary,
        "scale": data.scale,
        "mean": list(data.mean),
        "std": list(data.std),
        "normalisation": "none" if is_text else "(sample / scale - mean) / std, by channel or feature",
        "shift": config.data.shift,
        "classes": list(range(data.num_classes)),
        "outputs": f"logits (.pt2: probabilities), in the order of classes, {labels}",
        "parts": parts,
        "tensors": {name: list(tensor.shape) for name, tensor in weights.items()},
    }
    if client != GLOBAL and clients:
        # the model's accuracy at the end of the run, on the client's own samples
        recipe |= {"split": config.run.eval_split, "accuracy": float(clients["accuracy"][client])}
        if "unseen" in clients:
            recipe["unseen"] = bool(clients["unseen"][client])
    return recipe


def _write_safetensors(weights: Tensors, recipe: dict[str, Any], path: Path) -> None:
    """Write weights with the description as metadata; entries that are not text are JSON."""
    # imported here: few commands need it
    from safetensors.torch import save

    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in recipe.items()}
    replace_file(path, save(weights, metadata))


def _write_whole(models: TrainedModels, client: ClientName, path: Path) -> bool:
    """Write a model from samples as stored to probabilities; return False, with a warning, if that fails."""
    if not models.is_network:
        LOG.warning(f"no {path}: {models.config.method.name} does not predict by one network")
        return False
    data = models.data
    samples = torch.zeros(2, *data.sample.shape, dtype=getattr(torch, data.dtype))
    try:
        whole = torch.export.export(
            Deployed(models.network(client), data).eval(),
            (samples,),
            dynamic_shapes=({0: torch.export.Dim("samples")},),
        )
    # any network may be there, and so any exception
    except Exception as error:
        LOG.warning(f"no {path}: torch.export cannot follow the network: {one_line(error)}")
        return False
    torch.export.save(whole, written := io.BytesIO())
    replace_file(path, written.getvalue())
    return True
