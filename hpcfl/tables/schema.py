"""What a table file may hold, and where in it a mistake is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from hpcfl.config import GROUPS
from hpcfl.errors import printable
from hpcfl.formatting import did_you_mean

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
    "worst_tenth": "worst tenth of clients, %",
    "unseen": "unseen clients, %",
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

DEFAULT_SHOW = (
    *("accuracy", "published", "scored", "after_download", "after_training", "worst_tenth", "seeds"),
    *("bytes_down", "bytes_up", "finetune_epochs", "steps_per_s", "rounds", "tuned"),
)


def _one_line(text: str) -> str:
    if text != printable(text) or not text.strip() or len(text) > MAX_CHARACTERS:
        raise ValueError(f"it must be one line of text, of at most {MAX_CHARACTERS} characters")
    return text.strip()


Line = Annotated[StrictStr, AfterValidator(_one_line)]
Moment = Literal["after_download", "after_training"]


def _published(most: float, kind: str) -> AfterValidator:
    """Check numbers from 0 to `most`: of the only column, of each in turn, or by column."""

    def is_possible(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most

    def check(value: Any) -> Any:
        numbers = list(value.values()) if isinstance(value, dict) else value
        if isinstance(value, list):
            numbers = [number for number in value if number is not None]
        if not all(map(is_possible, numbers if isinstance(numbers, list) else [numbers])):
            raise ValueError(
                f"it must be {kind}, one for each column in a list (null where there is none), or "
                "column: number"
            )
        return value

    return AfterValidator(check)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        raise ValueError("it must be a number, true, false, text, or a list")
    return value


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SettingsEntry(_Entry):
    """A configuration tree, looked into when it is resolved."""

    method: Any = None
    data: Any = None
    model: Any = None
    train: Any = None
    server: Any = None
    comm: Any = None
    run: Any = None

    def tree(self) -> dict[str, Any]:
        return self.model_dump(include=set(GROUPS), exclude_none=True)


class SweepEntry(_Entry):
    """A short way to write columns that differ in one key."""

    key: Line
    values: list[Annotated[Any, AfterValidator(_plain)]] = Field(min_length=1)

    def columns(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the label and the settings of each value."""
        *groups, name = self.key.split(".")
        made = []
        for value in self.values:
            tree: Any = {name: value}
            for group in reversed(groups):
                tree = {group: tree}
            made.append((f"{name} = {str(value).lower() if isinstance(value, bool) else value}", tree))
        return made


class ColumnEntry(SettingsEntry):
    label: Line | None = None
    config: Line | None = None
    """Configuration file under all other settings, relative to the table file."""
    sweep: SweepEntry | None = None


class RowEntry(SettingsEntry):
    label: Line | None = None
    """Name in the table; default: the method's."""
    tuned: Line | None = None
    """Which keys were chosen on a validation split, and among what; the table repeats it."""
    without: list[Line] | None = None
    """Columns in which the row has no cell."""
    published: Annotated[Any, _published(100, "a number from 0 to 100")] = None
    """Accuracy that the source names, in %: of the only column, of each in turn, or by column."""
    published_bytes: Annotated[Any, _published(math.inf, "a number from 0 on")] = None
    """Bytes down and up of a client in a round that the source names, in the same ways."""


class ComparisonEntry(_Entry):
    """Two rows whose difference, first minus second, is shown with its interval."""

    rows: list[Line] = Field(min_length=2, max_length=2)
    columns: list[Line] | None = None
    """Default: all in which both rows have a cell."""
    at: Moment | None = None
    """When both rows' models are scored; default: each row's own moment."""
    weighted: StrictBool = False
    """Whether clients count with their samples; there is no interval over clients then."""


def _as_comparison(value: Any) -> Any:
    return {"rows": value} if isinstance(value, list) else value


class HeatMapsEntry(_Entry):
    """A diagnostic of a method as matrices, dark where it is large; of each row's first finished seed."""

    draw: Literal["heat_maps"]
    quantity: Line
    """A diagnostic of the rows' methods; rows of other methods are not drawn."""
    client: Annotated[StrictInt, Field(ge=0)] | None = None
    """One client's matrix of layers; default: a matrix of all clients for each layer."""
    layers: list[Line] | dict[str, list[Line]] | None = None
    """Which layers, in all columns or by column; default: all."""
    rounds: list[Annotated[StrictInt, Field(ge=1)] | Literal["first", "middle", "last"]] = Field(
        ["last"], min_length=1
    )
    """Evaluations: of a number the one nearest to that round."""
    scale: Literal["linear", "log"] = "linear"
    low: float | None = Field(None, gt=0)
    """Value of the palest colour; default: 0, or with `scale: log` the smallest that is drawn."""


