"""The user's own CSV table: features by hand, clients, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from bits import read_csv, run_here

from hpcfl.data.arrays import Arrays
from hpcfl.data.sources import read_source
from hpcfl.errors import FINISHED, UserError
from hpcfl.registries import load_config
from hpcfl.samples import SampleType
from hpcfl.setup.experiment import describe, load_data

TABLE = """\
age,job,hours,works,kind,town
30,nurse,0.1,True,yes,7
40,baker,-2,False,no,3
50,nurse,1e3,True,yes,7
20,"cook, old",4,True,no,10
"""


def table(tmp_path: Path, text: str | bytes, *, name: str = "own.csv") -> str:
    file = tmp_path / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def settings(path: str, keys: str) -> list[str]:
    """Return the settings of a table: keys of `data`, separated by spaces."""
    chosen = [f"data.{key}" for key in keys.split()]
    return ["data.source=csv", f"data.path={path}", "model.name=mlp", *chosen]


def read(path: str, keys: str) -> Arrays:
    return read_source(load_config(None, settings(path, keys)).data)


def refusal(path: str, keys: str) -> str:
    """Return the line with which a table is refused, without its path."""
    with pytest.raises(UserError) as caught:
        read(path, keys)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"data.path={path}: ")


def test_features_and_classes_equal_those_by_hand(tmp_path: Path) -> None:
    arrays = read(table(tmp_path, TABLE), "target=kind categorical=[job,town]")
    # age, baker, "cook, old", nurse, hours, works, towns 3, 7 and 10
    expected = [
        [30, 0, 0, 1, 0.1, 1, 0, 1, 0],
        [40, 1, 0, 0, -2, 0, 1, 0, 0],
        [50, 0, 0, 1, 1000, 1, 0, 1, 0],
        [20, 0, 1, 0, 4, 1, 0, 0, 1],
    ]
    np.testing.assert_array_equal(arrays.x, np.float32(expected))
    assert (arrays.x.dtype, arrays.sample, arrays.num_classes) == (np.float32, SampleType((9,)), 2)
    assert (arrays.y.dtype, arrays.y.tolist()) == (np.int64, [1, 0, 1, 0])
    assert arrays.owner is None


def test_classes_may_be_numbers(tmp_path: Path) -> None:
    text = "x,y\n" + "".join(f"{i},{(10, 2, -1)[i % 3]}\n" for i in range(6))
    assert read(table(tmp_path, text), "target=y").y.tolist() == [2, 1, 0, 2, 1, 0]
    # written on another system
    other = table(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert read(other, "target=y").x[:, 0].tolist() == list(range(6))


def test_clients_of_a_column_are_the_owners_in_sorted_order(tmp_path: Path) -> None:
    keys = "target=kind client_column=town partition.name=given categorical=[job]"
    arrays = read(table(tmp_path, TABLE), keys)
    assert arrays.owner.tolist() == [0, 1, 1, 2]
    assert arrays.x[:, 0].tolist() == [40, 30, 50, 20]
    assert arrays.sample == SampleType((6,))


def test_names_of_clients_keep_all_their_characters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Read as numbers, three of these would be one client, and 01 would be 1."""
    long = [f"12345678901234567{digit}" for digit in (9, 8, 7)]
    for written, sorted_names in (
        ([*long, "", "9"], ["9", *sorted(long)]),
        (["01", "1", "001", "10", "2"], ["001", "01", "1", "10", "2"]),
        (["10", "2", "-1", "0", "3"], ["-1", "0", "2", "3", "10"]),
    ):
        rows = [f"{number},{name},{number % 2}" for number, name in enumerate(written * 4)]
        path = table(tmp_path, "\n".join(["x,who,y", *rows]) + "\n")
        arrays = read(path, "target=y client_column=who partition.name=given missing=drop")
        assert list(arrays.names) == sorted_names
        # each row's name
        found = zip(arrays.x[:, 0], [arrays.names[client] for client in arrays.owner], strict=True)
        assert {*found} == {(row, name) for row, name in enumerate(written * 4) if name}
    (warning,) = caplog.messages
    assert warning.endswith("who has '001' and '01' as two values; if they are one, write them alike")


def test_values_written_in_two_ways_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "x,y\n" + "".join(f"{number},{('true', 'TRUE', 'no')[number % 3]}\n" for number in range(9))
    assert read(table(tmp_path, text), "target=y").num_classes == 3
    (warning,) = caplog.messages
    assert "column y has 'TRUE' and 'true' as two values" in warning


