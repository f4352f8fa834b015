"""What `hpcfl plan` prints before a run: clients by classes, the model, times, memory, disk and messages."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import DIFFERENT, method_settings, read_csv, refused, run_here, tiny_settings
from harness import Run
from processes import REPOSITORY, Mpirun

from hpcfl.commands import plan
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.planning.dry_run import TRAFFIC, DryRun, dry_run
from hpcfl.planning.estimate import Planner
from hpcfl.planning.slurm_header import SlurmHeader
from hpcfl.registries import load_config
from hpcfl.setup import validate
from hpcfl.setup.experiment import load_data, make_method
from hpcfl.setup.validate import state_bytes
from hpcfl.simulation.migration import assign_workers

DIGITS_CNN = 160 + 4640 + 8256 + 650
"""Trainable numbers of digits_cnn: conv1, conv2, fc1, fc2."""


def printed_plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == FINISHED
    out, err = capsys.readouterr()
    assert err == ""
    return out


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return printed_plan(capsys, "--no-timing", *words).splitlines()


def numbers(line: str) -> list[int]:
    """Return the cells of a line of the table; a dot is 0."""
    return [0 if cell == "." else int(cell) for cell in line.split()[1:]]


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["data.clients=7", "data.per_client=40", "data.partition.classes_per_client=2"], {2}),
        (["data.partition.name=mixture"], set(range(1, 11))),
        (["data.partition.name=iid", "data.per_client=100", "data.val_fraction=0.2"], {8, 9, 10}),
    ],
)
def test_the_table_adds_up(words: list[str], classes: set[int], capsys: pytest.CaptureFixture[str]) -> None:
    lines, config = planned(capsys, *words), load_config(None, words)
    assert lines[0] == f"{config.partition.name} partition of digits: samples of each class"
    assert lines[1].split() == ["client", *map(str, range(10)), "train", "val", "test"]
    *of_clients, total = lines[2 : 3 + config.data.clients]
    rows = np.array([numbers(line) for line in of_clients])
    assert [line.split()[0] for line in of_clients] == [*map(str, range(config.data.clients))]
    by_class, splits = rows[:, :10], rows[:, 10:]
    assert np.array_equal(by_class.sum(axis=1), splits.sum(axis=1))
    assert {int(owned) for owned in (by_class > 0).sum(axis=1)} <= classes
    if config.data.per_client is not None:
        assert set(by_class.sum(axis=1)) == {config.data.per_client}
    assert (splits[:, 1] > 0).all() == (config.data.val_fraction > 0)
    assert total.split()[0] == "all"
    assert numbers(total) == rows.sum(axis=0).tolist()
    assert {*map(len, of_clients)} == {len(total)} == {len(lines[1])}
    assert len(lines[1]) <= 80


def test_unseen_clients_come_last_and_their_cost_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method.name=ditto", "data.per_client=40", "data.clients=5", "train.batch_size=9"]
    everyone = planned(capsys, *words)
    lines = planned(capsys, *words, "data.unseen_clients=0.4", "run.eval_every=4", "train.unseen_epochs=2")
    # numbers of client, mini-batches of 28 training samples
    names = [" ".join(line.split()[:-13]) for line in lines[2:7]]
    assert names == ["0", "1", "2", "unseen 3", "unseen 4"]
    counts, of_everyone = (sorted(line.split()[-13:] for line in shown[2:7]) for shown in (lines, everyone))
    assert counts == of_everyone
    assert lines[7].split() == everyone[7].split()
    assert "30 rounds of 3 of 3 clients, 5 local epochs, 8 evaluations" in lines
    assert "2 unseen clients adapt for 2 epochs at each evaluation" in lines
    of_one = 4 * DIGITS_CNN
    assert lines[-1] == f"workers' memory, theta: {5 * of_one:,} bytes in all, {of_one:,} a client"
    # models of a sharded server are the workers' as well
    keys = ("method.name=pfedla", "data.per_client=40", "method.server=sharded", "method.heads=low_rank")
    lines = planned(capsys, *keys)
    assert not any(line.startswith("server memory, theta") for line in lines)
    assert lines[-1] == f"workers' memory, theta: {10 * of_one:,} bytes in all, {of_one:,} a client"


def test_a_server_larger_than_the_machine_is_planned_and_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(validate, "memory_bytes", lambda: 1_900_000)
    # shorter codes than there are clients, so that they help
    keys = ["method.name=pfedla", "data.per_client=40", "method.rank=2"]
    reason = refused(capsys, "plan", "--no-timing", *keys)
    expected = "method.name=pfedla with data.clients=10 keeps 1.93 MB on the server (theta 548 kB, "
    assert reason.startswith(f"hpcfl: error: {expected}")
    advice = "fewer clients, a larger machine, or what `hpcfl list keys method.pfedla` has to make it smaller"
    assert reason.endswith(f"this machine, or its job, has 1.9 MB; use {advice}")
    assert reason == refused(capsys, *keys, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(validate, "memory_bytes", lambda: math.inf)
    assert not planned(capsys, *keys)[-1].startswith("method.name")


@pytest.mark.warns
@pytest.mark.parametrize("case", ["pfedla-sharded", "pfedla-adam", *DIFFERENT])
def test_the_planned_memory_is_the_memory_in_use(case: str) -> None:
    more = {"sharded": ["method.heads=low_rank", "method.server=sharded"], "adam": ["method.optimiser=adam"]}
    name, _, variant = case.partition("-")
    words = [f"method.name={name}", "data.per_client=40", "model.batchnorm=true", *more.get(variant, [])]
    config = load_config(None, words)
    method = make_method(config, *load_data(config))
    held: Counter[str] = Counter()
    for part, tensor in MethodAdapter(method).initial_server().items():
        held[part.partition("/")[0]] += tensor.nbytes
    assert state_bytes(method) == held


# What a dry run prints


@pytest.fixture(autouse=True)
def _soon_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfl.planning.dry_run.TRAINING_S", 0.05)


CHOSEN = {"heurpfedla": 0.35, "fedmn": 0.35}
"""Cases whose traffic depends on the layers that clients choose, and by how much a plan may be off."""


SEVENTY = ["data.clients=70", "data.subset_per_class=140", "data.partition.name=iid"]
"""More clients than a node of HDF5's trees has rows."""


