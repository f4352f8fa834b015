"""Accuracies and costs of the finished runs of a table, read from their folders."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.results.comparison import scored_when
from hpcfl.results.statistics import (
    Interval,
    mean_and_deviation,
    paired_difference,
    weighted_difference,
    worst_tenth,
)
from hpcfl.storage.reading import read_rows
from hpcfl.storage.runfolder import RunFolder
from hpcfl.tables.cells import Cell, Table
from hpcfl.tables.file import Row
from hpcfl.tables.schema import Moment

ACCURACIES = (
    "accuracy_mean",
    "best_accuracy",
    "accuracy_weighted",
    "accuracy_after_download",
    "accuracy_after_training",
    "spread_over_clients",
    "worst_tenth_accuracy",
    "accuracy_unseen",
)
"""Figures between 0 and 1; tables show their mean and standard deviation over seeds. `spread_over_clients` is
the population standard deviation over clients at the last evaluation, `worst_tenth_accuracy` the mean over
the worst tenth of the clients. `accuracy_unseen` is the mean over clients that take no part in training
(`data.unseen_clients`); all other figures are of those that do."""

COSTS = ("bytes_down", "bytes_up", "other_bytes_down", "other_bytes_up", "client_steps_per_s", "wall_s")
"""Bytes are per client and round; `other_bytes` are those of running statistics and indices."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Entry:
    """A row in a column: its finished cells, all seeds together."""

    row: Row
    column: str
    config: Config
    """Configuration of its first seed."""
    figures: dict[int, Figures]
    """Figures by finished seed."""
    of_clients: dict[int, list[float]]
    """Accuracy of each client at the end, by finished seed."""
    missing: int
    """Seeds that are not finished."""

    def values(self, name: str) -> list[float]:
        return [figures[name] for figures in self.figures.values()]

    def count(self, name: str) -> int:
        """Return how many of the finished seeds have a figure; runs that did not score a moment have none."""
        return sum(not isnan(value) for value in self.values(name))

    def mean(self, name: str) -> float | None:
        return mean_and_deviation(self.values(name))[0]

    def deviation(self, name: str) -> float | None:
        return mean_and_deviation(self.values(name))[1]

    @property
    def published(self) -> float | None:
        """In %."""
        return self.row.published.get(self.column)

    @property
    def scored(self) -> str:
        """When the accuracy is measured."""
        return scored_when(self.config)


def entries(table: Table) -> list[Entry]:
    """Return the entries of a table, column by column, from the folders of its finished cells."""
    made = []
    for column, column_label in enumerate(table.columns):
        for number, row in enumerate(table.rows):
            cells = table.of(number, column)
            if cells:
                done = [cell for cell in cells if is_finished(cell)]
                of_clients = {cell.seed: client_accuracies(cell) for cell in done}
                figures = {cell.seed: cell_figures(cell, of_clients[cell.seed]) for cell in done}
                missing = len(cells) - len(done)
                made.append(Entry(row, column_label, cells[0].config, figures, of_clients, missing))
    return made


@dataclass(frozen=True)
class Difference:
    """Two compared rows in a column."""

    rows: tuple[str, str]
    column: str
    moment: str
    """When the models are scored: one moment for both rows, or the first row's, then the second row's."""
    is_weighted: bool
    """Whether clients count with their samples, or all the same."""
    seeds: list[int]
    """Seeds that both rows have finished, in which some client has a model of both rows at the moment."""
    partitions: int
    """Number of partitions that these seeds have drawn; 1 where the table fixes data.seed."""
    over_seeds: Interval | None
    """None if `seeds` is empty."""
    over_clients: Interval | None
    """None if `seeds` is empty, and of weighted differences."""


