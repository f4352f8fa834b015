"""Job scripts without a SLURM: simulated programs and a launcher do what a real cluster seldom does.

The launcher ends as hpcfl would, and the programs of SLURM refuse to answer; tests/cluster/test_jobs.py has
the real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment

from hpcfl.errors import BAD_INPUT, DIVERGED, FINISHED, OUT_OF_MEMORY, STOPPED, STORAGE_ERROR

LAUNCHER = """#!/usr/bin/env bash
# Each start takes a line of `ends`: an exit code and, if they are there, the last cell and the saved rounds.
echo "$@" >>starts
echo "${SLURM_JOB_END_TIME:-}" >end-time
read -r code cell saved < <(sed -n "$(wc -l <starts)p" ends)
: >"$HPCFL_JOB_NOTES/ready"
if [ -n "$cell" ]; then echo "${cell#-}" >"$HPCFL_JOB_NOTES/cell"; fi
if [ -n "$saved" ]; then echo "$saved" >"$HPCFL_JOB_NOTES/saved"; fi
exit "$code"
"""
ANSWERS = """#!/usr/bin/env bash
# The first calls fail, as many as in the file `away`; the last word of a question chooses the answer.
program=${0##*/}
echo "$program $*" >>calls
if [ "$(wc -l <calls)" -le "$(cat away)" ]; then echo "$program: no controller" >&2; exit 1; fi
case "$program $*" in
    "srun --mpi=list") echo pmi2 pmix ;;
    "srun "*mpi=*) shift 3; exec launcher "$@" ;;
    *"--format=%T") echo RUNNING ;;
    *"--format=%e") echo 2030-01-02T03:04:05 ;;
esac
"""


@dataclass
class Ended:
    code: int
    printed: str
    starts: list[str]
    """What was launched, a line each."""
    calls: list[str]
    """What SLURM's programs were asked."""
    end_time: str
    """The end of the job that the last start received."""


@pytest.fixture
def submit(tmp_path: Path) -> Path:
    """Return a folder to submit from, with programs of its own in front of all others."""
    (tmp_path / "jobs").symlink_to(REPOSITORY / "jobs")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("squeue", "scontrol", "srun"):
        write_program(tmp_path, name, ANSWERS)
    # nothing here needs the time that the scripts give others
    write_program(tmp_path, "sleep", "#!/bin/sh\nexec /bin/sleep 0.01\n")
    write_program(tmp_path, "launcher", LAUNCHER)
    return tmp_path


def write_program(folder: Path, name: str, text: str) -> None:
    path = folder / ".venv" / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def job(
    folder: Path, script: str, ends: Sequence[str], away: int = 0, env: Mapping[str, str] | None = None
) -> Ended:
    """Run a job script as SLURM does, with launches that end so."""
    for name in ("starts", "calls", "end-time"):
        (folder / name).write_text("")
    (folder / "ends").write_text("".join(f"{end}\n" for end in ends))
    (folder / "away").write_text(f"{away}\n")
    known = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder), "LAUNCHER": "launcher"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / "jobs" / script), "WORD"],
        cwd=folder,
        env={**clean_environment(), **known, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    starts, calls = ((folder / name).read_text().splitlines() for name in ("starts", "calls"))
    end_time = (folder / "end-time").read_text().strip()
    return Ended(done.returncode, done.stdout + done.stderr, starts, calls, end_time)


def notes(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / ".jobs").iterdir())


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        # all cells have had their turn, some of which diverged
        ([f"{DIVERGED} last"], DIVERGED),
        ([f"{BAD_INPUT}"], BAD_INPUT),
        # the other cells find no room either
        ([f"{STORAGE_ERROR} first"], STORAGE_ERROR),
        # the first cell has no memory, the others have, and it has none again
        ([f"{OUT_OF_MEMORY} first", f"{OUT_OF_MEMORY} first"], OUT_OF_MEMORY),
        # a run on one rank continues with the other cells by itself
        ([f"{OUT_OF_MEMORY} -"], OUT_OF_MEMORY),
        (["137 first", "1 second", "1 second"], 1),
        (["137 first", f"{FINISHED} -"], FINISHED),
    ],
)
def test_other_cells_are_run_only_after_a_fault(submit: Path, ends: list[str], code: int) -> None:
    # one more start than there should be
    done = job(submit, "table.sbatch", [*ends, "99 another"])
    assert done.code == code, done.printed
    assert done.starts == ["python -m hpcfl.main table WORD"] * len(ends)
    continuing = f"a fault (exit code {ends[0].split()[0]}); continuing with the other cells"
    assert (continuing in done.printed) == (len(ends) > 1)


def array(first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    known = {"ID": last, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in known.items()}


@pytest.mark.parametrize(
    ("env", "part"),
    [
        (array(1, 4, 4), "4/4"),
        (array(3, 3, 1), "1/1"),
        (array(1, 7, 4, 2), "4/4"),
        ({**array(2, 5, 2), "PARTS": "6"}, "5/6"),
    ],
)
def test_a_task_of_an_array_runs_its_part(submit: Path, env: dict[str, str], part: str) -> None:
    done = job(submit, "table.sbatch", [f"{FINISHED} -"], env=env)
    assert done.code == FINISHED, done.printed
    assert done.starts == [f"python -m hpcfl.main table WORD --part {part}"]


@pytest.mark.parametrize("env", [array(2, 5, 2), array(2, 7, 3)])
def test_an_array_with_gaps_is_refused(submit: Path, env: dict[str, str]) -> None:
    done = job(submit, "table.sbatch", [f"{FINISHED} -"], env=env)
    assert (done.code, done.starts) == (BAD_INPUT, [])
    assert f"--array=1-{env['SLURM_ARRAY_TASK_COUNT']}, which divides all that is left, or, " in done.printed
    assert "PARTS=N" in done.printed
    assert notes(submit) == []


def test_a_job_is_requeued_although_the_controller_is_away_for_a_while(submit: Path) -> None:
    done = job(submit, "train.sbatch", [f"{STOPPED} - 3"], away=4)
    assert done.code == 0, done.printed
    assert done.calls[-1] == "scontrol requeue 7"
    assert notes(submit) == ["7"]
    # 2030-01-02 03:04:05 on this machine's clock
    assert done.end_time == str(int(time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1))))


