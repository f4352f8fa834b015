"""`hpcfl table`: a whole comparison, rows by seeds, each cell a run in a folder of its own, and its table."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from hpcfl.arguments import Parser, RunOptions, command_line, split_settings
from hpcfl.config import GROUPS, Config, lay_over, read_yaml, resolve
from hpcfl.data.partitions import ClientIndices
from hpcfl.data.sources import Arrays
from hpcfl.errors import UserError
from hpcfl.experiment import load_data, make_method
from hpcfl.process import StopFlag
from hpcfl.run import run
from hpcfl.runfolder import RunFolder
from hpcfl.world import World, agreed, open_world

A_CELL_NEEDS_S = 30
"""No cell is started when SLURM's end time is nearer than this."""

COLUMNS = (
    "label",
    "method",
    "accuracy_mean",
    "accuracy_std_over_seeds",
    "seeds",
    "missing_seeds",
    "rounds",
    "eval_split",
    "bytes_down",
    "bytes_up",
    "other_bytes_down",
    "other_bytes_up",
    "client_steps_per_s",
    "wall_s",
    "tuned",
)
"""Columns of table.csv; bytes are those of a client in a round, the other ones of running statistics and
indices."""


def _one_line(text: str) -> str:
    if len(text.splitlines()) != 1 or not text.strip():
        raise ValueError("it must be one line of text")
    return text.strip()


Line = Annotated[StrictStr, AfterValidator(_one_line)]


class _Settings(BaseModel):
    """A configuration tree, looked into when it is resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Any = None
    data: Any = None
    model: Any = None
    train: Any = None
    run: Any = None

    def tree(self) -> dict[str, Any]:
        return self.model_dump(include=set(GROUPS), exclude_none=True)


class _Row(_Settings):
    label: Line | None = None
    """Name in the table; default: the method's."""
    tuned: Line | None = None
    """Which keys were chosen on a validation split, and among what; the table repeats it."""

    @property
    def name(self) -> object:
        return self.label or (self.method.get("name") if isinstance(self.method, dict) else None)


class _TableFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Line
    seeds: list[Annotated[StrictInt, Field(ge=0)]] = Field(min_length=1)
    settings: _Settings = _Settings()
    """What all rows have in common."""
    rows: list[_Row] = Field(min_length=1)


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    row: int
    """Number of its row, from 0."""
    label: str
    config: Config
    folder: Path
    place: str
    """Where it is in the table file, for errors."""


