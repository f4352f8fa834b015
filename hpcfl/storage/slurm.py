"""The SLURM job that a run is part of: its description, and notes for its script."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hpcfl.storage.atomic import replace_file

NOTES_VARIABLE = "HPCFL_JOB_NOTES"
"""Names the folder in which a job script reads how far its runs have come."""


def job() -> str | None:
    """Return the job's name and id, how often it has started, and its nodes; None outside of SLURM.

    `train 17, start 2, on node[3-4]`; a task of an array has its place, as in `table 18 (16_2), start 1`.
    """
    number = os.environ.get("SLURM_JOB_ID")
    if not number:
        return None
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    place = f" ({array}_{task})" if array and task else ""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    start = int(restarts) + 1 if restarts.isdecimal() else 1
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    where = f", on {nodes}" if nodes else ""
    return f"{os.environ.get('SLURM_JOB_NAME', 'job')} {number}{place}, start {start}{where}"


def write_job_note(name: str, text: str) -> None:
    """Replace a note to the job script, if the script has set NOTES_VARIABLE.

    `ready`: a signal now stops the run and does not kill it. `saved`: folder and rounds of the newest
    checkpoint. `cell`: folder of the table's cell that began last; empty after the last cell.
    """
    notes = os.environ.get(NOTES_VARIABLE)
    if notes:
        # a run does not end because of a note
        with suppress(OSError):
            replace_file(Path(notes) / name, f"{text}\n")