class CurvesEntry(_Entry):
    """Accuracy over rounds, a line a row: the mean over seeds in a band from the lowest to the highest."""

    draw: Literal["curves"]
    client: Annotated[StrictInt, Field(ge=0)] | None = None
    """Whose accuracy; default: the mean over clients."""


class BarsEntry(_Entry):
    """Accuracy by row and column, with the published one."""

    draw: Literal["bars"]
    accuracy: Literal["last", "best"] = "last"
    """After the last round, or after the best."""


class PointsEntry(_Entry):
    """Accuracy over the bytes of all rounds and clients, a point a row."""

    draw: Literal["points"]


DRAWINGS: dict[str, type[_Entry]] = {
    "heat_maps": HeatMapsEntry,
    "curves": CurvesEntry,
    "bars": BarsEntry,
    "points": PointsEntry,
}
"""What a figure's `draw` may be."""

FigureEntry = Annotated[HeatMapsEntry | CurvesEntry | BarsEntry | PointsEntry, Field(discriminator="draw")]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class TableEntry(_Entry):
    extends: Line | None = None
    """Table file, relative to this one, of which this one says only what differs."""
    title: Line | None = None
    size: Line | None = None
    """How the table differs in size from what it stands for; printed above every output."""
    source: Line | None = None
    """Where the published numbers stand."""
    seeds: list[Annotated[StrictInt, Field(ge=0)]] | None = Field(None, min_length=1)
    config: Line | None = None
    """Configuration file, as in a column, for all columns that name none."""
    settings: SettingsEntry = SettingsEntry()
    """What all cells have in common."""
    columns: list[ColumnEntry] | None = Field(None, min_length=1)
    sweep: SweepEntry | None = None
    """In place of columns."""
    rows: list[RowEntry] | None = Field(None, min_length=1)
    compare: list[Annotated[ComparisonEntry, BeforeValidator(_as_comparison)]] | None = None
    show: list[StrictStr] | None = Field(None, min_length=1)
    """Which quantities stand in the printed table."""
    figure: Annotated[list[FigureEntry], BeforeValidator(_as_list)] | None = None
    """What is drawn of the cells: one drawing, or a list of them; default: what the extended file draws."""


def place_of(kind: str, number: int, label: object) -> str:
    return f"{kind} {number + 1}" + (f" ({label})" if label else "")


def _label(entry: object) -> object:
    """Return what an entry of the file, whatever it is, seems to be called."""
    method = entry.get("method") if isinstance(entry, dict) else None
    name = method.get("name") if isinstance(method, dict) else None
    return entry.get("label", name) if isinstance(entry, dict) else None


def mistake(path: Path, tree: dict[str, Any], error: ValidationError) -> str:
    """Say in a line where in the file the first mistake is, and what is allowed."""
    first = error.errors()[0]
    place, keys = str(path), list(first["loc"])
    kind: type[BaseModel] = TableEntry
    entries: dict[str, tuple[str, type[BaseModel]]] = {
        "rows": ("row", RowEntry),
        "columns": ("column", ColumnEntry),
        "compare": ("compare", ComparisonEntry),
    }
    group = str(keys[0])
    if group in entries and len(keys) > 1:
        number, (name, kind) = int(keys[1]), entries[group]
        place, keys = f"{path}, {place_of(name, number, _label(tree[group][number]))}", keys[2:]
        what = f"the {name}"
    elif group == "settings" and len(keys) > 1:
        place, keys, kind = f"{path}, settings", keys[1:], SettingsEntry
    elif group == "figure" and len(keys) > 1:
        place = f"{path}, figure" + (f" {int(keys[1]) + 1}" if isinstance(tree["figure"], list) else "")
        if first["type"].startswith("union_tag"):
            given = first.get("ctx", {}).get("tag")
            what = "draw is missing" if given is None else f"draw={given} is invalid"
            return f"{place}: {what}; allowed: {', '.join(DRAWINGS)}"
        if len(keys) > 2:
            kind, keys = DRAWINGS[str(keys[2])], keys[3:]
    if keys and keys[0] == "sweep" and len(keys) > 1:
        place, keys, kind = f"{place}, sweep", keys[1:], SweepEntry
    key = ".".join(map(str, keys)) if keys else what
    allowed = ", ".join(kind.model_fields)
    if first["type"] == "extra_forbidden":
        return f"{place}: {key} is an unknown key; allowed: {allowed}{did_you_mean(key, kind.model_fields)}"
    if first["type"] == "missing":
        return f"{place}: {key} is missing; it has {allowed}"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place}: {key}={first['input']!r} is invalid: {reason}"
