"""A method of the user's own, in a file outside the package: runs, goes on, is listed, and is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from bits import differing
from processes import Mpirun

from hpcfl.config.own_code import allow
from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.tables.cells import Table

pytestmark = pytest.mark.usefixtures("own_code_forgotten")

TINY = ["data.clients=4", "data.per_client=20", "train.local_epochs=1", "train.rounds=2"]

TRIMMED = '''"""Trimmed mean: the server leaves out the largest and smallest numbers of each coordinate."""

from typing import Any, ClassVar

from pydantic import Field

from hpcfl.communication.upload import Upload
from hpcfl.communication.messages import Cohort
from hpcfl.methods.base import Params, State
from hpcfl.methods.fedavg import FedAvg


class TrimmedMeanParams(Params):
    left_out: int = Field(1, ge=0)
    """Numbers left out at either end of each coordinate."""


class TrimmedMean(FedAvg):
    Params: ClassVar[Any] = TrimmedMeanParams

    def server_state(self) -> State:
        return super().server_state() | {"rounds": self.context.initial_parameters().new_zeros(1)}

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        ordered = up.collect()["theta"].sort(dim=0).values
        server["theta"] = ordered[self.params.left_out : len(cohort) - self.params.left_out].mean(dim=0)
        server["rounds"] = server["rounds"] + 1
'''


@pytest.fixture
def trimmed(tmp_path: Path) -> Path:
    """Write a new aggregation rule to a file."""
    path = tmp_path / "trimmed.py"
    path.write_text(TRIMMED)
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which a command is refused."""
    capsys.readouterr()
    assert main([*words, *TINY]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_new_aggregation_rule_runs_on_any_number_of_ranks_and_goes_on(
    trimmed: Path, tmp_path: Path, mpirun: Mpirun
) -> None:
    assert len(TRIMMED.splitlines()) <= 30
    words = [f"method.path={trimmed}", *TINY]
    # ranks are copies of this process, which does not know the file yet
    mpirun(3, "-m", "hpcfl.main", *words, "--out", tmp_path / "parts", "train.rounds=1")
    assert main([*words, "--out", str(tmp_path / "whole")]) == FINISHED
    assert main([*words, "--out", str(tmp_path / "parts")]) == FINISHED
    assert differing(tmp_path / "whole", tmp_path / "parts") == []
    saved = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())["method"]
    assert (saved["name"], saved["left_out"], len(saved["code"])) == (trimmed.stem, 1, 16)


def test_it_has_codecs_without_a_line(trimmed: Path, tmp_path: Path) -> None:
    words = [f"method.path={trimmed}", *TINY, "--out"]
    assert main([*words, str(tmp_path / "plain")]) == FINISHED
    assert main([*words, str(tmp_path / "coded"), "comm.codec=topk"]) == FINISHED
    rows = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("plain", "coded")]
    plain, coded = (dict(zip(lines[0].split(","), lines[-1].split(","), strict=True)) for lines in rows)
    assert int(coded["bytes_up"]) == pytest.approx(0.1 * int(plain["bytes_up"]), rel=0.01)


def test_its_keys_are_checked_and_it_is_listed(trimmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "method.left_out=-1 is invalid" in refused(capsys, f"method.path={trimmed}", "method.left_out=-1")
    assert "method.left=1 is an unknown key; the nearest known one is method.left_out" in refused(
        capsys, f"method.path={trimmed}", "method.left=1"
    )
    assert main(["list", "--method", str(trimmed)]) == FINISHED
    assert f"method {trimmed.stem}: from {trimmed.name}" in capsys.readouterr().out


def test_another_file_is_another_run(
    trimmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    other = trimmed.with_name(f"other_{trimmed.name}")
    other.write_text(TRIMMED.replace("+ 1\n", "+ 2\n"))
    assert main([f"method.path={trimmed}", *TINY, "--out", folder, "--quiet"]) == FINISHED
    config = str(tmp_path / "run" / "config.yaml")
    assert main([config, "--out", folder, "--quiet"]) == FINISHED
    assert "method.name: " in refused(capsys, f"method.path={other}", "--out", folder)
    trimmed.write_text(TRIMMED.replace("left_out: int = Field(1", "left_out: int = Field(0"))
    assert "is not the file of this configuration" in refused(capsys, config, "--out", folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ": No such file or directory; give a Python file"),
        ("x = 1\ny = nothing\n", ", line 2: NameError: name 'nothing' is not defined"),
        ("x = 1\ndef (:\n", ", line 2: SyntaxError: invalid syntax"),
        ("x = 1\n", " defines 0 classes derived from Method (none); it needs one"),
        (
            "from hpcfl.methods.fedavg import FedAvg\nclass A(FedAvg): ...\nclass B(FedAvg): ...\n",
            " defines 2 classes derived from Method (A, B); it needs one",
        ),
        (
            "from hpcfl.methods.fedavg import FedAvg\nclass A(FedAvg):\n    name = 'fedavg'\n",
            " defines fedavg, but that name is already in use; choose another",
        ),
    ],
)
def test_a_file_that_is_no_method_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    assert refused(capsys, f"method.path={path}") == f"hpcfl: error: method.path={path}{said}"