def test_numbers_too_close_for_float32_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "seconds,x,y\n" + "".join(f"{1.7e9 + number:f},{number},{number % 2}\n" for number in range(300))
    read(table(tmp_path, text), "target=y")
    (warning,) = caplog.messages
    assert "column seconds has values near 1.7e+09 that differ by 86.6" in warning
    assert warning.endswith(": float32 has too few digits for them; subtract a number, or rescale")


def test_missing_values_are_refused_by_default(tmp_path: Path) -> None:
    text = "a,b,job,y\n1,,nurse,0\n3,2,,1\n,4,cook,0\n5,6,cook,1\n,7,cook,0\n"
    path = table(tmp_path, text)
    keys = "target=y categorical=[job]"
    drop = "; data.missing=drop leaves out such rows"
    mean = ", data.missing=mean takes the means of features that are numbers"
    assert refusal(path, keys) == f"of 5 rows some have no value (a 2, b 1, job 1){drop}{mean}"
    numbers = table(tmp_path, text.replace("2,,1", "2,cook,1"), name="numbers.csv")
    # a class and a client are texts, also of digits, and have no mean
    for role in ("target=y", "target=a client_column=y partition.name=given"):
        of_role = table(tmp_path, "a,y\n1,0\n2,1\n1,1\n2,\n", name="role.csv")
        assert "(y 1); " in refusal(of_role, f"{role} missing=mean")
    whole = "7,1,cook,0\n8,2,nurse,1\n9,3,cook,0\n"
    dropped = read(table(tmp_path, text + whole, name="more.csv"), f"{keys} missing=drop")
    assert dropped.x.tolist() == [[5, 6, 1, 0], [7, 1, 1, 0], [8, 2, 0, 1], [9, 3, 1, 0]]
    assert dropped.y.tolist() == [1, 0, 1, 0]
    mean = ", and data.missing=mean is for features that are numbers"
    assert refusal(path, f"{keys} missing=mean") == f"of 5 rows some have no value (job 1){drop}{mean}"
    means = read(numbers, f"{keys} missing=mean")
    assert means.x[:, 0].tolist() == [1, 3, 3, 5, 3]
    assert means.x[:, 1].tolist() == [4.75, 2, 4, 6, 7]
    # a row that is too short lacks values as well
    assert "(b 1)" in refusal(table(tmp_path, "y,b\n0,1\n1\n0,1\n1,2\n"), "target=y")


def test_texts_such_as_none_are_values_of_categories_classes_and_clients(tmp_path: Path) -> None:
    text = "a,alcohol,kind,who\n" + "1,None,NA,null\n2,High,yes,b\nNA,None,NA,null\n4,,yes,b\n" * 2
    keys = "target=kind client_column=who partition.name=given categorical=[alcohol]"
    path = table(tmp_path, text)
    assert "(a 2, alcohol 2)" in refusal(path, keys)
    arrays = read(path, f"{keys} missing=drop")
    assert arrays.names == ("b", "null")
    # High, None
    assert arrays.x.tolist() == [[2, 1, 0], [2, 1, 0], [1, 0, 1], [1, 0, 1]]
    assert arrays.y.tolist() == [1, 1, 0, 0]
    # among numbers, they are missing
    numbers = table(
        tmp_path, "a,b,t\n1,#NA,1\n2,3,1\n3,-NaN,0\n4,4,0\n5,5,NA\n6,6,1\n7,7,0\n", name="numbers.csv"
    )
    assert "(b 2, t 1)" in refusal(numbers, "target=t")
    assert read(numbers, "target=t missing=drop").x.tolist() == [[2, 3], [4, 4], [6, 6], [7, 7]]


