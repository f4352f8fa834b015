"""Table files: what one may hold, and how it changes the file that it extends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, StrictStr

from hpcfl.config.key_errors import FileKeys, shown, validate_file
from hpcfl.config.keys import GROUPS
from hpcfl.config.load import read_yaml
from hpcfl.config.registry import DEFAULT_METHOD
from hpcfl.errors import UserError, printable
from hpcfl.formatting import did_you_mean
from hpcfl.registries import merge

ONLY = ""
"""Label of the column of a table that names none."""
MAX_CHARACTERS = 1000

QUANTITIES = {
    "accuracy": "accuracy, %",
    "published": "published, %",
    "scored": "scored",
    "best": "best, %",
    "weighted": "weighted by samples, %",
    "after_download": "after download, %",
    "after_training": "after training, %",
    "spread": "spread over clients, %",
    "unseen": "unseen clients, %",
    "worst_tenth": "worst tenth of clients, %",
    "balanced_accuracy": "balanced accuracy, %",
    "macro_f1": "macro F1, %",
    "auc": "AUC, %",
    "calibration_error": "calibration error, %",
    "by_class": "accuracy by class, %",
    "coverage": "clients reached, %",
    "seeds": "seeds",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "published_bytes": "published bytes down and up",
    "finetune_epochs": "fine-tuning epochs",
    "steps_per_s": "client steps/s",
    "round_s": "seconds a round",
    "rounds": "rounds",
    "tuned": "tuned on validation samples",
}
"""What `show` of a table file may list, with the header of each; `display` prints them."""

DEFAULT_SHOW = [
    *("accuracy", "published", "scored", "after_download", "after_training", "worst_tenth", "seeds"),
    *("bytes_down", "bytes_up", "finetune_epochs", "steps_per_s", "rounds", "tuned"),
]


def _one_line(text: str) -> str:
    if text != printable(text) or not text.strip() or len(text) > MAX_CHARACTERS:
        raise ValueError(f"it must be one line of text, of at most {MAX_CHARACTERS} characters")
    return text.strip()


def _unique(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("duplicate seed; drop one")
    return seeds


def _swept_key(name: str) -> str:
    if name.partition(".")[0] not in GROUPS:
        raise ValueError(f"{name} is not a key of a configuration, such as train.lr")
    return name


Text = Annotated[StrictStr, AfterValidator(_one_line)]
Moment = Literal["after_download", "after_training"]


class PartialConfig(FileKeys):
    """Some keys of a configuration, validated when the cells are resolved."""

    method: Any = None
    data: Any = None
    model: Any = None
    train: Any = None
    clients: Any = None
    server: Any = None
    privacy: Any = None
    comm: Any = None
    run: Any = None

    def tree(self) -> dict[str, Any]:
        return self.model_dump(include=set(GROUPS), exclude_none=True)


class Sweep(FileKeys):
    """A short way to write columns that differ in one key."""

    key: Annotated[Text, AfterValidator(_swept_key)]
    values: list[Any] = Field(min_length=1)
    """Of a column, once read, its own alone."""


class _Labelled(PartialConfig):
    label: Text = ""
    _is_choice: bool = False
    """Whether the file has a bare label, which chooses from the extended file."""


class Column(_Labelled):
    config: Text | None = None
    """Configuration file under all other settings, relative to the table file."""
    sweep: Sweep | None = None
    """Which columns it stands for."""

    def tree(self) -> dict[str, Any]:
        """As of other keys; of a sweep, with its first value."""
        tree = super().tree()
        return tree if self.sweep is None else merge(tree, {self.sweep.key: self.sweep.values[0]})


class Row(_Labelled):
    """Its label is by default the method's name."""

    tuned: Text | None = None
    """Which keys were chosen on a validation split, and among what; the table repeats it."""
    without: list[Text] | None = None
    """Columns in which the row has no cell."""
    published: Any = None
    """Accuracy in %: of the only column, of each in turn, or by column, as it is once read."""
    published_bytes: Any = None
    """Likewise, bytes down and up together of a client in a round."""