class Table:
    """A table file with what the command line adds: its cells, and the table made of the finished ones."""

    def __init__(self, path: Path, overrides: Sequence[str], out: Path | None) -> None:
        """Read and resolve everything; UserError for the first mistake."""
        file = _read(path)
        self.folder = out or Path("runs") / path.stem
        self._title, self._seeds, self._rows = file.title, file.seeds, file.rows
        configs = [_configs(file, number, path, overrides) for number in range(len(file.rows))]
        self._labels = [row.label or made[0].method for row, made in zip(file.rows, configs, strict=True)]
        self._refuse_twins(path)
        self.cells = [
            Cell(
                row,
                label,
                configs[row][number],
                self.folder / f"{_slug(label)}-s{seed}",
                f"{_place(path, row, label)}, seed {seed}",
            )
            for number, seed in enumerate(file.seeds)
            for row, label in enumerate(self._labels)
        ]
        """All rows of the first seed first."""

    def _refuse_twins(self, path: Path) -> None:
        rows: dict[str, int] = {}
        for row, label in enumerate(self._labels):
            first = rows.setdefault(_slug(label), row)
            if first != row:
                raise UserError(
                    f"{_place(path, row, label)}: row {first + 1} ({self._labels[first]}) has the same label "
                    "or makes the same folder; give each a label of its own"
                )

    def write(self) -> tuple[str, int]:
        """Write table.md and table.csv from the folders of the finished cells.

        Returns the former, and how many cells are missing. Raises UserError where it cannot write.
        """
        figures: list[list[dict[str, float]]] = [[] for _ in self._rows]
        for cell in self.cells:
            if is_finished(cell):
                figures[cell.row].append(_figures(cell))
        rows = [self._row(number, known) for number, known in enumerate(figures)]
        lines = io.StringIO()
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        markdown = f"# {self._title}\n\n{self._setting()}\n\n{_markdown(rows)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / "table.csv", lines.getvalue())
            _replace(self.folder / "table.md", markdown)
        except OSError as error:
            raise UserError(
                f"cannot write the table in {self.folder}: {error.strerror}; name another with --out DIR"
            ) from error
        return markdown, sum(row["missing_seeds"] for row in rows)

    def _row(self, number: int, figures: Sequence[dict[str, float]]) -> dict[str, Any]:
        """Return a row of table.csv from the figures of each finished seed."""
        config = self.cells[number].config
        accuracies = [known["accuracy_mean"] for known in figures]
        names = figures[0] if figures else ()
        means = {name: statistics.fmean(known[name] for known in figures) for name in names}
        return {
            "label": self._labels[number],
            "method": config.method,
            "accuracy_std_over_seeds": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            "seeds": len(figures),
            "missing_seeds": len(self._seeds) - len(figures),
            "rounds": config.train.rounds,
            "eval_split": config.run.eval_split,
            "tuned": self._rows[number].tuned,
        } | {name: round(mean) if "bytes" in name else mean for name, mean in means.items()}

    def _setting(self) -> str:
        """Say in a line what all figures have in common."""
        configs = [cell.config for cell in self.cells]
        return (
            f"Seeds {', '.join(map(str, self._seeds))}; "
            f"rounds {_values(config.train.rounds for config in configs)}; "
            f"clients {_values(config.data.clients or 'as the data has them' for config in configs)}; "
            f"accuracy on the {_values(config.run.eval_split for config in configs)} split after the last "
            "round, mean over clients, mean ± standard deviation over seeds; "
            "bytes a client and round, of trainable numbers + of running statistics and indices."
        )


def table(arguments: Sequence[str]) -> bool:
    """Run the cells of a table file that are not finished, and print the table.

    Each row and seed is a run in DIR/<label>-s<seed>; the table is in DIR/table.md and DIR/table.csv.
    Running the same command again goes on. key.sub=value counts for every cell.
    """
    parser = Parser("hpcfl table", table.__doc__)
    parser.add_argument("settings", nargs="*", metavar="TABLE.yaml | key.sub=value")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of it all (default: runs/<TABLE>)")
    parser.add_argument("--part", metavar="K/N", help="run only every N-th cell, from the K-th on")
    parser.add_argument("--fresh", action="store_true", help="start cells over whose settings have changed")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    options = parser.parse_intermixed_args(list(arguments))
    path, overrides = split_settings(options.settings)
    if path is None:
        raise UserError("give a table file, such as configs/tables/baselines.yaml; see hpcfl table --help")
    part, num_parts = _part(options.part)
    world = open_world()
    say = _speech(options.quiet)
    with ExitStack() as at_exit:
        stop = StopFlag()
        at_exit.callback(stop.restore)
        whole = agreed(world, lambda: Table(path, overrides, options.out))
        own = range(part - 1, len(whole.cells), num_parts)
        pending = agreed(world, lambda: _pending(whole, own, options.fresh) if world.is_server else [])
        pending = json.loads(world.broadcast_bytes(json.dumps(pending).encode()))

        say(f"{len(own) - len(pending)} of {len(own)} cells are finished, in {whole.folder}")
        command = command_line(["table", *arguments], world.size)
        stopped = _run_cells(whole, pending, world, stop, command, options.quiet)
        text, missing = agreed(world, lambda: whole.write() if world.is_server else ("", 0))
        say(f"\n{text}\nin {whole.folder}: table.md, table.csv")
        if missing:
            say(f"{missing} of {len(whole.cells)} cells are missing")
        if stopped:
            say(f"stopped early with a checkpoint; go on with\n  {command}")
        elif missing:
            rest = command_line(["table", *_without_part(arguments)], world.size)
            say(f"unless other parts are at them, go on with\n  {rest}")
        return stopped