def size(text: str) -> float:
    """Read "1.5 MB"."""
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    assert match, f"{pattern} is not in\n{text}"
    return match.groups()


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("pfedla", ["train.participation=0.6"]),
        ("heurpfedla", []),
        ("scaffold", ["train.participation=0.6"]),
        ("fedavg-int8", []),
        ("ditto-topk", ["comm.codec=topk", "train.rounds=2", *SEVENTY]),
        ("fedbabu", ["data.unseen_clients=0.3"]),
        ("fedmn", ["method.pretrain_rounds=1", "data.unseen_clients=0.3"]),
    ],
)
def test_sizes_of_checkpoints_and_bytes_on_the_network_are_those_of_the_run(
    case: str, more: list[str], digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny_settings(digits), *method_settings(case), "run.checkpoint_every=1", *more]
    text = printed_plan(capsys, *words)
    assert list(tmp_path.iterdir()) == []
    assert run_here(tmp_path / "run", [*words, "run.report=false"]) == FINISHED
    disk = r"disk: a checkpoint ([\d.]+ \w+), the last one ([\d.]+ \w+); .* at most ([\d.]+ \w+) without"
    middle, last, most = map(size, found(disk, text))
    real = [(tmp_path / "run" / name).stat().st_size for name in ("checkpoint.prev.h5", "checkpoint.h5")]
    assert middle == pytest.approx(real[0], rel=0.03, abs=20_000)
    assert last == pytest.approx(real[1], rel=0.03)
    assert most == pytest.approx(2 * real[0] + real[1], rel=0.03, abs=40_000)
    row = read_csv(tmp_path / "run" / "metrics.csv")[-1]
    numbers = found(r"network: .* a round, ([\d,]+) and ([\d,]+) in all", text)
    moved = [int(number.replace(",", "")) for number in numbers]
    exact, buffers = ([int(row[f"{kind}bytes_{way}"]) for way in ("down", "up")] for kind in ("", "buffer_"))
    assert moved == (pytest.approx(exact, rel=CHOSEN[case]) if case in CHOSEN else exact)
    assert ("network: about " in text) == (case in CHOSEN)
    line = f"running statistics: {buffers[0]:,} bytes down and {buffers[1]:,} up more in all"
    assert line in text if any(buffers) else "running statistics" not in text


