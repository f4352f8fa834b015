"""What two runs must have in common to the bit, and the tiny runs that tests compare."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from processes import exit_code, forked
from torch import Tensor
from torch.nn.functional import nll_loss

from hpcfl.communication.messages import Message
from hpcfl.data import bundled
from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS, Method
from hpcfl.registries import load_config
from hpcfl.results.run import Run
from hpcfl.simulation.sampling import Sampler
from hpcfl.storage.ledger import SPENT
from hpcfl.training.client_group import ClientGroup, WorkerContext

SECONDS = frozenset({"wall_s", "client_steps_per_s", *SPENT})
"""Columns that depend on the clock; all others are the same for any number of ranks and after a resume."""
CLOCK_COLUMNS = SECONDS | {"steps_s"}

MEETS_ALL_SOON = ["run.seed=3", "data.seed=0"]
"""Of the seven clients, two cohorts of four are all, one twice; two of three are five, one twice."""
MUCH_STATE = [
    *MEETS_ALL_SOON,
    *("method.name=heurpfedla", "train.participation=0.6", "run.checkpoint_every=2"),
]
"""A run with state on server and clients, for tests of faults."""


def write_digits(path: Path, channels: int = 1) -> None:
    """Write the bundled digits as an npz file, with fewer pixels.

    Each further channel is half as bright.

    Without their last row and column, images start at addresses that no processor likes, and that depend on
    the clients before them in the shard.
    """
    digits = bundled.digits()
    brightness = 0.5 ** np.arange(channels)
    x = digits.x[:, 0, :7, :7, None] * brightness / digits.scale
    np.savez(path, x=x.astype(np.float32), y=digits.y)


N, K = 7, 10
"""Clients and classes of the tiny runs."""
LAYERS = {
    "conv1": slice(0, 160),
    "bn1": slice(160, 192),
    "conv2": slice(192, 4832),
    "bn2": slice(4832, 4896),
    "fc1": slice(4896, 7008),
    "fc2": slice(7008, 7658),
}
"""The positions of the layers of their network in its P numbers."""
BODY, HEAD = slice(0, 7008), LAYERS["fc2"]
P, U, F = 7658, 2 * (16 + 32), 64
"""Trainable numbers, running statistics and features of their network."""


def tiny_settings(digits: Path) -> list[str]:
    """Return settings for seven clients of unequal size, with BatchNorm and odd last mini-batches.

    Pages of these runs are left out: to make one takes as long as to train a round.
    """
    return [
        "data.source=npz",
        f"data.path={digits}",
        "data.layout=NHWC",
        "data.clients=7",
        "data.subset_per_class=18",
        "data.partition.name=dirichlet",
        "model.name=digits_cnn",
        "model.batchnorm=true",
        "train.rounds=3",
        "train.local_epochs=1",
        "train.batch_size=12",
        "train.lr_decay=0.9",
        "train.momentum=0.5",
        "run.device=cpu",
        "run.report=false",
    ]


SPECIAL = {
    "clustered_fl": ["method.first_round=0", "method.eps_1=100", "method.eps_2=0"],
    "fedala": ["method.most_passes=3"],
    "fedbabu": ["train.finetune_epochs=1"],
    "fedem": ["method.components=2"],
    "fedfomo": ["method.models=3"],
    "fedmn": ["method.architecture=[1,2,2]", "method.widths=[16,8]"],
    "fedrod": ["method.hidden=8"],
    "knn_per": ["method.neighbours=3"],
    "pfedhn": ["method.hidden=10", "method.hidden_layers=1"],
    "pfedmb": ["method.branches=3"],
    "pfedme": ["method.steps=2"],
    "scaffold": ["train.momentum=0"],
}
"""What a method needs to be small and quick, to run at all, or to do in few rounds what makes it special."""


VARIANTS = {
    "fedamp-cosine": ["method.weights=cosine"],
    "fedphp-distillation": ["method.regulariser=distillation"],
    "fedrod-hyper": ["method.hyper_head=true"],
    "per_fedavg-exact": ["method.variant=exact"],
    "per_fedavg-first": ["method.variant=first_order"],
    "pfedhn-private": ["method.private_head=true"],
}
"""Variants that are methods of their own, tested as the others are."""

ALIASES = ("fedadagrad", "fedadam", "fedavg_ft", "fedavgm")
"""FedAvg with other defaults; in runs of every method, fedyogi represents them."""
DIFFERENT = [name for name in METHODS if name not in ALIASES]
"""Methods that have code of their own, and FedAvg with one of its servers."""
KINDS = ("fedavg", "fedem", "fedfomo", "fedmn", "heurpfedla", "ifca", "local", "pfedhn", "pfedmb", "scaffold")
"""Methods that differ in what is sent, kept and asked for: for tests of code that all methods share."""

LOCAL_SETTINGS = [
    "train.momentum=0",
    "train.optimiser=adam",
    "train.lr=0.01",
    "train.clip=1",
    "train.label_smoothing=0.1",
    "train.augment=[crop,flip]",
    "train.lr_decay_rounds=[2]",
    "train.warmup_rounds=1",
]
"""Local training with all that may change it."""

CODED = {
    f"{method}-{codec}": [f"comm.codec={codec}"]
    for method in ("pfedla", "heurpfedla", "fedavg", "fedmn", "pfedmb")
    for codec in ("float16", "int8", "topk")
}
"""Methods whose messages differ in kind, by codec."""


def method_settings(case: str) -> list[str]:
    """Return settings that choose a method, and what it needs in the tiny runs.

    A case is a method, one of VARIANTS or CODED, or a method, "-" and a name of what a test adds.
    """
    method = case.partition("-")[0]
    return [f"method.name={method}", *SPECIAL.get(method, []), *(VARIANTS | CODED).get(case, [])]


def expected(name: str, table: Mapping[str, Any], case: str) -> Any:
    """Return a case's entry of the table of what is expected, or its method's."""
    method = case.partition("-")[0]
    if case not in table and method not in table:
        pytest.fail(f"add what is expected of method {method} to {name}", pytrace=False)
    return table.get(case, table.get(method))


def run_here(folder: Path, settings: Sequence[str]) -> int:
    """Run in this process, under mpirun together with the other ranks, and return the exit code."""
    return main(["--quiet", "--out", str(folder), *settings])


def kept_runs(base: Path, settings_of: Callable[[Any], Sequence[str]]) -> Callable[[Any], Path]:
    """Return a function from a case to the folder of its run, which the first call makes."""

    @cache
    def folder(case: Any) -> Path:
        assert run_here(base / str(case), settings_of(case)) == FINISHED
        return base / str(case)

    return folder


def time_is_up() -> dict[str, str]:
    """Return the environment of a SLURM job whose time is up: a run stops after one more round."""
    return {"SLURM_JOB_END_TIME": str(int(time.time()))}


def run_until_time_is_up(folder: Path, settings: Sequence[str]) -> int:
    """Run one more round, and return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        for name, end in time_is_up().items():
            patch.setenv(name, end)
        return run_here(folder, settings)