def test_without_an_answer_a_job_has_no_end_time_and_is_not_requeued(submit: Path) -> None:
    done = job(submit, "train.sbatch", [f"{STOPPED} - 3"], away=99)
    assert (done.code, done.end_time) == (STOPPED, "")
    assert "not requeued; submit the command again, without --fresh, to resume" in done.printed
    assert notes(submit) == ["7"]


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (f"{FINISHED} - 3", []),
        # a fault, a full disk: the job may be started again, and is to know what was saved
        ("137 - 3", ["7"]),
        (f"{STORAGE_ERROR} - 3", ["7"]),
        (f"{BAD_INPUT}", []),
    ],
)
def test_notes_of_finished_jobs_are_deleted(submit: Path, end: str, left: list[str]) -> None:
    day_s = 24 * 3600
    for name, days in (("5", 62), ("6", 58)):
        folder = submit / "runs" / ".jobs" / name
        folder.mkdir(parents=True)
        (folder / "saved").touch()
        os.utime(folder, (time.time() - days * day_s, time.time() - days * day_s))
    job(submit, "train.sbatch", [end])
    assert notes(submit) == sorted(["6", *left])


def test_a_job_that_starts_again_after_months_keeps_its_notes(submit: Path) -> None:
    job(submit, "train.sbatch", [f"{STOPPED} - 3"])
    os.utime(submit / "runs" / ".jobs" / "7", (0, 0))
    done = job(submit, "train.sbatch", ["137"], env={"SLURM_RESTART_COUNT": "1"})
    assert done.starts, done.printed
    assert (submit / "runs" / ".jobs" / "7" / "saved").read_text() == "3\n"


def test_a_job_that_cannot_keep_notes_starts_nothing(submit: Path) -> None:
    """Else a requeued job with --fresh would not know that it has saved a round, and start over."""
    of_job = submit / "runs" / ".jobs" / "7"
    (of_job / "saved_before").mkdir(parents=True)
    done = job(submit, "train.sbatch", [f"{FINISHED}"])
    assert (done.code, done.starts) == (STORAGE_ERROR, [])
    assert "runs/.jobs/7; free space, and submit the command again\n" in done.printed
    (of_job / "saved").write_text("3\n")
    done = job(submit, "train.sbatch", [f"{FINISHED}"], env={"SLURM_RESTART_COUNT": "1"})
    assert (done.code, done.starts) == (STORAGE_ERROR, [])
    assert "free space, and submit the command again, without --fresh, to resume\n" in done.printed
    shutil.rmtree(of_job.parent)
    of_job.parent.touch()
    done = job(submit, "train.sbatch", [f"{FINISHED}"])
    assert (done.code, done.starts) == (STORAGE_ERROR, [])
    assert "cannot write" in done.printed


@pytest.mark.parametrize(
    ("library", "listed", "wanted"),
    [
        ("Open MPI v4.1.4", "none pmi2 pmix", "pmix"),
        ("Open MPI v4.1.4", "none pmi2", None),
        ("MPICH Version: 5.0.2 MPICH configure: --with-pm=hydra", "none pmix pmi2", "pmi2"),
        ("MPICH Version: 5.0.2 MPICH configure: --with-pm=hydra", "none pmix", None),
        ("MPICH Version: 5.0.2 MPICH configure: --with-pmix=/usr", "none pmix", "pmix"),
        ("MVAPICH2 Version: 2.3.7", "none pmi2", "pmi2"),
    ],
)
def test_srun_is_given_the_type_that_fits_the_mpi_or_is_refused(
    submit: Path, library: str, listed: str, wanted: str | None
) -> None:
    write_program(submit, "python", f'#!/bin/sh\necho "{library}"\n')
    write_program(submit, "srun", ANSWERS.replace("echo pmi2 pmix", f"echo {listed}"))
    done = job(submit, "train.sbatch", [f"{FINISHED}"], env={"LAUNCHER": "srun"})
    if wanted is None:
        assert (done.code, done.starts) == (BAD_INPUT, [])
        assert "srun knows none of the --mpi types that join the ranks of this MPI (p" in done.printed
    else:
        assert done.code == FINISHED, done.printed
        assert f"srun --mpi={wanted} " in done.printed


def test_only_numbers_of_killed_steps_are_skipped(submit: Path) -> None:
    """Their numbers alone may have left shared memory behind."""
    passed_over = []
    for start, code in enumerate((STOPPED, STOPPED, 137, STOPPED, 137, STOPPED)):
        env = {"LAUNCHER": "srun", "SLURM_RESTART_COUNT": str(start)}
        done = job(submit, "train.sbatch", [f"{code} - {start}"], env=env)
        assert done.starts, done.printed
        passed_over.append(sum(call.endswith(" true") for call in done.calls))
    assert passed_over == [0, 0, 0, 1, 1, 2]