def test_a_run_normalises_by_the_training_rows(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    y = stream.integers(2, size=80)
    rows = zip(100 * y + stream.normal(size=80), stream.normal(size=80), y, np.arange(80) % 4, strict=True)
    text = "a,b,y,who\n" + "".join(f"{a:g},{b:g},{c},p{d}\n" for a, b, c, d in rows)
    words = settings(table(tmp_path, text), "target=y client_column=who partition.name=given")
    words += ["method.name=fedavg", "train.rounds=5", "train.local_epochs=5", "run.report=false"]
    arrays, parts = load_data(load_config(None, words))
    record = describe(load_config(None, words).data, arrays, parts)
    train = arrays.x[np.concatenate([part.train for part in parts])]
    np.testing.assert_allclose(record.mean, train.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(record.std, train.std(axis=0), rtol=1e-5)
    assert len(parts) == 4
    assert run_here(tmp_path / "run", words) == FINISHED
    named = {(row["client"], row["name"]) for row in read_csv(tmp_path / "run" / "partition.csv")}
    assert named == {(str(client), f"p{client}") for client in range(4)}
    last = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[-1].split(",")
    assert float(last[2]) > 0.95


MANY = ",".join(f"c{number}" for number in range(12))


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        (TABLE, "", "data.target is not set: data.source=csv needs data.target=COLUMN"),
        (TABLE, "target=class", "data.target: unknown column class; allowed: age, job, hours, w"),
        (f"{MANY}\n{MANY}\n", "target=y", "allowed: c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 and 2 more"),
        (TABLE.replace(",", ";"), "target=kind", "allowed: age;job;hours;works;kind;town"),
        (TABLE, "target=kind categorical=[jobs]", "data.categorical: unknown column jobs; allowed: "),
        (TABLE, "target=kind categorical=[kind]", "names kind, and so does data.target; name it once"),
        (TABLE, "target=kind client_column=who partition.name=given", "client_column: unknown column who;"),
        (TABLE, "target=kind", "column job is not of numbers, with 'nurse'; list it in data.categorical to"),
        ("a,y\n1,0\n?,1\n2,0\n3,1\n", "target=y", "column a is not of numbers, with '?'; list it"),
        ("a,y\n1,0\n2,0\n", "target=y", "has one value, 0, in all rows; it needs two or more"),
        ("a,y\n1,0.5\n2,1.5\n3,7\n", "target=y", "data.target=y has 3 values in 3 rows; each value is a c"),
        ("y\n1\n2\n1\n2\n", "target=y", "has no columns but y; it needs features"),
        ("a,y\n1,0\n1e39,1\n2,0\n3,1\n", "target=y", "column a holds values that are not finite in float32"),
        ("a,y\n", "target=y", "has no rows below the names of its columns"),
        ("a,b,y\n0,,0\n1,,1\n2,,0\n3,,1\n", "target=y missing=mean", "column b has no values; remove it"),
        ("a,y\n,0\n1,\n", "target=y missing=drop", "data.missing=drop leaves none of 2 rows"),
        ("a,a,y\n1,2,0\n", "target=y", "two columns have the name a; rename one"),
        (",a,y\n0,1,0\n", "target=y", "column 1 has no name, as an index that pandas wrote; name or rem"),
        ("a,y\n1,2,3\n", "target=y", "cannot be read as a CSV file (ParserWarning: Length of header or"),
        ("a,y\n1,2\n1,2,3\n", "target=y", "cannot be read as a CSV file ("),
        (b"", "target=y", "cannot be read as a CSV file (EmptyDataError"),
        (b"a,y\n\xff\xfe,1\n", "target=y", "cannot be read as a CSV file (UnicodeDecodeError"),
        (b'a,y\n"1,2\n', "target=y", "cannot be read as a CSV file ("),
    ],
)
def test_unfit_tables_are_refused(text: str | bytes, keys: str, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(table(tmp_path, text), keys)


def test_keys_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    for keys, expected in (
        ("source=digits path=null", "data.target=kind needs data.source=csv; set that, or data.target=null"),
        ("client_column=town", "data.client_column=town needs data.partition.name=given; set that, or data."),
    ):
        path = table(tmp_path, TABLE)
        assert load_config(None, settings(path, "target=kind")).partition.name == "dirichlet"
        assert refusal(path, f"target=kind {keys}").startswith(expected)


def test_the_given_partition_needs_a_column_of_clients(tmp_path: Path) -> None:
    words = settings(table(tmp_path, TABLE), "target=kind categorical=[job] partition.name=given")
    with pytest.raises(UserError, match=r"^data\.partition\.name=given: .* data\.client_column=COLUMN\)"):
        load_data(load_config(None, words))


def test_without_a_file_or_pandas_it_is_said_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(str(tmp_path), "target=y") == "is not a file; name a CSV file, such as FILE.csv"
    monkeypatch.setitem(sys.modules, "pandas", None)
    message = refusal(table(tmp_path, TABLE), "target=kind")
    assert message.startswith("data.source=csv needs the package pandas (")
    assert message.endswith('; install it with: pip install -e ".[tables]"')
