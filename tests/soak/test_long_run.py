"""A run of 2,500 rounds with 100 clients: what grows with its rounds, and what 20 pre-emptions change.

With HPCFL_SOAK_RESULTS=DIR what was measured goes to DIR/long_run.csv, DIR/long_run_sizes.csv and
DIR/long_run_preemptions.csv:

    HPCFL_SOAK_RESULTS=configs/tables/results bash jobs/test.sh -m soak tests/soak/test_long_run.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import yaml
from bits import completed_rounds, differing, write_csv, write_digits
from processes import REPOSITORY, Launch

from hpcfl.errors import BAD_INPUT, FINISHED, STOPPED
from hpcfl.main import main
from hpcfl.registries import load_config
from hpcfl.results.run import load_run
from hpcfl.storage.ledger import METRICS, PENDING
from hpcfl.tables.cells import Table

pytestmark = pytest.mark.soak

CLIENTS, ROUNDS, EVAL_EVERY, CHECKPOINT_EVERY = 100, 2500, 10, 25
PREEMPTIONS = 20
RANKS = (3, 1, 5, 2)
"""Of the starts of the pre-empted run, in turn; the uninterrupted one has the first number."""
PATIENCE_S = 900
LOOK_EVERY_S = 0.1
WINDOW = 500
"""Rounds whose times and looks become a row of long_run.csv."""
MIB = 2**20

SETTINGS = [
    "method.name=heurpfedla",
    *("method.embedding=10", "method.hidden=10", "method.hidden_layers=1"),
    *("data.source=npz", "data.layout=NHWC", f"data.clients={CLIENTS}", "data.per_client=16"),
    "data.partition.classes_per_client=2",
    *("model.name=mlp", "model.hidden=[8]"),
    *(f"train.rounds={ROUNDS}", "train.participation=0.05", "train.local_epochs=1", "train.batch_size=12"),
    *(f"run.eval_every={EVAL_EVERY}", f"run.checkpoint_every={CHECKPOINT_EVERY}", "run.device=cpu"),
]
"""Models and hypernetworks of all clients on the server, layers of their own on the clients, five clients a
round."""


@dataclass(frozen=True)
class Look:
    """What one rank was seen to have, after so many rounds."""

    round: int
    rank: int
    rss_mib: float
    """All memory, pages of libraries included, which the kernel frees if memory is short."""
    anonymous_mib: float
    """Memory without a file behind it: what the process has allocated."""
    highest_rss_mib: float
    open_files: int
    cpu_s: float
    """Seconds that it has computed."""


class Observed(Launch):
    """A start of a run under mpirun, and what was observed of its ranks meanwhile."""

    def __init__(self, command: Sequence[str], ranks: int, folder: Path) -> None:
        super().__init__([*command, "--out", str(folder)], folder)
        self.num_ranks = ranks
        self._ranks: dict[int, psutil.Process] = {}
        self.looks: list[Look] = []

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks that have started."""
        if len(self._ranks) < self.num_ranks:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    environment = process.environ()
                    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
                        if name in environment:
                            self._ranks[int(environment[name])] = process
        return self._ranks

    def done(self) -> int:
        """Return the round of the newest evaluation, 0 before one is known."""
        return max(0, self.rows()) * EVAL_EVERY

    def observe(self, until: Callable[[], bool] = lambda: False) -> None:
        """Look at the ranks until something holds or mpirun ends."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and not until():
            assert time.monotonic() < deadline_s, f"round {self.done()}"
            done = self.done()
            for rank, process in self.ranks().items():
                # one that has ended has no figures
                with suppress(psutil.Error, OSError, KeyError):
                    self.looks.append(_look(done, rank, process))
            time.sleep(LOOK_EVERY_S)

    def end(self) -> str:
        """Wait for the end of all, and return what was printed; ranks that outlive mpirun are killed."""
        self.observe()
        _, alive = psutil.wait_procs(self._ranks.values(), timeout=20)
        for process in alive:
            process.kill()
        return super().end()


def _look(done: int, rank: int, process: psutil.Process) -> Look:
    """Look at a rank; KeyError where it has ended and has no memory any more."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    mib = {words[0]: int(words[1]) / 1024 for line in lines if (words := line.split())[-1:] == ["kB"]}
    times = process.cpu_times()
    return Look(
        done,
        rank,
        mib["VmRSS:"],
        mib["RssAnon:"],
        mib["VmHWM:"],
        process.num_fds(),
        times.user + times.system,
    )