def test_bytes_of_fedavg_and_the_head_of_a_script_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["method.name=fedavg", "data.per_client=40", "data.clients=5", "train.participation=0.5"]
    more = ["train.rounds=10", "train.local_epochs=3", "run.device=cpu", "run.threads=1"]
    text = printed_plan(capsys, *words, "--ranks", "4", "--ranks-per-node", "3", *more)
    assert "\nmodel digits_cnn: 13,706 trainable numbers (conv1 160, conv2 4,640, fc1 8,256, fc2 650)" in text
    assert "\n10 rounds of 3 of 5 clients, 3 local epochs, 10 evaluations\n" in text
    assert f"\nserver memory, theta: {4 * DIGITS_CNN:,} bytes\n" in text
    a_round = 3 * 4 * DIGITS_CNN
    assert f"network: {a_round:,} bytes down and {a_round:,} up a round, " in text
    assert f"{10 * a_round:,} and {10 * a_round:,} in all, as metrics.csv counts them" in text
    lossy = printed_plan(capsys, *words, *more, "clients.drop_rate=0.5")
    assert f"network: without lost clients {a_round:,} bytes down" in lossy
    # three clients of a round keep three workers busy
    assert re.findall(r"^(\d+) +\d+:\d\d:\d\d  ", text, re.MULTILINE) == ["2", "3", "4"]
    busy = r"(?: \(busy for \d+ % .*\))?"
    assert re.search(rf"dry run of [\d.]+ m?s on one core{busy} of this machine: [\d.]+ m?s a round", text)
    estimated = r"memory, estimated: rank 0 (\S+ [MG]B), a worker (\S+ [MG]B)"
    memory = [size(part) for part in found(estimated, text)]
    assert all(100e6 < part < 2e9 for part in memory)
    head = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    script = (REPOSITORY / "jobs" / "train.sbatch").read_text()
    there = set(re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE))
    assert there <= set(head) | {"job-name"}
    assert set(head) - there == {"mem", "nodes", "ntasks-per-node"}
    assert (head["ntasks"], head["nodes"], head["ntasks-per-node"]) == ("4", "2", "2")
    assert (head["cpus-per-task"], head["signal"]) == ("1", "B:USR1@120")
    assert head["time"] == "00:10:00"
    # rank 0 and a worker share a node
    of_node = sum(memory) / 2**20
    assert 1.2 * of_node < int(head["mem"].removesuffix("M")) < 1.3 * of_node + 100


def test_a_plan_covers_a_run_longer_than_a_job_and_one_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count():
        pytest.skip("needs a machine without a GPU")
    words = ["method.name=fedavg", "data.per_client=40", "train.rounds=20000000"]
    text = printed_plan(capsys, *words, "run.device=cuda", "--time", "1-00:10:00")
    assert "of this machine, which has no GPU although run.device=cuda expects one: " in text
    for line in ("--ntasks=9", "--cpus-per-task=1", "--gpus-per-node=1", "--time=1-00:10:00"):
        assert f"\n#SBATCH {line}\n" in text
    jobs, signal_s = found(r"# about (\d+) jobs of 1-00:10:00 one after the other: each stops (\d+) s", text)
    assert f"\n#SBATCH --signal=B:USR1@{signal_s}\n" in text
    days, hours, minutes, seconds = found(r"\n9 +(\d+) days?, (\d+):(\d+):(\d+) ", text)
    total_s = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    assert int(jobs) == math.ceil(total_s / (24 * 3600 + 600 - int(signal_s) - 10))