def _run_cells(
    whole: Table,
    pending: Sequence[tuple[int, bool]],
    world: World,
    stop: StopFlag,
    command: str,
    quiet: bool,
) -> bool:
    """Run cells, each a number and whether it starts over; return whether they stopped early. Collective."""
    began_s = time.monotonic()
    for done, (number, fresh) in enumerate(pending):
        cell = whole.cells[number]
        left = ""
        if done:
            if _must_stop(world, stop):
                return True
            left_s = (time.monotonic() - began_s) / done * (len(pending) - done)
            left = f"  time left {timedelta(seconds=round(left_s))}"
        _speech(quiet)(
            f"cell {number + 1}/{len(whole.cells)}: {cell.label} seed {cell.config.run.seed}{left}"
        )
        options = RunOptions(None, (), cell.folder, fresh, quiet)
        try:
            outcome = run(cell.config, options, world, stop, command, is_cell=True)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error
        if outcome == "stopped":
            return True
        agreed(world, lambda: whole.write() if world.is_server else None)
    return False


def _speech(quiet: bool) -> Callable[[str], None]:
    """Return what prints a line at once, or nothing."""
    return (lambda _: None) if quiet else (lambda text: print(text, flush=True))


def _must_stop(world: World, stop: StopFlag) -> bool:
    """Agree whether no further cell is started. Collective."""
    wanted = stop.requested or (world.is_server and stop.time_is_short(A_CELL_NEEDS_S))
    return world.maximum(int(wanted)) == 1


def _pending(whole: Table, own: range, fresh: bool) -> list[tuple[int, bool]]:
    """Return the numbers of the cells to run, and whether each starts over; UserError for what cannot be."""
    pending = []
    for number, cell in enumerate(whole.cells):
        if is_finished(cell):
            continue
        folder = RunFolder(cell.folder, cell.config)
        starts_over = False
        try:
            folder.check(fresh=False)
        except UserError as error:
            if not fresh:
                raise UserError(f"{cell.place}: {error}") from error
            folder.check(fresh=True)
            starts_over = True
        if number in own:
            pending.append((number, starts_over))
    _refuse_impossible([whole.cells[number] for number, _ in pending])
    return pending


def _refuse_impossible(cells: Sequence[Cell]) -> None:
    """Make the method of each row once: the last row's mistake would else be told after hours."""
    data: Any = None
    dealt: tuple[Arrays, list[ClientIndices]]
    first_of_row: dict[int, Cell] = {}
    for cell in cells:
        first_of_row.setdefault(cell.row, cell)
    for cell in first_of_row.values():
        try:
            of_cell = (cell.config.tree()["data"], cell.config.data_seed)
            if of_cell != data:
                data, dealt = of_cell, load_data(cell.config)
            make_method(cell.config, *dealt)
        except UserError as error:
            raise UserError(f"{cell.place}: {error}") from error


def is_finished(cell: Cell) -> bool:
    """Whether a cell's folder holds its run, of these settings, to the last round."""
    # clients.csv is written last, and taken away when a run goes on
    if not all((cell.folder / name).is_file() for name in ("config.yaml", "clients.csv")):
        return False
    try:
        RunFolder(cell.folder, cell.config).check(fresh=False)
    except UserError:
        return False
    metrics = _read_csv(cell.folder / "metrics.csv")
    return bool(metrics) and int(metrics[-1]["round"]) == cell.config.train.rounds


