"""The user's own CSV table: a row is a sample, its columns are features, the class and maybe the client."""

from __future__ import annotations

import csv
import importlib
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from hpcfl.config.keys import DataConfig
from hpcfl.data.arrays import Arrays, arrays_of
from hpcfl.data.npz import MAX_NAMES, existing, warn_of_digits
from hpcfl.errors import UserError, one_line

if TYPE_CHECKING:
    import pandas as pd

LOG = logging.getLogger(__name__)

MISSING = [
    *("", "NA", "N/A", "n/a", "<NA>", "#NA", "#N/A", "#N/A N/A", "None", "null", "NULL"),
    *("NaN", "nan", "-NaN", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
]
"""Words for a missing number."""


def read_csv_table(data: DataConfig) -> Arrays:
    """Read a CSV file with names of columns in its first line.

    Returns:
        Features, float32 [n, F], in the order of the columns; a categorical column has one for each of its
        values, sorted. The class is the number of each value of the target, sorted, and so is the owner that
        of each client.

    Raises:
        UserError: pandas is not installed, or the file is missing, damaged or unfit.
    """
    if data.target is None:
        raise UserError("data.target is not set: data.source=csv needs data.target=COLUMN, that of the class")
    where = f"data.path={data.path}"
    frame = _read(data, where)
    _check_names(list(frame.columns), data, where)
    frame = _without_missing(frame, data, where)
    y, values = _numbered(frame[data.target], where)
    if len(values) < 2:
        raise UserError(
            f"{where}: data.target={data.target} has one value, {values[0]}, in all rows; it needs "
            "two or more"
        )
    if 2 * len(values) > len(y):
        raise UserError(
            f"{where}: data.target={data.target} has {len(values)} values in {len(y)} rows; each value is "
            "a class, of two rows or more on average; choose another column"
        )
    roles = (data.target, data.client_column)
    features = [name for name in frame.columns if name not in roles]
    if not features:
        raise UserError(f"{where}: has no columns but {' and '.join(filter(None, roles))}; it needs features")
    x = np.stack([feature for name in features for feature in _features(frame[name], data, where)], axis=1)
    of_numbers = [name for name in features if name not in (data.categorical or ())]
    warn_of_digits([(f"column {name}", frame[name].to_numpy()) for name in of_numbers], where)
    if data.client_column is None:
        return arrays_of(x, y, where)
    client, names = _numbered(frame[data.client_column], where)
    return replace(arrays_of(x, y, where, client=client), names=tuple(names))


def _read(data: DataConfig, where: str) -> pd.DataFrame:
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise UserError(
            f"data.source=csv needs the package pandas ({one_line(error)}); install it with: "
            'pip install -e ".[tables]"'
        ) from error
    file = existing(str(data.path), where, "file", "name a CSV file, such as FILE.csv")
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            names = _checked_header(text, where)
            text.seek(0)
            # read as numbers, long names of clients would lose digits, and 01 would be 1
            of_texts = (data.target, data.client_column, *(data.categorical or ()))
            texts = [name for name in names if name in of_texts]
            # among texts, "None" and "NA" are values like others; see below for numbers
            missing = {name: [""] if name in texts else MISSING for name in names}
            with warnings.catch_warnings():
                # of rows that are too long
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                frame: pd.DataFrame = pandas.read_csv(
                    text,
                    index_col=False,
                    low_memory=False,
                    keep_default_na=False,
                    na_values=missing,
                    dtype=dict.fromkeys(texts, str),
                )
    except UserError:
        raise
    # any text may be there
    except Exception as error:
        raise UserError(
            f"{where}: cannot be read as a CSV file ({one_line(error)}); it needs the names of columns in "
            "the first line, commas, and UTF-8"
        ) from error
    if frame.empty:
        raise UserError(f"{where}: has no rows below the names of its columns")
    for name in texts:
        there = frame[name][~(frame[name].isin(MISSING) | frame[name].isna())]
        if all(map(_is_numeric, there.unique())):
            frame[name] = there.str.strip()
    return frame


def _numbered(column: pd.Series[Any], where: str) -> tuple[np.ndarray, list[str]]:
    """Return the number of each row's value, and all values: sorted as numbers, if all are different ones.

    Values such as 1 and 1.0, or yes and Yes, are two; this is warned of.
    """
    values = sorted(column.unique())
    are_numbers = all(map(_is_numeric, values))
    meant: dict[float | str, str] = {}
    for value in values:
        other = meant.setdefault(_number(value) if are_numbers else value.lower(), value)
        if other is not value:
            LOG.warning(
                f"{where}: column {column.name} has {other!r} and {value!r} as two values; if they are "
                "one, write them alike"
            )
            break
    if are_numbers and len(meant) == len(values):
        values.sort(key=_number)
    numbers = {value: number for number, value in enumerate(values)}
    return column.map(numbers).to_numpy(), values


def _number(text: str) -> float:
    """Return a number, a whole one with all its digits."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _checked_header(text: TextIO, where: str) -> list[str]:
    """Return the names of columns; UserError for those that pandas would change without a message."""
    names = next(csv.reader(text), [])
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise UserError(
                f"{where}: column {number} has no name, as an index that pandas wrote; name or remove it "
                "(to_csv(..., index=False))"
            )
        if name in names[: number - 1]:
            raise UserError(f"{where}: two columns have the name {name}; rename one")
    return names


def _check_names(there: list[str], data: DataConfig, where: str) -> None:
    """Raise UserError for a key that names no column, or one that another key names."""
    named = [("data.target", data.target), ("data.client_column", data.client_column)]
    named += [("data.categorical", name) for name in data.categorical or ()]
    keys: dict[str, str] = {}
    for key, name in named:
        if name is None:
            continue
        if name not in there:
            more = f" and {len(there) - MAX_NAMES} more" if len(there) > MAX_NAMES else ""
            raise UserError(
                f"{where}: {key}: unknown column {name}; allowed: {', '.join(there[:MAX_NAMES])}{more}"
            )
        if name in keys:
            raise UserError(f"{where}: {key} names {name}, and so does {keys[name]}; name it once")
        keys[name] = key


def _without_missing(frame: pd.DataFrame, data: DataConfig, where: str) -> pd.DataFrame:
    """Return a table without missing values."""
    if data.missing == "drop":
        whole = frame.dropna().infer_objects()
        if whole.empty:
            raise UserError(f"{where}: data.missing=drop leaves none of {len(frame)} rows")
        return whole
    counts = frame.isna().sum()
    if empty := [name for name in counts.index if counts[name] == len(frame)]:
        raise UserError(f"{where}: column {empty[0]} has no values; remove it")
    if data.missing == "mean":
        # the target, clients and categories are texts
        frame = frame.fillna(frame[counts.index[counts > 0]].mean(numeric_only=True))
        counts = frame.isna().sum()
    counts = counts[counts > 0]
    if counts.empty:
        return frame
    shown = ", ".join(f"{name} {count}" for name, count in counts.head(MAX_NAMES).items())
    more = f", and {len(counts) - MAX_NAMES} more columns" if len(counts) > MAX_NAMES else ""
    allowed = "data.missing=drop leaves out such rows"
    if data.missing == "mean":
        allowed += ", and data.missing=mean is for features that are numbers"
    else:
        allowed += ", data.missing=mean takes the means of features that are numbers"
    raise UserError(f"{where}: of {len(frame)} rows some have no value ({shown}{more}); {allowed}")


def _is_number(kind: Any) -> bool:
    """Whether a column's type is one of numbers, or of true and false."""
    return str(kind.kind) in "biuf"


def _is_numeric(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return False


def _features(column: pd.Series[Any], data: DataConfig, where: str) -> Iterator[np.ndarray]:
    """Yield a column's features, float32 [n] each."""
    if column.name in (data.categorical or ()):
        codes, values = _numbered(column, where)
        yield from (codes == np.arange(len(values))[:, None]).astype(np.float32)
        return
    if not _is_number(column.dtype):
        text = next((value for value in column if not _is_numeric(value)), column.iloc[0])
        raise UserError(
            f"{where}: column {column.name} is not of numbers, with {text!r}; list it in data.categorical to "
            "make each of its values a feature, or remove it"
        )
    with np.errstate(over="ignore"):
        numbers = column.to_numpy().astype(np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(
            f"{where}: column {column.name} holds values that are not finite in float32; clean or rescale it"
        )
    yield numbers