class Pair(FileKeys):
    """Two rows whose difference, first minus second, is shown with its interval."""

    rows: list[Text] = Field(min_length=2, max_length=2)
    columns: list[Text] = Field([])
    """Default: all in which both rows have a cell."""
    at: Moment | None = None
    """When both rows' models are scored; default: each row's own moment."""
    weighted: bool = False
    """Whether clients count with their samples; there is no interval over clients then."""

    @property
    def name(self) -> str:
        return " - ".join(self.rows) + ", weighted by samples" * self.weighted


class HeatMaps(FileKeys):
    """A diagnostic of a method as matrices, dark where it is large; of each row's first finished seed."""

    draw: Literal["heat_maps"]
    quantity: Text
    """A diagnostic of the rows' methods; rows of other methods are not drawn."""
    client: Annotated[StrictInt, Field(ge=0)] | None = None
    """One client's matrix of layers; default: a matrix of all clients for each layer."""
    layers: list[Text] | dict[str, list[Text]] | None = None
    """Which layers, in all columns or by column; default: all."""
    rounds: list[Annotated[StrictInt, Field(ge=1)] | Literal["first", "middle", "last"]] = Field(
        ["last"], min_length=1
    )
    """Evaluations: of a number the one nearest to that round."""
    scale: Literal["linear", "log"] = "linear"
    low: float | None = Field(None, gt=0)
    """Value of the palest colour; default: 0, or with `scale: log` the smallest that is drawn."""

    @property
    def columns(self) -> list[str]:
        """Columns that it names layers of."""
        return list(self.layers) if isinstance(self.layers, dict) else []

    def layers_in(self, column: str) -> list[str] | None:
        """Return the layers that are drawn in a column; None for all."""
        return self.layers.get(column) if isinstance(self.layers, dict) else self.layers


class Curves(FileKeys):
    """Accuracy over rounds, a line a row: the mean over seeds in a band from the lowest to the highest."""

    draw: Literal["curves"]
    client: Annotated[StrictInt, Field(ge=0)] | None = None
    """Whose accuracy; default: the mean over clients."""


class Bars(FileKeys):
    """Accuracy by row and column, with the published one."""

    draw: Literal["bars"]
    accuracy: Literal["last", "best"] = "last"
    """After the last round, or after the best."""


class Points(FileKeys):
    """Accuracy over the bytes of all rounds and clients, a point a row."""

    draw: Literal["points"]


Drawing = Annotated[HeatMaps | Curves | Bars | Points, Field(discriminator="draw")]


def _choice(kind: type[_Labelled], label: str) -> Any:
    """Return the entry that a bare label stands for."""
    made = kind.model_construct(label=label)
    made._is_choice = True
    return made


def _or_label(kind: type[_Labelled]) -> BeforeValidator:
    return BeforeValidator(lambda entry: _choice(kind, entry) if isinstance(entry, str) else entry)


_as_pair = BeforeValidator(lambda entry: {"rows": entry} if isinstance(entry, list) else entry)
as_list = BeforeValidator(lambda entry: entry if isinstance(entry, list) else [entry])


class TableFile(FileKeys):
    """A table file; once read, with all that it extends but for settings, which are its own alone."""

    extends: Text | None = None
    """Table file, relative to this one, of which this one says only what differs."""
    title: Text = ""
    size: Text | None = None
    """How the table differs in size from what it stands for; printed above every output."""
    source: Text | None = None
    """Where the published numbers are from."""
    seeds: Annotated[list[Annotated[StrictInt, Field(ge=0)]], AfterValidator(_unique)] = Field(
        [], min_length=1
    )
    config: Text | None = None
    """Configuration file, as in a column, for all columns that name none."""
    settings: PartialConfig = PartialConfig()
    """What all cells have in common."""
    columns: list[Annotated[Column, _or_label(Column)]] = Field([], min_length=1)
    sweep: Sweep | None = None
    """A last entry of the columns, mostly the only one."""
    rows: list[Annotated[Row, _or_label(Row)]] = Field([], min_length=1)
    compare: list[Annotated[Pair, _as_pair]] | None = None
    show: list[StrictStr] = Field([], min_length=1)
    """The quantities of the printed table."""
    figure: Annotated[list[Drawing], as_list] | None = Field(None, max_length=26)
    """What is drawn of the cells: one drawing, or a list of them; default: what the extended file draws."""


