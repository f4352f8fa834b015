"""What `hpcfl doctor` finds, on one rank and on several, with real faults; it leaves no file behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
from bits import refused, write_digits
from processes import Mpirun

from hpcfl.checks.nodes import check_same_versions
from hpcfl.checks.ranks import check_cores, check_devices, ranges, rank_table
from hpcfl.communication.communicator import Communicator
from hpcfl.errors import BAD_INPUT, FINISHED, UserError
from hpcfl.main import main

SECTIONS = ("versions: ", "ranks  host ", "folder: ")


def test_one_rank_has_no_fault_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--out", str(tmp_path / "runs" / "deep"), "data.per_client=40"]) == FINISHED
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    for section in (*SECTIONS, "data: digits: 1797 samples of 10 classes for 10 clients"):
        assert sum(line.startswith(section) for line in lines) == 1, section
    assert re.search(r"^versions: hpcfl \S+, python 3\.\S+, torch \S+, .*, MPI not used by one rank\n", out)
    assert re.search(r"\nfolder: .*/deep: [\d.]+ [GT]B free, written at [\d.]+ [kMG]B/s\n", out)
    assert lines[-1] == "OK"
    assert list(tmp_path.iterdir()) == []


RANKS_PROGRAM = """
import json, os, sys
from hpcfl.communication.communicator import open_world
from hpcfl.main import main
folder, faults = sys.argv[1:]
words = ["doctor", "--out", folder, "data.source=npz", "data.path=digits.npz", "data.layout=NHWC"]
rank = open_world().rank
codes = [main(words)]
print("AGAIN", flush=True)
# faults of one rank only
if rank == 2:
    os.chdir(folder)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
codes.append(main(words))
if rank == 2:
    os.chdir(f"{faults}/other")
codes.append(main(words))
with open(f"{faults}/codes{rank}.json", "w") as file:
    json.dump(codes, file)
