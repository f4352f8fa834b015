"""A stranger's run folder, by what is typed to look at it."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from pathlib import Path

import numpy as np
import yaml
from mutations import NUMBERS, Read, damaged_bytes
from test_hostile_checkpoint import hostile_checkpoint, make_run
from test_hostile_yaml import hostile_yaml

from hpcfl.errors import UserError
from hpcfl.main import BAD_INPUT, FINISHED, main

TABLES = ("metrics.csv", "clients.csv", "bytes.csv", "partition.csv")
CELLS = (
    "",
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e308",
    "0.5",
    "1_0",
    " 1",
    "\u0661",
    "a",
    '"',
    "\x1b[2J",
    "1" * 400,
)


def hostile_table(whole: bytes, draw: random.Random) -> bytes:
    """Return a CSV file with other bytes, cells, columns or rows."""
    if draw.random() < 0.4:
        return damaged_bytes(whole, draw)
    rows = [line.split(",") for line in whole.decode().splitlines()]
    for _ in range(draw.choice((1, 1, 2))):
        row, kind = draw.randrange(len(rows)), draw.randrange(5)
        at = draw.randrange(len(rows[0]))
        if kind <= 1 and at < len(rows[row]):
            rows[row][at] = draw.choice((*CELLS, str(draw.choice(NUMBERS))))
        elif kind == 2:
            for one in rows:
                del one[at : at + 1]
        elif kind == 3:
            rows.insert(row, list(draw.choice(rows)))
        elif len(rows) > 1:
            del rows[row]
    return "".join(",".join(row) + "\n" for row in rows).encode()


def run_folder_reader(folder: Path) -> Read:
    good = make_run(folder / "made")
    np.savez(folder / "images.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    hostile = folder / "hostile"
    record = yaml.safe_load((good / "config.yaml").read_text())
    commands = (
        ["watch", "--once", str(hostile)],
        ["report", str(hostile), "--out", str(folder / "page.html")],
        ["report", str(hostile), str(good), "--out", str(folder / "page.html")],
        ["compare", str(hostile), str(good)],
        ["export", str(hostile), "--client", "0", "--out", str(folder / "out")],
        [
            "predict",
            str(hostile),
            str(folder / "images.npz"),
            "--client",
            "1",
            "--out",
            str(folder / "p.csv"),
        ],
    )

    def read(seed: int) -> object:
        draw = random.Random(seed)
        shutil.rmtree(hostile, ignore_errors=True)
        shutil.copytree(good, hostile)
        kind, name = draw.randrange(8), draw.choice(TABLES)
        if kind <= 3:
            (hostile / name).write_bytes(hostile_table((good / name).read_bytes(), draw))
        elif kind == 4:
            (hostile / "config.yaml").write_bytes(hostile_yaml(record, draw))
        elif kind == 5:
            (hostile / "log.txt").write_bytes(damaged_bytes((good / "log.txt").read_bytes(), draw))
        elif kind == 6:
            hostile_checkpoint((good / "checkpoint.h5").read_bytes(), draw, hostile / "checkpoint.h5")
        else:
            what = draw.choice((*TABLES, "config.yaml", "log.txt", "checkpoint.h5", ".lock"))
            (hostile / what).unlink()
            draw.choice((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: None))(
                hostile / what
            )
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main(draw.choice(commands))
        if code == BAD_INPUT:
            *_, line = said.getvalue().splitlines()
            assert line.startswith("hpcfl: error: ")
            assert line.isprintable()
            raise UserError(line)
        assert code == FINISHED
        return code

    return read