def read_table(path: Path, above: Sequence[Path] = ()) -> list[TableFile]:
    """Return a table file as the last of all that it extends; UserError for the first mistake.

    The last file's settings of all cells, of a column and of a row override all those of the files before it.
    Its `columns` and `rows` are entries with labels, in which those of the extended file are filled in.
    """
    file = validate_file(path, read_yaml(path, "give a table file (YAML)"), TableFile)
    for name in file.show:
        check_known(f"{path}: show", name, "quantity", QUANTITIES)
    layers: list[TableFile] = []
    if file.extends is not None:
        below = path.parent / file.extends
        if below.resolve() in {one.resolve() for one in (path, *above)}:
            raise UserError(f"{path}: extends={file.extends} leads back to this file; name another")
        if not os.path.isfile(below):
            raise UserError(f"{path}: extends={file.extends}, but there is no file {below}; name another")
        layers = read_table(below, [*above, path])
    else:
        for name in ("title", "seeds", "rows"):
            if not getattr(file, name):
                raise UserError(f"{path}: {name} is missing; a table has {', '.join(TableFile.model_fields)}")
        for entry in (*file.columns, *file.rows):
            if entry._is_choice:
                raise UserError(
                    f"{path}: {entry.label} is a name alone, which chooses from the file that extends names; "
                    "write {label: NAME, ...} for a column, {method: {name: NAME}} for a row"
                )
    nothing = TableFile.model_construct(columns=[Column()], show=DEFAULT_SHOW, figure=[])
    base = layers[-1] if layers else nothing
    inherited = {
        name: getattr(base, name)
        for name in ("title", "size", "source", "seeds", "show", "figure")
        if getattr(file, name) == TableFile.model_fields[name].default
    }
    columns = _columns(path, file, base)
    labels = [column.label for column in columns]
    rows = _rows(path, file, [nothing, *layers], labels)
    for drawing in file.figure or ():
        for name in drawing.columns if isinstance(drawing, HeatMaps) else ():
            check_known(f"{path}, figure: layers", name, "column", labels)
    config = base.config if file.config is None else str(path.parent / file.config)
    pairs = _pairs(path, file, base, labels, rows)
    read = {"columns": columns, "rows": rows, "compare": pairs, "config": config}
    return [*layers, file.model_copy(update=inherited | read)]


def _columns(path: Path, file: TableFile, base: TableFile) -> list[Column]:
    """Return the file's columns, one for each value of a sweep, with their configuration files."""
    before = {column.label: column for column in base.columns}
    entries = file.columns + ([] if file.sweep is None else [Column(sweep=file.sweep)])
    columns: dict[str, Column] = {}
    for number, entry in enumerate(entries or [_choice(Column, label) for label in before]):
        place = f"{path}, {place_of('column', number, entry.label)}"
        if entry._is_choice:
            check_known(str(path), entry.label, "column", before)
        elif not entry.label and entry.sweep is None:
            raise UserError(f"{place}: label is missing; a column without a sweep has one")
        own = entry.config or file.config
        for column in _swept(entry):
            if column.label in columns:
                raise UserError(
                    f"{place}: another column is called {column.label}; give each a label of its own"
                )
            config = before[column.label].config if column.label in before else base.config
            config = config if own is None else str(path.parent / own)
            columns[column.label] = column.model_copy(update={"config": config})
    return list(columns.values())


def _swept(column: Column) -> list[Column]:
    """Return the columns that an entry stands for."""
    if column.sweep is None:
        return [column]
    made, key = [], column.sweep.key
    for value in column.sweep.values:
        label = f"{key.rpartition('.')[2]} = {shown(value)}"
        label = f"{column.label}, {label}" if column.label else label
        made.append(column.model_copy(update={"label": label, "sweep": Sweep(key=key, values=[value])}))
    return made


