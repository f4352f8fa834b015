"""Comparison of finished runs: means, paired differences over clients, and the keys that differ."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcfl.config.load import differences
from hpcfl.errors import UserError
from hpcfl.formatting import aligned, half_width
from hpcfl.results.run import Run, folder_names, scored_when
from hpcfl.results.statistics import PairedDifference, paired_difference

SEEDS = ("run.seed", "data.seed")


@dataclass(frozen=True)
class Comparison:
    """Entries of one run each, or of the runs of one configuration with several seeds."""

    entries: tuple[tuple[Run, ...], ...]
    """Runs by entry; all entries have the same seeds in the same order where they have several."""
    keys: Mapping[str, tuple[Any, ...]]
    """The keys that differ and change results, with the value in each entry (None: no such key)."""

    @property
    def means(self) -> list[float]:
        """Mean accuracy over the clients in training of each entry, then over its runs."""
        return [
            statistics.fmean(float(run.in_training["accuracy"].mean()) for run in entry)
            for entry in self.entries
        ]

    @property
    def unseen_means(self) -> list[float]:
        """Mean accuracy over clients that take no part in training, then over runs; empty without such."""
        if not self.entries[0][0].num_unseen:
            return []
        return [
            statistics.fmean(float(run.metrics["accuracy_unseen"][-1]) for run in entry)
            for entry in self.entries
        ]

    def difference(self, first: int = 0, second: int = 1) -> PairedDifference:
        """Return how much higher one entry's accuracies are than another's, client in training by client."""
        return paired_difference(_accuracies(self.entries[first]), _accuracies(self.entries[second]))

    def __str__(self) -> str:
        """Return a text of lines as `hpcfl compare` prints it."""
        names = self._names()
        lines = [["run", "mean accuracy", "spread over clients", "scored"]]
        for entry, name, mean in zip(self.entries, names, self.means, strict=True):
            spread = statistics.fmean(float(run.in_training["accuracy"].std()) for run in entry)
            method, train = entry[0].config.method.name, entry[0].config.train
            lines.append([name, f"{mean:.2%}", f"{spread:.2%}", scored_when(method, train)])
        if self.unseen_means:
            unseen = ["unseen clients", *(f"{mean:.2%}" for mean in self.unseen_means)]
            lines = [[*line, added] for line, added in zip(lines, unseen, strict=True)]
        diverged = [sum(int(run.diverged.sum()) for run in entry) for entry in self.entries]
        if any(diverged):
            times = ["diverged", *map(str, diverged)]
            lines = [[*line, added] for line, added in zip(lines, times, strict=True)]
        header = ["95 % over clients and seeds", "pairs", "95 % over seeds", "seeds"]
        pairs = [["difference in points", "", *header]]
        for first, second in itertools.combinations(range(len(names)), 2):
            paired = self.difference(first, second)
            mean = paired.over_clients.mean
            line = [f"{names[first]} - {names[second]}", f"{100 * mean:+.2f}"]
            for found, star in ((paired.over_clients, ""), (paired.over_seeds, paired.over_seeds.star)):
                width = half_width(found.mean, found.half_width, digits=2, beside=mean)
                line += [width + star, str(found.count)]
            pairs.append(line)
        keys = [["keys that differ", *names]]
        keys += [
            [key, *("-" if value is None else str(value) for value in values)]
            for key, values in self.keys.items()
        ]
        has_star = any("*" in text for line in pairs for text in line[2:])
        note = "*: the interval over seeds excludes 0. " * has_star
        note += (
            "The interval over clients and seeds holds for these runs only; conclude on methods from that "
            "over seeds."
        )
        if num_partitions(self.entries[0]) < len(self.entries[0]):
            note += " All seeds have one partition of the data: the interval over seeds holds for this one."
        tables = [aligned(lines), aligned(pairs), [note], aligned(keys) if self.keys else ["no key differs"]]
        return "\n\n".join(map("\n".join, tables))

    def _names(self) -> list[str]:
        """Return the name of each entry: the folder of its first run, and how many seeds it has."""
        seeds = len(self.entries[0])
        names = folder_names([entry[0] for entry in self.entries])
        return [f"{name} ({seeds} seeds)" if seeds > 1 else name for name in names]


def num_partitions(runs: Sequence[Run]) -> int:
    """Return how many partitions of the data runs of several seeds have drawn.

    They share one if `data.seed` is set, or if the data bring their clients and what these are tested on.
    """
    return len({_partition_of(run) for run in runs})


def _partition_of(run: Run) -> object:
    # not of run.config, which takes milliseconds to make
    data = run.record["data"]
    if data["partition"]["name"] == "given":
        return tuple(column.tobytes() for column in run.partition.values())
    return run.record["run"]["seed"] if data.get("seed") is None else data["seed"]


def samples_of(*runs: Run) -> list[str]:
    """Return the checksums of the samples that runs have read, each once; older runs have none."""
    return list(dict.fromkeys(run.environment["samples"] for run in runs if "samples" in run.environment))


def sample_keys(run: Run) -> dict[str, Any]:
    """Return the keys that decide which samples a run's clients have, and which are scored, flat."""
    return _without_path(run, run.config.sample_keys())