@pytest.mark.parametrize(("keys", "ranks"), [([], 4), (["train.participation=0.4"], 2)])
def test_no_worker_is_without_work(capsys: pytest.CaptureFixture[str], keys: list[str], ranks: int) -> None:
    words = ["method.name=fedavg", "data.clients=3", "data.per_client=40", *keys]
    assert f"\n#SBATCH --ntasks={ranks}\n" in printed_plan(capsys, *words)
    # those that are asked for are planned all the same
    assert main(["plan", *words, f"--ranks={ranks + 2}"]) == FINISHED
    out, err = capsys.readouterr()
    assert f"\n#SBATCH --ntasks={ranks + 2}\n" in out
    warning = f"--ranks {ranks + 2}: only {ranks} have work, rank 0 and {ranks - 1} workers"
    assert err == f"hpcfl: warning: {warning}\n"


def test_a_dry_run_that_diverges_is_reported_and_still_planned(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["data.clients=4", "data.per_client=40", "train.rounds=2", "method.name=fedavg", "train.lr=1e30"]
    assert main(["plan", *keys, "run.on_divergence=skip"]) == FINISHED
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("hpcfl: warning: numbers became nan or infinite in the dry run, which continued")
    assert line.endswith("run.on_divergence=skip, and its times may differ: lower train.lr (it is 1e+30)")
    of_one = 4 * 4 * DIGITS_CNN
    assert f"network: {of_one:,} bytes down and {of_one:,} up a round" in out
    assert "#SBATCH --time=" in out


KNOWN = DryRun(
    wall_s=1.0,
    cpu_s=1.0,
    device="cpu",
    batch_s=0.5,
    server_s=0.6,
    traffic=dict.fromkeys(TRAFFIC, 1e9),
    first_traffic={},
    send_s=0.0,
    score_s=0.01,
    adapt_s=0.25,
    download_bytes=0,
    shared_download_bytes=0,
    clients=2,
    checkpoint_bytes=10**6,
    client_bytes=1000,
    model_bytes=2000,
    unseen_model_bytes=3000,
    shared_model_bytes=0,
    evaluation_bytes=800,
    round_bytes=80,
    server_bytes=10**6,
    peak_bytes=10**8,
    chooses_layers=False,
    has_diverged=False,
)
"""What a dry run may have measured."""


def planner_of(words: list[str], dry: DryRun = KNOWN) -> Planner:
    config = load_config(None, [*words, "run.device=cpu"])
    arrays, parts = load_data(config)
    return Planner(config.run, make_method(config, arrays, parts), parts, dry)


@pytest.mark.parametrize(
    ("cpu_s", "where"), [(0.9, "core of"), (0.1, "core (busy for 90 % of it with other ")]
)
def test_a_busy_core_is_reported(cpu_s: float, where: str) -> None:
    dry = replace(KNOWN, cpu_s=cpu_s)
    text = plan._measured(load_config(None, []).run, dry)
    assert text.startswith(f"dry run of 1 s on one {where}")
    assert text.endswith(" a round for each mini-batch of a client, all local epochs together")


def test_estimates_follow_from_the_measurements(digits: Path) -> None:
    words = [*tiny_settings(digits), "method.name=ditto", "data.unseen_clients=0.3"]
    words += ["train.rounds=7", "run.eval_every=3", "run.checkpoint_every=2"]
    _, parts = load_data(load_config(None, words))
    scored = [len(part.test) for part in parts]
    planner = planner_of(words)
    batches = [math.ceil(len(part.train) / 12) for part in parts]
    seen, unseen = batches[:5], batches[5:]
    assert len(unseen) == 2
    alone, spread = planner.on(1), planner.on(4)
    # with as many ranks as nobody has, nothing changes either
    assert replace(planner.on(10**9), ranks=6) == planner.on(6)
    with pytest.raises(UserError, match=r"is shorter than one round .* on 4 ranks; give .* more --ranks"):
        SlurmHeader("name", 1, replace(spread, train_s=900.0), 1, False, 600)
    assert alone.train_s == pytest.approx(0.5 * sum(seen))
    assert alone.round_s == pytest.approx(alone.train_s + 5 * 0.6)
    # clients in training are scored after training, too
    assert alone.evaluation_s == pytest.approx(0.01 * 2 * sum(scored[:5]) + 0.25 * sum(unseen))
    middle, last = planner.checkpoints()
    # five clients in place of two, and one more that is unseen
    assert middle == 10**6 - 800 - 2 * 2000 - 3000 + 3 * 1000 + 6 * 80 + 2 * 800
    assert last - middle == 80 + 800 + 5 * 2000 + 2 * 3000
    writing_s = (3 * middle + last) / 100e6
    assert alone.total_s == pytest.approx(7 * alone.round_s + (3 + 1) * alone.evaluation_s + writing_s)
    samples = [len(part.train) for part in parts[:5]]
    loads = [0.0, 0.0, 0.0]
    for client, worker in enumerate(assign_workers(samples, [0, 0, 1, 1, 2], 3)):
        loads[worker] += 0.5 * batches[client]
    assert spread.train_s == pytest.approx(max(loads))
    assert spread.round_s == pytest.approx(spread.train_s + 5 * 0.6)
    # the slowest worker's clients
    of_client = [0.01 * 2 * count for count in scored[:5]] + [0.25 * count for count in unseen]
    by_worker = [sum(of_client[client] for client in planner._shard(worker, 3)) for worker in range(3)]
    assert min(by_worker) < max(by_worker)
    assert spread.evaluation_s == pytest.approx(max(by_worker))


def test_memory_is_that_of_a_round_of_the_last_checkpoint_or_of_the_clients_state(digits: Path) -> None:
    keys = ["method.name=fedavg", "train.participation=0.4", "run.max_elements=100000000"]
    words = [*tiny_settings(digits), *keys]
    small = replace(KNOWN, client_bytes=0, model_bytes=0, unseen_model_bytes=0, shared_download_bytes=10**6)
    alone, spread = (planner_of(words, small).on(ranks) for ranks in (1, 4))
    samples = 7 * 20 * (4 * 64 + 8)
    # 1 MB as made, packed and received; three of seven clients upload as much, from a worker each
    assert spread.server_memory == 10**8 + 3 * 10**6
    assert spread.worker_memory == pytest.approx(10**8 - 10**6 + (3 + 2) * 10**6, abs=samples)
    assert alone.server_memory == pytest.approx(10**8 + (3 + 3 + 6) * 10**6, abs=samples)
    # all seven models on their way to the last checkpoint, three at most of one worker
    models = replace(small, model_bytes=10**6)
    spread = planner_of(words, models).on(4)
    assert spread.server_memory == 10**8 + (3 + 2 * 7) * 10**6
    assert spread.worker_memory == pytest.approx(10**8 - 10**6 + (3 + 2 * 3) * 10**6, abs=samples)
    # the state of all clients, in pieces of at most 4e8 bytes
    for of_client, held in ((10**7, 7 * 10**7), (10**8, 4 * 10**8)):
        spread = planner_of(words, replace(small, client_bytes=of_client)).on(4)
        assert spread.server_memory == 10**8 + 2 * held
        assert spread.worker_memory == pytest.approx(10**8 + 4 * 10**6 + 3 * of_client, abs=samples)


def test_a_node_without_rank_0_has_a_worker_more(digits: Path) -> None:
    estimate = planner_of([*tiny_settings(digits), "method.name=fedavg"]).on(4)
    estimate = replace(estimate, server_memory=400 * 2**20, worker_memory=800 * 2**20)
    for nodes, mebibytes in ((1, 400 + 3 * 800), (2, 2 * 800), (4, 800)):
        lines = SlurmHeader("name", 1, estimate, nodes, False).lines()
        assert f"#SBATCH --mem={math.ceil(1.25 * mebibytes / 100) * 100}M" in lines


def test_a_dry_run_needs_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfl.planning.dry_run.free_bytes", lambda: 2_000_000)
    words = ["method.name=pfedla", "data.per_client=40"]
    needed = []
    for more in ([], ["method.server=sharded"]):
        last = refused(capsys, "plan", *words, *more)
        needed += found(r"no times and no memory: the dry run needs about (.*), and .* 2 MB free; ", last)
    # the rows of the ten clients are in the server's state, or beside it
    assert size(needed[1]) == pytest.approx(size(needed[0]), rel=0.5)


def test_under_mpirun_the_plan_is_for_the_ranks_that_are_there(mpirun: Mpirun, tmp_path: Path) -> None:
    words = ["method.name=fedavg", "data.per_client=40", "train.rounds=10", "run.threads=2"]
    text = mpirun(3, "-m", "hpcfl.main", "plan", *words, cwd=tmp_path).stdout
    # 10 clients keep 10 workers busy
    assert re.findall(r"^(\d+) +\d+:\d\d:\d\d  ", text, re.MULTILINE) == ["2", "3", "5", "9", "11"]
    assert text.count("#SBATCH --nodes=1\n#SBATCH --ntasks=3\n#SBATCH --cpus-per-task=2\n") == 1


def test_the_estimate_includes_clients_moved_to_less_busy_workers() -> None:
    seconds = {}
    for placement in ("balanced", "home"):
        words = ["method.name=fedavg", "data.clients=20", "data.per_client=80", "train.participation=0.3"]
        seconds[placement] = planner_of([*words, f"run.placement={placement}"]).on(4).train_s
    # two of six members on each of three workers; at home the busiest has three or so
    assert seconds["balanced"] == pytest.approx(2 * 0.5 * math.ceil(56 / 16))
    assert seconds["home"] > 1.2 * seconds["balanced"]


def test_sharded_models_are_planned_in_blocks_of_16_clients() -> None:
    keys = ["method.name=pfedla", "method.server=sharded", "method.heads=low_rank", "run.placement=home"]
    planner = planner_of([*keys, "data.clients=40", "data.per_client=40"])
    # 16, 16 and 8 clients on three of four workers, each with 28 training samples
    assert planner.on(5).train_s == pytest.approx(16 * 0.5 * math.ceil(28 / 16))


def test_the_seconds_of_training_and_evaluations_are_about_those_of_the_run() -> None:
    keys = ("data.clients=8", "data.per_client=120", "train.finetune_epochs=1", "run.eval_every=1")
    run = Run("method.name=ditto", *keys)
    arrays, parts = load_data(run.config)
    timing = run.simulation.timing
    run_s = np.array([min(timing.train_s), min(timing.evaluate_s)])
    # whatever else this machine does meanwhile slows some of them, so the fastest dry run counts
    planned_s, tries = np.full(2, np.inf), 0
    while tries < 3 or (tries < 10 and (planned_s >= 4 * run_s).any()):
        tries += 1
        dry = dry_run(run.config, arrays, parts)
        estimate = Planner(run.config.run, run.method, parts, dry).on(1)
        planned_s = np.minimum(planned_s, [estimate.train_s, estimate.evaluation_s])
    assert (planned_s > 0.25 * run_s).all()
    assert (planned_s < 4 * run_s).all()