def test_a_name_that_is_not_the_file_s_is_refused(trimmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, f"method.path={trimmed}", "method.name=moon")
    assert f"method.name=moon does not go with method.path={trimmed}" in said


def test_options_go_with_the_method_that_knows_them(trimmed: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"method: {{path: {trimmed}, left_out: 2}}\ntrain: {{rounds: 3}}\n")
    allow("--own-code", str(trimmed))
    assert load_config(mine, ["method.name=moon"]).method.name == "moon"
    whole = tmp_path / "whole.yaml"
    whole.write_text(load_config(mine, []).yaml())
    moved = trimmed.with_name("elsewhere")
    moved.mkdir()
    (moved / trimmed.name).write_text(TRIMMED)
    config = load_config(whole, [f"method.path={moved / trimmed.name}"])
    assert config.tree()["method"]["left_out"] == 2
    assert config.method.file["path"] == str(moved / trimmed.name)


def test_a_row_of_a_table_is_called_as_its_file(trimmed: Path, tmp_path: Path) -> None:
    allow("--own-code", str(trimmed))
    path = tmp_path / "two.yaml"
    rows = [{"method": {"path": str(trimmed)}}, {"method": {"name": "fedavg"}}]
    path.write_text(yaml.safe_dump({"title": "t", "seeds": [0], "rows": rows}))
    cells = Table(path, [], tmp_path / "out").cells
    assert [(cell.label, cell.config.method.name) for cell in cells] == [
        ("trimmed", "trimmed"),
        ("fedavg",) * 2,
    ]


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (("", ""), ["method.name=trimmed"], "is a method in your own file; also give method.path=FILE.py"),
        (
            ("= Field(1, ge=0)", "= Field(ge=0)"),
            [],
            "method.left_out is not given and has no default; ",
        ),
        (("left_out", "code"), [], "TrimmedMeanParams has code, but method.code is reserved; rename it"),
    ],
)
def test_mistakes_with_an_own_method(
    trimmed: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: list[str], said: str
) -> None:
    trimmed.write_text(TRIMMED.replace(*change) if change[0] else TRIMMED)
    if words:
        load_config(None, [f"method.path={trimmed}"])
    assert said in refused(capsys, *(words or [f"method.path={trimmed}"]))


def test_annotations_are_what_they_are_to_python(trimmed: Path) -> None:
    text = TRIMMED.replace("left_out: int", "left_out: __import__('builtins').int")
    trimmed.write_text(f"{text}\nassert TrimmedMeanParams.__annotations__['left_out'] is int\n")
    assert load_config(None, [f"method.path={trimmed}"]).method.name == "trimmed"


def test_naming_a_file_s_own_method_keeps_it_and_null_drops_it(trimmed: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"method: {{name: trimmed, path: {trimmed}, left_out: 2}}\n")
    allow("--own-code", str(trimmed))
    for _ in range(2):
        tree = load_config(mine, ["method.name=trimmed"]).tree()["method"]
        assert (tree["name"], tree["left_out"]) == ("trimmed", 2)
    assert load_config(mine, ["method.path=null"]).method.name == "pfedla"


def test_a_check_of_several_keys_is_told(trimmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = """
    @model_validator(mode="after")
    def check(self) -> "TrimmedMeanParams":
        if self.left_out > 3:
            raise ValueError("left_out must be 3 or less")
        return self
"""
    text = TRIMMED.replace("import Field", "import Field, model_validator")
    before, after = text.split("\n\nclass TrimmedMean(")
    trimmed.write_text(f"{before}{check}\n\nclass TrimmedMean({after}")
    said = refused(capsys, f"method.path={trimmed}", "method.left_out=4")
    assert said == "hpcfl: error: method: left_out must be 3 or less"


def test_code_without_a_file_is_an_unknown_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert "method.code=abc is an unknown key" in refused(capsys, "method.name=fedavg", "method.code=abc")