def _without_path(run: Run, keys: dict[str, Any]) -> dict[str, Any]:
    """Leave out where a run's data lay, if their checksum tells which they were."""
    return {key: value for key, value in keys.items() if key != "data.path" or not samples_of(run)}


def compare(*runs: Run) -> Comparison:
    """Compare finished runs on the same samples of the same clients.

    Runs that differ only in their seeds form one entry, if all entries then have the same seeds; otherwise
    every run is an entry.

    Raises:
        UserError: fewer than two runs, one twice, one is not finished, or they have different clients.
    """
    for run in runs:
        if not isinstance(run, Run):
            raise TypeError(f"compare needs runs, as hpcfl.load_run returns them, not {run!r}")
    if len(runs) < 2:
        raise UserError("a comparison needs two runs or more, such as hpcfl compare runs/A runs/B")
    for run in runs:
        if not run.is_finished:
            raise UserError(
                f"{run.path} is not finished: its last evaluation is of round {run.done} of {run.rounds}, "
                "and clients.csv, which is written last, is not there; run its command again to resume"
            )
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice; compare runs in two folders or more")
    entries: tuple[tuple[Run, ...], ...] = _by_seed(runs) or tuple((run,) for run in runs)
    for first, *others in zip(*entries, strict=True):
        for other in others:
            if changed := differences(sample_keys(first), sample_keys(other)):
                raise UserError(
                    f"{first.path} and {other.path} cannot be compared: their clients have other samples "
                    f"({'; '.join(changed)}); compare runs that agree on these keys, as those of one "
                    "column's folder of a table, each configuration with the same seeds, such as A-s1 B-s1 "
                    "A-s2 B-s2"
                )
            if len(samples := samples_of(first, other)) > 1:
                raise UserError(
                    f"{first.path} and {other.path} cannot be compared: their data have changed in between "
                    f"({' and '.join(samples)} in the environment of config.yaml); run both on the same data"
                )
    trees = [_keys(entry[0], without=SEEDS if len(entry) > 1 else ()) for entry in entries]
    names = dict.fromkeys(key for tree in trees for key in tree)
    found = {key: tuple(tree.get(key) for tree in trees) for key in names}
    return Comparison(
        entries, {key: values for key, values in found.items() if any(v != values[0] for v in values)}
    )


def _by_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], ...] | None:
    """Return runs by configuration, in the order of their seeds; None unless all have the same seeds."""
    found: dict[str, dict[tuple[int, int], Run]] = {}
    for run in runs:
        configuration = json.dumps(_keys(run, without=SEEDS), sort_keys=True)
        found.setdefault(configuration, {})[run.config.run.seed, run.config.data_seed] = run
    first, *others = found.values()
    is_twice = sum(map(len, found.values())) < len(runs)
    if is_twice or not others or any(set(other) != set(first) for other in others):
        return None
    return tuple(tuple(of_seeds[seeds] for seeds in first) for of_seeds in found.values())


def _keys(run: Run, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys that change a run's results."""
    keys = _without_path(run, run.config.result_keys())
    return {key: value for key, value in keys.items() if key not in without}


def _accuracies(entry: Sequence[Run]) -> list[list[float]]:
    return [run.in_training["accuracy"].tolist() for run in entry]