def differences(table: Table, known: Sequence[Entry]) -> list[Difference]:
    """Return the first minus the second row of each compared pair, in each of its columns."""
    by_place = {(entry.row.label, entry.column): entry for entry in known}
    made = []
    for pair in table.compare:
        for column in pair.columns:
            compared = [by_place[label, column] for label in pair.rows]
            first, second = (_at_moment(table, entry, pair.at) for entry in compared)
            known_pairs = {}
            data_seeds = {}
            for cell in table.of(table.labels.index(pair.rows[0]), table.columns.index(column)):
                seed = cell.seed
                if seed in first and seed in second:
                    of_both = zip(first[seed], second[seed], client_samples(cell), strict=True)
                    known_pairs[seed] = [one for one in of_both if not any(map(isnan, one))]
                    data_seeds[seed] = cell.config.data_seed
            seeds = [seed for seed, pairs in known_pairs.items() if pairs]
            ones, others, samples = (
                [[one[n] for one in known_pairs[seed]] for seed in seeds] for n in range(3)
            )
            over_seeds = over_clients = None
            if seeds and pair.weighted:
                over_seeds = weighted_difference(ones, others, samples)
            elif seeds:
                paired = paired_difference(ones, others)
                over_seeds, over_clients = paired.over_seeds, paired.over_clients
            moments = [pair.at.replace("_", " ")] if pair.at else [entry.scored for entry in compared]
            moment = ", ".join(dict.fromkeys(moments))
            partitions = len({data_seeds[seed] for seed in seeds})
            made.append(
                Difference(
                    pair.rows, column, moment, pair.weighted, seeds, partitions, over_seeds, over_clients
                )
            )
    return made


def _at_moment(table: Table, entry: Entry, moment: Moment | None) -> dict[int, list[float]]:
    """Return the accuracy of each client by finished seed; nan where it has no model at the moment."""
    if moment is None:
        return entry.of_clients
    cells = table.of(table.labels.index(entry.row.label), table.columns.index(entry.column))
    return {cell.seed: client_accuracies(cell, moment) for cell in cells if cell.seed in entry.of_clients}


def is_finished(cell: Cell) -> bool:
    """Whether a cell's folder holds its run, of these settings, to the last round."""
    # clients.csv is written last, and taken away when a run goes on
    if not all((cell.folder / name).is_file() for name in ("config.yaml", "clients.csv")):
        return False
    try:
        RunFolder(cell.folder, cell.config).check(fresh=False)
    except UserError:
        return False
    metrics = read_rows(cell.folder / "metrics.csv")
    return bool(metrics) and int(metrics[-1]["round"]) == cell.config.train.rounds


def cell_figures(cell: Cell, accuracies: Sequence[float]) -> Figures:
    """Return what a finished cell gave and cost; `accuracies` are its clients' at the end."""
    metrics = read_rows(cell.folder / "metrics.csv")
    last = {name: float(value) for name, value in metrics[-1].items()}
    train = cell.config.train
    turns = train.rounds * train.cohort_size(len(accuracies))
    means = [float(line["accuracy_mean"]) for line in metrics]
    best = means.index(max(means))
    figures = {
        "accuracy_mean": last["accuracy_mean"],
        "best_accuracy": means[best],
        "best_round": float(metrics[best]["round"]),
        "accuracy_weighted": last["accuracy_weighted"],
        # the oldest runs were not scored at these moments
        "accuracy_after_download": last.get("accuracy_after_download", nan),
        "accuracy_after_training": last.get("accuracy_after_training", nan),
        "spread_over_clients": last["accuracy_std"],
        "worst_tenth_accuracy": worst_tenth(accuracies),
        "accuracy_unseen": last.get("accuracy_unseen", nan),
        "coverage": last["coverage"],
        # harmonic mean: there are about equally many steps between any two evaluations
        "client_steps_per_s": statistics.harmonic_mean([float(row["client_steps_per_s"]) for row in metrics]),
        "wall_s": last["wall_s"],
    }
    for way in ("down", "up"):
        others = last[f"buffer_bytes_{way}"] + last[f"index_bytes_{way}"]
        figures |= {f"bytes_{way}": last[f"bytes_{way}"] / turns, f"other_bytes_{way}": others / turns}
    return figures


def client_accuracies(cell: Cell, moment: Moment | None = None) -> list[float]:
    """Return the accuracy of each client at the end of a finished cell; default: when the run scores it.

    It is nan where there is no model, or the run was not scored, at the moment. Clients that take no part in
    training are left out.
    """
    name = "accuracy" if moment is None else f"accuracy_{moment}"
    return [float(line.get(name, nan)) for line in _clients_in_training(cell)]


def client_samples(cell: Cell) -> list[float]:
    """Return how many samples each client of a finished cell is scored on."""
    return [float(line["evaluated_samples"]) for line in _clients_in_training(cell)]


def _clients_in_training(cell: Cell) -> list[dict[str, str]]:
    return [line for line in read_rows(cell.folder / "clients.csv") if line.get("unseen") != "1"]