"""


def test_the_doctor_names_faults_of_one_of_three_ranks(mpirun: Mpirun, tmp_path: Path) -> None:
    write_digits(tmp_path / "digits.npz")
    runs, faults = tmp_path / "runs", tmp_path / "faults"
    runs.mkdir()
    (faults / "other").mkdir(parents=True)
    with np.load(tmp_path / "digits.npz") as digits:
        np.savez(faults / "other" / "digits.npz", **{**digits, "x": digits["x"][::-1]})
    done = mpirun(3, "-c", RANKS_PROGRAM, runs, faults, cwd=tmp_path)
    assert list(runs.iterdir()) == []
    codes = [json.loads((faults / f"codes{rank}.json").read_text()) for rank in range(3)]
    assert codes == [[FINISHED, BAD_INPUT, BAD_INPUT]] * 3
    fine = re.split(r"^(?:AGAIN\n)+", done.stdout, maxsplit=1, flags=re.MULTILINE)[0]
    for section in (*SECTIONS, "data: npz: 1797 samples", "messages: "):
        assert sum(line.startswith(section) for line in fine.splitlines()) == 1, section
    assert re.search(r"^0-2 +\S+ +cpu +[\d,-]+ of \d+$", fine, re.MULTILINE)
    messages = r"^messages: [\d.]+ m?s for a short one; [\d.]+ [MG]B/s between rank 0 and its node$"
    assert re.search(messages, fine, re.MULTILINE)
    assert fine.splitlines()[-1] == "OK"
    pinned, line, other = done.stderr.splitlines()
    cores = f"take turns on 1 of {os.cpu_count()} cores: ask SLURM for --cpus-per-task=1, "
    assert f": 2 worker(s) with run.threads=1 {cores}" in pinned
    assert line.startswith("hpcfl: error: to fix: (1) ")
    assert "data.path=digits.npz: no such file" in line
    assert "(1) rank 2 has read other data than rank 0: copy the same files to every" in other


def test_the_doctor_names_an_impossible_folder_and_missing_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = tmp_path / (300 * "x")
    # where root cannot write either
    for out, reason in ((Path("/sys/runs"), ""), (too_long, "File name too long; ")):
        words = ("--out", out, "data.source=npz", "data.path=missing.npz", "data.layout=NHWC")
        err = refused(capsys, "doctor", *words)
        assert err.startswith(f"hpcfl: error: to fix: (1) cannot write in {out}: {reason}")
        assert "; name a folder that can be written with --out DIR (2) data.path=missing.npz: no such" in err
    expected = f"hpcfl: error: {too_long}: File name too long; name another folder with --out DIR"
    assert refused(capsys, "--out", too_long) == expected


def test_the_doctor_warns_of_a_file_system_without_locks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    assert main(["doctor", "--out", str(tmp_path)]) == FINISHED
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "OK"
    where = f"{tmp_path}: file locks do not work for rank 0 on {socket.gethostname()}"
    assert err.startswith(f"hpcfl: warning: {where}, so that a second run in a folder may not be refused: ")
    assert list(tmp_path.iterdir()) == []


# Other machines, by the facts of their ranks


def rank(number: int, **changes: object) -> dict[str, object]:
    common = {"rank": number, "host": f"node{number // 4}", "node": number // 4, "is_worker": number > 0}
    return common | {"device": "cpu", "cores": [0, 1], "node_cores": 2} | changes


def test_the_doctor_names_rank_and_host_of_different_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    world, versions = Communicator(), {"torch": "2.6", "MPI": "MPICH 4.3"}
    others = [["node0", versions], ["node1", {"torch": "2.5", "MPI": "Open MPI 5"}]]
    monkeypatch.setattr(world, "all_gather", lambda own: [own, *others])
    with pytest.raises(UserError) as raised:
        check_same_versions(world, versions)
    assert str(raised.value) == (
        "rank 2 on node1 has torch 2.5 (rank 0: 2.6), MPI Open MPI 5 (rank 0: MPICH 4.3): activate the same "
        "environment on every node"
    )


def test_equal_ranks_share_a_row() -> None:
    others = [rank(2, device="cuda:0"), rank(3), rank(4, cores=[0, 2, 3], node_cores=8)]
    assert rank_table([rank(0), rank(1), *others])[1:] == [
        ["0-1,3", "node0", "cpu", "0-1 of 2"],
        ["2", "node0", "cuda:0", "0-1 of 2"],
        ["4", "node1", "cpu", "0,2-3 of 8"],
    ]
    assert ranges([3, 0, 1, 2, 7]) == "0-3,7"


def test_the_doctor_warns_of_more_threads_than_cores(caplog: pytest.LogCaptureFixture) -> None:
    check_cores([rank(number) for number in range(3)], 1)
    assert caplog.messages == []
    check_cores([rank(number) for number in range(4)], 1)
    # each is bound to a core of its own, and wants two
    check_cores([rank(number, cores=[number], node_cores=8) for number in range(2)], 2)
    assert caplog.messages == [
        "node0: 3 worker(s) with run.threads=1 take turns on 2 of 2 cores: ask SLURM for --cpus-per-task=1, "
        "type mpirun --bind-to none, or start fewer ranks",
        "node0: 1 worker(s) with run.threads=2 take turns on 1 of 8 cores: ask SLURM for --cpus-per-task=2, "
        "type mpirun --bind-to none, or start fewer ranks",
    ]


def test_the_doctor_names_a_worker_without_a_gpu() -> None:
    without = "rank 4 on node1 sees no GPU: ask SLURM for --gpus-per-node on every node, "
    with pytest.raises(UserError, match=without):
        check_devices([rank(0), rank(1, device="cuda:0"), rank(4)], needs_gpu=False)
    with pytest.raises(UserError, match=without):
        check_devices([rank(0), rank(4)], needs_gpu=True)
    check_devices([rank(0), rank(1)], needs_gpu=False)
    check_devices([rank(0), rank(1, device="cuda:0"), rank(4, device="cuda:0")], needs_gpu=True)