def _rows(path: Path, file: TableFile, layers: Sequence[TableFile], columns: Sequence[str]) -> list[Row]:
    """Return the file's rows, with what the extended file says of them and of these columns."""
    before = {row.label: row for row in layers[-1].rows}
    settings = [layer.settings for layer in (file, *reversed(layers))]
    rows: dict[str, Row] = {}
    for number, row in enumerate(file.rows or [_choice(Row, label) for label in before]):
        if row._is_choice:
            check_known(str(path), row.label, "row", before)
        label = row.label or _method_name([row, *settings])
        place = f"{path}, {place_of('row', number, label)}"
        if label in rows:
            raise UserError(f"{place}: another row is called {label}; give each a label of its own")
        old = before.get(label, Row())
        update: dict[str, Any] = {"label": label, "tuned": row.tuned or old.tuned, "without": row.without}
        if row.without is None:
            update["without"] = [name for name in old.without or () if name in columns]
        for name in update["without"]:
            check_known(f"{place}: without", name, "column", columns)
        for key in ("published", "published_bytes"):
            inherited = getattr(old, key) or {}
            given = _by_column(f"{place}: {key}", getattr(row, key), columns)
            update[key] = {name: value for name, value in inherited.items() if name in columns} | given
        rows[label] = row.model_copy(update=update)
    return list(rows.values())


def _method_name(settings: Iterable[PartialConfig]) -> str:
    """Return the label of a row that has none: its method's name, in the first settings that name one."""
    for one in settings:
        if isinstance(one.method, dict) and "name" in one.method:
            return str(one.method["name"])
        if isinstance(one.method, dict) and "path" in one.method:
            return Path(str(one.method["path"])).stem
    return DEFAULT_METHOD


def _by_column(place: str, given: Any, columns: Sequence[str]) -> dict[str, float]:
    """Return published numbers by column; `given` is as the file has them."""
    if not isinstance(given, dict):
        numbers = given if isinstance(given, list) else [given]
        if given is not None and len(numbers) != len(columns):
            raise UserError(
                f"{place}: {len(numbers)} given for {len(columns)} columns; give one each, and null where "
                f"there is none, or {{{columns[0] or 'column'}: number}}"
            )
        given = dict(zip(columns, numbers, strict=False))
    # a name may look like a number in YAML
    by_name = {str(name): value for name, value in given.items()}
    for name, value in by_name.items():
        check_known(place, name, "column", columns)
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise UserError(
                f"{place}: {value!r} is invalid; give numbers from 0 on, and null where there is none"
            )
    return {name: float(value) for name, value in by_name.items() if value is not None}


def _pairs(
    path: Path, file: TableFile, base: TableFile, columns: Sequence[str], rows: Sequence[Row]
) -> list[Pair]:
    """Return the pairs of rows, with their columns; of an extended file's pairs those that are left."""
    without = {row.label: row.without or () for row in rows}
    is_own, pairs = file.compare is not None, []
    for pair in file.compare if file.compare is not None else base.compare or ():
        place = f"{path}, compare {pair.rows[0]} with {pair.rows[1]}"
        for label in pair.rows if is_own else ():
            check_known(place, label, "row", without)
        lacking = {name for label in pair.rows for name in without.get(label, columns)}
        both = [name for name in columns if name not in lacking]
        left = [name for name in both if name in (pair.columns or both)]
        if is_own and len(left) < max(1, len(pair.columns)):
            allowed = " | ".join(both) or "none, so remove this pair"
            raise UserError(f"{place}: its columns need a cell of both rows; allowed: {allowed}")
        if left:
            pairs.append(pair.model_copy(update={"columns": left}))
    return pairs


def place_of(kind: str, number: int, label: str) -> str:
    """Return where an entry of a list is, such as "row 2 (FedAvg)"."""
    return f"{kind} {number + 1}" + (f" ({label})" if label else "")


def check_known(place: str, name: str, kind: str, known: Iterable[str]) -> None:
    """Raise UserError if a name is not a known one of its kind, such as "column"."""
    if name not in known:
        names = [label for label in known if label != ONLY]
        # labels may hold commas
        there = " | ".join(names) or "none"
        raise UserError(f"{place}: unknown {kind} {name}; allowed: {there}{did_you_mean(name, names)}")