def refused(captured: pytest.CaptureFixture[str], *words: str | Path, may_warn: bool = False) -> str:
    """Return the one line with which a command is refused, after its warnings if it may print some."""
    captured.readouterr()
    assert main([*map(str, words)]) == BAD_INPUT
    out, err = captured.readouterr()
    *warned, line = err.splitlines()
    assert may_warn or not warned
    assert line.startswith("hpcfl: error: ")
    # these print as they proceed
    assert out == "" or words[0] in ("bench", "doctor", "plan")
    return line


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def start_run(folder: Path, settings: Sequence[str], prepare: Callable[[], None] = lambda: None) -> int:
    """Start a run in a process of its own, which calls `prepare` first, and return the process's id."""

    def program() -> int:
        prepare()
        return run_here(folder, settings)

    return forked(program)


def run_disturbed(number: int, folder: Path, settings: Sequence[str], act: Callable[[], object]) -> int:
    """Run in a process of its own, which calls `act` as it begins to train a round; return its exit code."""
    method = METHODS[load_config(None, settings).method.name]

    def prepare() -> None:
        train, begun = method.train, []

        def disturbed(self: Method, clients: ClientGroup, down: Message) -> Message:
            if clients.round == number and not begun:
                begun.append(number)
                act()
            return train(self, clients, down)

        method.train = disturbed  # type: ignore[method-assign]

    return exit_code(start_run(folder, settings, prepare))


