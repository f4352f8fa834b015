"""Golden numbers: what tiny runs of every method, partitions and networks gave when they were last looked at.

    python tests/helpers/golden.py write NAME     adds a method, partition or network to golden.json
    python tests/helpers/golden.py write          makes golden.json anew (explain a change of numbers)
    python tests/helpers/golden.py compare A [B]  names what differs between two commits, to the bit, on this
                                                  machine; without B: between A and this checkout

A number in golden.json holds on every machine, within the tolerances of methods/test_three_rounds.py.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bits import MEETS_ALL_SOON, VARIANTS, contents, method_settings, run_here, tiny_settings, write_digits

from hpcfl.data.partition_request import Request, Split
from hpcfl.data.partitions import PARTITIONS, class_sizes, class_table, partition, partition_given
from hpcfl.methods import METHODS
from hpcfl.models import MODELS, build_network

TESTS = Path(__file__).resolve().parents[1]
FILE = TESTS / "golden.json"

COLOUR = "fedavg-colour"
"""FedAvg on images of three channels, which take another way through a CPU's convolutions."""

CASES = [*METHODS, *VARIANTS, "fedbabu-untuned", COLOUR]
NUMBERS = ("accuracy_mean", "loss_mean", "train_loss_mean")
COUNTS = ("bytes_down", "bytes_up")

LABELS = np.repeat(np.arange(10), 40)
"""The classes of the samples to partition: 40 samples of each of ten."""
PARTITION_OPTIONS: dict[str, dict[str, Any]] = {"pachinko": {"coarse_classes": 5}}

SHAPES = {"digits_cnn": (1, 8, 8), "mlp": (1, 8, 8), "cnn1d": (9, 128), "textcnn": (80,), "lstm": (80,)}
SHAPES |= {"transformer": (80,)}
"""Samples that a network is built for, where they are not images of CIFAR-10; one axis is a text."""
VOCABULARY = 128


def run_case(case: str, folder: Path, *more: str) -> None:
    """Run a method for three rounds, four of seven clients in each, and evaluate after every round.

    The images are written beside the folder; `more` are settings beside these.
    """
    digits = folder.parent / f"digits of {case}.npz"
    write_digits(digits, channels=3 if case == COLOUR else 1)
    settings = [*tiny_settings(digits), *MEETS_ALL_SOON, *method_settings(case), *more]
    if case == "fedbabu-untuned":
        settings.append("train.finetune_epochs=0")
    assert run_here(folder, [*settings, "train.participation=0.6", "train.rounds=3", "run.eval_every=1"]) == 0


def numbers_of(folder: Path) -> dict[str, list[float]]:
    """Return a run's loss, accuracy and bytes after each round."""
    with (folder / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    found: dict[str, list[float]] = {
        name: [float(f"{float(row[name]):.6g}") for row in rows] for name in NUMBERS
    }
    return found | {name: [int(row[name]) for row in rows] for name in COUNTS}


def class_counts(name: str) -> list[list[int]]:
    """Return how many samples of each class a partition assigns to each of four clients."""
    test_fraction, val_fraction, seed = 0.25, 0.0, 1
    if name == "given":
        split = Split(test_fraction, val_fraction, seed)
        parts = partition_given(name, np.arange(len(LABELS)) % 4, None, 4, None, split)
    else:
        options = PARTITIONS[name].options.model_validate(PARTITION_OPTIONS.get(name, {}))
        request = Request(test_fraction, val_fraction, seed, class_sizes(LABELS, 10), 4, None)
        parts = partition(name, options, LABELS, request)
    counts: list[list[int]] = class_table(LABELS, parts, 10).tolist()
    return counts


def first_logits(name: str) -> list[float]:
    """Return the logits of a network with initial weights for one sample of increasing numbers or tokens."""
    # "compare" uses this file with commits that have no such module
    from hpcfl.samples import SampleType

    shape = SHAPES.get(name, (3, 32, 32))
    sample = SampleType(shape, VOCABULARY if len(shape) == 1 else None)
    network = build_network(name, sample, 10, MODELS[name].options.model_validate({}), 0, -1).eval()
    x = torch.linspace(-1, 1, int(np.prod(shape))).view(1, *shape)
    if sample.vocabulary is not None:
        x = torch.arange(len(x[0])).unsqueeze(0)
    with torch.no_grad():
        return [float(f"{logit:.6g}") for logit in network(x)[0].tolist()]


def golden_of_case(case: str) -> dict[str, list[float]]:
    """Run a case and return its numbers."""
    with tempfile.TemporaryDirectory() as temporary:
        run_case(case, Path(temporary) / case)
        return numbers_of(Path(temporary) / case)


def write(names: Sequence[str]) -> None:
    """Write golden.json anew, or with names their entries only."""
    kinds: dict[str, tuple[Iterable[str], Callable[[str], Any]]] = {
        "methods": (CASES, golden_of_case),
        "partitions": (PARTITIONS, class_counts),
        "networks": (MODELS, first_logits),
    }
    known = [name for of_kind, _ in kinds.values() for name in of_kind]
    if unknown := set(names).difference(known):
        sys.exit(f"no method, partition or network is called {', '.join(unknown)}")
    kept: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if names else {kind: {} for kind in kinds}
    chosen = names or known
    found = {
        kind: {
            name: make(name) if name in chosen else kept[kind][name]
            for name in of_kind
            if name in chosen or name in kept[kind]
        }
        for kind, (of_kind, make) in kinds.items()
    }
    lines = [
        f'"{kind}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(one)}' for name, one in of_kind.items())
        + "\n}"
        for kind, of_kind in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def digests() -> dict[str, dict[str, str]]:
    """Return by case a digest of everything its run leaves behind, by name."""
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        for case in CASES:
            run_case(case, base / case)
            left = contents(base / case)
            found[case] = {
                name: hashlib.sha256(repr(item).encode()).hexdigest() for name, item in left.items()
            }
    return found


def compare(commits: list[str]) -> int:
    """Print what differs between two commits, or a commit and this checkout; return how many cases do."""
    with tempfile.TemporaryDirectory() as temporary:
        first, second = (
            digests_of(commit, Path(temporary) / str(number)) for number, commit in enumerate(commits)
        )
    differing = 0
    for case in sorted({*first, *second}):
        one, other = first.get(case, {}), second.get(case, {})
        names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        differing += bool(names)
        if names:
            print(f"{case}: {', '.join(names)}")
    print(f"{differing} of {len({*first, *second})} cases differ")
    return differing


def digests_of(commit: str, folder: Path) -> dict[str, dict[str, str]]:
    """Return the digests that a commit's own golden.py makes; those of this checkout for an empty name."""
    with checkout(commit, folder) as root:
        environment = os.environ | {"PYTHONPATH": str(root)}
        command = [sys.executable, str(next((root / "tests").rglob("golden.py"))), "digests"]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{commit or 'this checkout'} cannot be run:\n{done.stderr}")
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Give a folder with a commit's files, or the repository itself for an empty name."""
    if not commit:
        yield TESTS.parent
        return
    git = ["git", "-C", str(TESTS.parent), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", *names]:
            write(names)
        case ["digests"]:
            print(json.dumps(digests()))
        case ["compare", *commits] if 1 <= len(commits) <= 2:
            sys.exit(bool(compare([*commits, ""][:2])))
        case _:
            sys.exit(__doc__)