@dataclass(frozen=True)
class LongRun:
    """The uninterrupted run."""

    folder: Path
    looks: list[Look]

    def of(self, rank: int, first: int, last: int) -> list[Look]:
        """Return the looks at a rank between two rounds, without those after the last round."""
        looks = [look for look in self.looks if look.rank == rank and look.round < ROUNDS]
        return [look for look in looks if first < look.round <= last]

    def times(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Return the milliseconds of rounds, evaluations and checkpoints between two rounds.

        Each entry is the mean over some rounds in which there are as many of each.
        """
        metrics = load_run(self.folder).metrics
        step = np.lcm(EVAL_EVERY, CHECKPOINT_EVERY)
        rounds = metrics["round"]
        kept = (rounds % step == 0) & (first <= rounds) & (rounds <= last)
        passed = {name: 1000 * np.diff(metrics[name][kept]) for name in ("wall_s", "evaluate_s", "save_s")}
        return {
            "round": (passed["wall_s"] - passed["evaluate_s"] - passed["save_s"]) / step,
            "evaluation": passed["evaluate_s"] / (step // EVAL_EVERY),
            "checkpoint": passed["save_s"] / (step // CHECKPOINT_EVERY),
        }


Start = Callable[[int, str], Observed]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def start(base: Path, mpirun_command: list[str]) -> Start:
    """Return a function that starts or resumes the run in a folder of a name."""
    write_digits(base / "digits.npz")
    python = [sys.executable, "-m", "hpcfl.main", "--quiet", *SETTINGS, f"data.path={base / 'digits.npz'}"]

    def started(ranks: int, name: str) -> Observed:
        return Observed([*mpirun_command, "-n", str(ranks), *python], ranks, base / name)

    return started


@pytest.fixture(scope="module")
def uninterrupted(base: Path, start: Start) -> LongRun:
    """Run from the first round to the last."""
    with start(RANKS[0], "uninterrupted") as launch:
        printed = launch.end()
        assert launch.process.returncode == FINISHED, printed
    return LongRun(base / "uninterrupted", launch.looks)


def keep(name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write what was measured to the folder HPCFL_SOAK_RESULTS."""
    folder = os.environ.get("HPCFL_SOAK_RESULTS")
    if folder:
        write_csv(REPOSITORY / folder / f"{name}.csv", rows)


def test_memory_open_files_and_times_do_not_grow(uninterrupted: LongRun) -> None:
    """Medians of the last third of the rounds against those of the first.

    Rank 0 has the ledger, some 2.5 MB at the end. What else the machine does shows less in seconds of
    computing than in those that pass, of which evaluations and checkpoints are measured in rounds.
    """
    keep("long_run", list(windows(uninterrupted)))
    thirds = ((0, ROUNDS // 3), (ROUNDS - ROUNDS // 3, ROUNDS))
    for rank in range(RANKS[0]):
        first, last = (uninterrupted.of(rank, *third) for third in thirds)
        mib = [float(np.median([look.anonymous_mib for look in looks])) for looks in (first, last)]
        assert mib[1] - mib[0] < (5 if rank == 0 else 1)
        assert last[-1].highest_rss_mib - first[-1].highest_rss_mib < (5 if rank == 0 else 1)
        assert max(look.open_files for look in last) <= max(look.open_files for look in first)
        assert cpu_ms(last) < 1.5 * cpu_ms(first)
    for name in ("evaluation", "checkpoint"):
        in_rounds = [
            float(np.median(times[name]) / np.median(times["round"]))
            for times in (uninterrupted.times(*third) for third in thirds)
        ]
        assert in_rounds[1] < 1.6 * in_rounds[0]


def windows(run: LongRun) -> Iterator[dict[str, object]]:
    """Yield what a rank had and took, window by window."""
    for first in range(0, ROUNDS, WINDOW):
        times = run.times(first, first + WINDOW)
        for rank in range(RANKS[0]):
            looks = run.of(rank, first, first + WINDOW)
            yield {
                "round": first + WINDOW,
                "rank": rank,
                "rss_mib": f"{np.median([look.rss_mib for look in looks]):.1f}",
                "anonymous_mib": f"{np.median([look.anonymous_mib for look in looks]):.1f}",
                "highest_rss_mib": f"{looks[-1].highest_rss_mib:.1f}",
                "open_files": max(look.open_files for look in looks),
                "cpu_ms_a_round": f"{cpu_ms(looks):.1f}",
                **{f"{name}_ms": f"{np.median(values):.1f}" for name, values in times.items()},
            }


def cpu_ms(looks: Sequence[Look]) -> float:
    """Return the milliseconds that a rank computed in a round."""
    return 1000 * (looks[-1].cpu_s - looks[0].cpu_s) / max(1, looks[-1].round - looks[0].round)


def test_sizes_of_files_follow_from_rounds_and_clients(uninterrupted: LongRun) -> None:
    evaluations = ROUNDS // EVAL_EVERY
    size = {path.name: path.stat().st_size for path in uninterrupted.folder.iterdir()}
    with h5py.File(uninterrupted.folder / "checkpoint.h5", locking=False) as file:
        history = sum(data.nbytes for data in file["history"].values())
        ledger = sum(data.nbytes for data in file["ledger"].values())
        labels = (file["ledger/bytes"].shape[1] - 1) // 2
        layers = file["history/self_weight"].shape[2]
        state = sum(
            data.nbytes for name in ("server", "clients", "personalised") for data in leaves(file[name])
        )
    # four figures of a client, and the method's float32 and int64 of each layer
    assert history == evaluations * CLIENTS * (4 * 8 + layers * (4 + 8))
    of_rounds, of_evaluations = ROUNDS * (1 + 2 * labels) * 8, evaluations * len(METRICS) * 8
    # by client the bytes down and up and the rounds in which it diverged
    assert ledger == of_rounds + of_evaluations + CLIENTS * 3 * 8 + len(PENDING) * 8
    assert size["checkpoint.h5"] - history - ledger < 1.1 * state + MIB / 2
    assert size["metrics.csv"] < 250 * (evaluations + 1)
    assert size["bytes.csv"] < ROUNDS * 2 * labels * 30
    assert size["clients.csv"] < 70 * (CLIENTS + 1)
    assert size["partition.csv"] < 30 * (CLIENTS * 2 + 1)
    assert size["log.txt"] < 100 * (PATIENCE_S / 30 + 10)
    assert size["report.html"] < 500_000
    keep("long_run_sizes", [{"file": name, "bytes": size[name]} for name in sorted(size)])


def leaves(group: h5py.Group) -> Iterator[h5py.Dataset]:
    """Yield the datasets of a group and of the groups in it."""
    for item in group.values():
        yield from leaves(item) if isinstance(item, h5py.Group) else [item]


# Pre-emptions


@dataclass(frozen=True)
class Preemption:
    """What ends a start, and when: once the run has evaluated after `round` rounds, and a moment later."""

    kind: str
    round: int
    pause_s: float


STOPS = ("stop by SIGUSR1", "stop by the launcher's other signal")
AS_IT_STARTS = "kill a rank as it starts"
KILLS = ("kill a rank", "kill mpirun", AS_IT_STARTS)


def preemptions(chance: random.Random) -> list[Preemption]:
    """Draw what happens, in the order of the rounds."""
    kinds = [*STOPS * 4, *KILLS * 4]
    chance.shuffle(kinds)
    rounds = sorted(chance.sample(range(EVAL_EVERY, ROUNDS - 2 * CHECKPOINT_EVERY), PREEMPTIONS))
    return [Preemption(*drawn, chance.uniform(0, 0.3)) for drawn in zip(kinds, rounds, strict=True)]


def preempt(launch: Observed, preemption: Preemption, chance: random.Random) -> str:
    """Do it, and return what was printed."""
    if preemption.kind == AS_IT_STARTS:
        launch.observe(lambda: len(launch.ranks()) == launch.num_ranks)
        time.sleep(10 * preemption.pause_s)
    else:
        launch.observe(lambda: launch.done() >= preemption.round)
        time.sleep(preemption.pause_s)
    assert launch.process.poll() is None, launch.end()
    is_openmpi = "--oversubscribe" in Path(f"/proc/{launch.process.pid}/cmdline").read_text()
    if preemption.kind == "kill mpirun":
        launch.process.kill()
    elif preemption.kind in KILLS:
        chance.choice(sorted(launch.ranks().items()))[1].kill()
    elif preemption.kind == STOPS[0]:
        launch.process.send_signal(signal.SIGUSR1)
    else:
        # Open MPI's mpirun kills the ranks at SIGTERM, MPICH's dies of SIGUSR2
        launch.process.send_signal(signal.SIGUSR2 if is_openmpi else signal.SIGTERM)
    return launch.end()


def test_a_run_preempted_20_times_on_changing_numbers_of_ranks_has_the_same_bits(
    uninterrupted: LongRun, base: Path, start: Start
) -> None:
    chance = random.Random(0)
    saved, rows = 0, []
    for number, preemption in enumerate(preemptions(chance)):
        ranks = RANKS[number % len(RANKS)]
        with start(ranks, "preempted") as launch:
            printed = preempt(launch, preemption, chance)
        exit_code = launch.process.returncode
        before, saved = saved, completed_rounds(base / "preempted")
        if preemption.kind in STOPS:
            assert exit_code == STOPPED, printed
            assert saved >= preemption.round
        else:
            assert exit_code not in (FINISHED, BAD_INPUT, STOPPED), printed
            assert saved >= before
        waited_for = preemption.round if preemption.kind != AS_IT_STARTS else ""
        row = {"what": preemption.kind, "ranks": ranks, "after_round": waited_for}
        rows.append({**row, "exit_code": exit_code, "goes_on_at_round": saved})
    with start(RANKS[1], "preempted") as launch:
        printed = launch.end()
        assert launch.process.returncode == FINISHED, printed
    keep("long_run_preemptions", rows)
    assert not differing(uninterrupted.folder, base / "preempted")


# What reads such a run


def test_watch_report_and_table_show_a_long_run(
    uninterrupted: LongRun, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.process_time()
    assert main(["watch", str(uninterrupted.folder), "--once"]) == FINISHED
    assert f"{ROUNDS}/{ROUNDS}" in capsys.readouterr().out
    assert main(["report", str(uninterrupted.folder), "--out", str(tmp_path / "page.html")]) == FINISHED
    assert (tmp_path / "page.html").stat().st_size < 500_000
    tree = load_config(None, [*SETTINGS, f"data.path={base / 'digits.npz'}"]).tree()
    del tree["run"]["seed"]
    method = tree.pop("method")
    table = {"title": "a long run", "seeds": [0], "settings": tree, "rows": [{"method": method}]}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(table))
    (cell,) = Table(tmp_path / "table.yaml", [], tmp_path / "table").cells
    shutil.copytree(uninterrupted.folder, cell.folder)
    assert main(["table", str(tmp_path / "table.yaml"), "--out", str(tmp_path / "table")]) == FINISHED
    accuracy = load_run(uninterrupted.folder).metrics["accuracy_mean"][-1]
    assert f"{100 * accuracy:.1f}" in capsys.readouterr().out
    assert time.process_time() - began_s < 15
