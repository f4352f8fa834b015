"""What a run records of its SLURM job, and reports to its script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.storage.slurm import job, write_job_note

TINY = ["data.clients=4", "data.per_client=20", "train.local_epochs=1", "train.rounds=2", "--quiet"]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*filter(lambda name: name.startswith(("SLURM_", "HPCFL_")), os.environ)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_NAME": "sh"}, None),
        ({"SLURM_JOB_ID": "17"}, "job 17, start 1"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[3-4]"}, "job 17, start 1, on node[3-4]"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "t", "SLURM_RESTART_COUNT": "2"}, "t 17, start 3"),
        (
            {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "2"},
            "job 18 (16_2), start 1",
        ),
    ],
)
def test_a_job_has_a_name_an_id_and_starts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job() == expected


def test_the_run_folder_names_the_job_and_saved_rounds_are_noted_for_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, alone, notes = (tmp_path / name for name in ("run", "alone", "notes"))
    assert main([*TINY, "--out", str(alone)]) == FINISHED
    notes.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("HPCFL_JOB_NOTES", str(notes))
    assert main([*TINY, "--out", str(folder)]) == FINISHED
    assert " SLURM job train 17, start 1\n" in (folder / "log.txt").read_text()
    assert yaml.safe_load((folder / "config.yaml").read_text())["environment"]["job"] == "train 17, start 1"
    assert (notes / "saved").read_text() == f"{folder} 2\n"
    assert (notes / "ready").exists()
    # notes that cannot be written do not end a run
    monkeypatch.setenv("HPCFL_JOB_NOTES", str(tmp_path / "gone"))
    write_job_note("saved", "runs/a 3")
    assert not (tmp_path / "gone").exists()
    assert "job" not in yaml.safe_load((alone / "config.yaml").read_text())["environment"]
    assert "SLURM" not in (alone / "log.txt").read_text()