def run_killed_in_round(number: int, folder: Path, settings: Sequence[str]) -> None:
    """Run in a process of its own, which is killed as it begins to train a round."""
    code = run_disturbed(number, folder, settings, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert code == -signal.SIGKILL


def leave_out(patch: pytest.MonkeyPatch, is_absent: Callable[[int, int], bool]) -> None:
    """Leave those clients out of cohorts of which, given the round and the client, this is true."""
    clients = Sampler.clients

    def others(self: Sampler, number: int) -> list[int]:
        return [client for client in clients(self, number) if not is_absent(number, client)]

    patch.setattr(Sampler, "clients", others)


def saved_models(folder: Path, group: str, num_clients: int) -> dict[str, Tensor]:
    """Return by name what a checkpoint holds of evaluated models in a group, [clients, ...]."""
    with h5py.File(folder / "checkpoint.h5", "r", locking=False) as file:
        models = {name: torch.from_numpy(data[()]) for name, data in file[group].items()}
    # a model that is the same for all clients is stored as one row
    return {name: rows.expand(num_clients, *rows.shape[1:]) for name, rows in models.items()}


def losses_of(models: dict[str, Tensor], method: Method, place: WorkerContext) -> list[float]:
    """Return the test loss of each client of a place with its row of `saved_models`."""
    clients = ClientGroup(place, place.clients, 0)
    model = Message(per_client=models, num_clients=len(clients))
    losses = []
    for position in range(len(clients)):
        x, y = clients.samples("test", position)
        probabilities = method.predict(clients, model, position, x)
        losses.append(nll_loss(probabilities.double().log(), y).item())
    return losses


def raw_tests(run: Run) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the test samples of each client as the source stores them, x [n, C, H, W] and y [n]."""
    return [run.samples(client) for client in range(run.models.num_clients)]


def right(probabilities: np.ndarray, y: np.ndarray) -> int:
    """Return how many samples a model's class probabilities [n, K] get right."""
    return int((probabilities.argmax(axis=1) == y).sum())


def logits_by_network(run: Run, client: int, x: np.ndarray) -> Tensor:
    """Return the outputs [n, K] of a client's network for samples as the source stores them."""
    data = run.models.data
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    network = run.network(client)
    assert not network.training
    with torch.no_grad():
        logits: Tensor = network((torch.from_numpy(x) / data.scale - mean) / std)
    return logits


def right_of_run(run: Run) -> list[int]:
    """Return how many of its test samples each client gets right, by clients.csv."""
    counts = run.clients["accuracy"] * run.clients["evaluated_samples"]
    assert np.allclose(counts, counts.round(), atol=1e-6)
    return counts.round().astype(int).tolist()


def round_of(path: Path) -> int:
    """Return the number of rounds after which a checkpoint was written."""
    with h5py.File(path, "r", locking=False) as file:
        return int(file.attrs["round"])


def completed_rounds(folder: Path) -> int:
    """Return the rounds of the checkpoint from which a run resumes; 0 without one."""
    # a kill between the two renames leaves the older one alone
    for name in ("checkpoint.h5", "checkpoint.prev.h5"):
        if (folder / name).exists():
            return round_of(folder / name)
    return 0


def contents(folder: Path) -> dict[str, Any]:
    """Return by name all that a run leaves behind, except for what depends on the clock or on stops.

    These are the datasets of checkpoint.h5 as (dtype, shape, bytes), its attributes without the
    configuration, and the rows of the CSV files, all without columns of seconds.
    """
    found: dict[str, Any] = {}

    def add(name: str, item: h5py.Group | h5py.Dataset) -> None:
        for key, value in item.attrs.items():
            if (name, key) != ("/", "config"):
                found[f"{name}@{key}"] = np.asarray(value).tobytes()
        if isinstance(item, h5py.Dataset):
            values = item[()]
            if "columns" in item.attrs:
                columns = [column.decode() for column in item.attrs["columns"]]
                values = values[:, [column not in CLOCK_COLUMNS for column in columns]]
            found[name] = (values.dtype.str, values.shape, values.tobytes())

    with h5py.File(folder / "checkpoint.h5", "r", locking=False) as file:
        add("/", file)
        file.visititems(lambda name, item: add(f"/{name}", item))
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as lines:
            header, *rows = csv.reader(lines)
        found[path.name] = [[c for n, c in zip(header, row, strict=True) if n not in SECONDS] for row in rows]
    return found


def differing(one: Path, other: Path, *groups: str) -> list[str]:
    """Name what differs between two run folders; with `groups`, only what is in these HDF5 groups."""
    first, second = contents(one), contents(other)
    names = sorted({*first, *second})
    if groups:
        names = [name for name in names if name.startswith(tuple(f"/{group}/" for group in groups))]
    return [name for name in names if first.get(name) != second.get(name)]