def _figures(cell: Cell) -> dict[str, float]:
    """Return what a finished cell gave and cost, from its folder, by names of COLUMNS."""
    metrics = _read_csv(cell.folder / "metrics.csv")
    last = {name: float(value) for name, value in metrics[-1].items()}
    num_clients = len(_read_csv(cell.folder / "clients.csv"))
    train = cell.config.train
    turns = train.rounds * train.cohort_size(num_clients)
    figures = {
        "accuracy_mean": last["accuracy_mean"],
        # about as many steps between any two evaluations
        "client_steps_per_s": statistics.harmonic_mean([float(row["client_steps_per_s"]) for row in metrics]),
        "wall_s": last["wall_s"],
    }
    for way in ("down", "up"):
        others = last[f"buffer_bytes_{way}"] + last[f"index_bytes_{way}"]
        figures |= {f"bytes_{way}": last[f"bytes_{way}"] / turns, f"other_bytes_{way}": others / turns}
    return figures


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of table.csv as a table for readers."""
    header = ["method", "accuracy", "seeds", "bytes down", "bytes up", "client steps/s"]
    lines = []
    for row in rows:
        line = [row["label"], "missing", "0", "", "", ""]
        if row["seeds"]:
            spread = row["accuracy_std_over_seeds"]
            line[1:] = [
                f"{100 * row['accuracy_mean']:.1f}{'' if spread is None else f' ± {100 * spread:.1f}'} %",
                str(row["seeds"]),
                *(_bytes(row[f"bytes_{way}"], row[f"other_bytes_{way}"]) for way in ("down", "up")),
                f"{row['client_steps_per_s']:.0f}",
            ]
        lines.append(line)
    more = {}
    if len({row["rounds"] for row in rows}) > 1:
        more["rounds"] = "rounds"
    if any(row["tuned"] for row in rows):
        more["tuned"] = "tuned on validation samples"
    header += more.values()
    for line, row in zip(lines, rows, strict=True):
        line += [str(row[name] or "") for name in more]
    return "".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n"
        for line in (header, ["---"] * len(header), *lines)
    )


def _read(path: Path) -> _TableFile:
    tree = read_yaml(path)
    try:
        file = _TableFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(_mistake(path, tree, error)) from error
    if len(set(file.seeds)) < len(file.seeds):
        raise UserError(f"{path}: seeds={file.seeds} is not possible: a seed is there twice")
    return file


def _mistake(path: Path, tree: dict[str, Any], error: ValidationError) -> str:
    """Say in a line where in the file the first mistake is, and what is allowed."""
    first = error.errors()[0]
    place, keys = str(path), list(first["loc"])
    kind: type[BaseModel] = _TableFile
    if keys[0] == "rows" and len(keys) > 1:
        row = tree["rows"][keys[1]]
        label = row.get("label") if isinstance(row, dict) else None
        place, keys, kind = _place(path, int(keys[1]), label), keys[2:], _Row
    elif keys[0] == "settings" and len(keys) > 1:
        place, keys, kind = f"{path}, settings", keys[1:], _Settings
    key = ".".join(map(str, keys)) or "the row"
    allowed = ", ".join(kind.model_fields)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, kind.model_fields, n=1)
        return f"{place}: {key} is an unknown key; allowed: {allowed}" + "".join(
            f"; did you mean {name}?" for name in near
        )
    if first["type"] == "missing":
        return f"{place}: {key} is missing; a table has {allowed}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place}: {key}={first['input']!r} is not possible: {reason}"


def _configs(file: _TableFile, number: int, path: Path, overrides: Sequence[str]) -> list[Config]:
    """Resolve a row's configuration for each seed; may raise UserError."""
    row = file.rows[number]
    try:
        tree = lay_over(lay_over(lay_over({}, file.settings.tree()), row.tree()), overrides)
        run_group = tree.get("run")
        if isinstance(run_group, dict) and "seed" in run_group:
            raise UserError(f"run.seed={run_group['seed']}: the table's list of seeds sets it; leave it out")
        return [resolve(lay_over(tree, [f"run.seed={seed}"])) for seed in file.seeds]
    except UserError as error:
        raise UserError(f"{_place(path, number, row.name)}: {error}") from error


def _part(text: str | None) -> tuple[int, int]:
    """Read K/N; without it there is one part."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text} is not possible; give K/N with K from 1 to N, such as --part 1/3")
    return int(found[1]), int(found[2])


def _without_part(arguments: Sequence[str]) -> list[str]:
    words = [word for word in arguments if not word.startswith("--part=")]
    if "--part" in words:
        at = words.index("--part")
        del words[at : at + 2]
    return words


def _place(path: Path, row: int, label: object) -> str:
    return f"{path}, row {row + 1}" + (f" ({label})" if label else "")


def _slug(label: str) -> str:
    """Return a label as a part of a folder's name."""
    return re.sub(r"[^a-z0-9_.]+", "-", label.lower()).strip("-.")


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _replace(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees half of it."""
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _bytes(numbers: int, others: int) -> str:
    return f"{numbers:,}" + (f" + {others:,}" if others else "")


def _values(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, values)))
