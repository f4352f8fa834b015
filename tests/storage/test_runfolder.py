"""What a run leaves behind: its files, their bytes and columns, and what running it again does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from bits import SECONDS, read_csv, refused, start_run
from processes import exit_code, give_up_capabilities

from hpcfl import __version__
from hpcfl.errors import BAD_INPUT, FINISHED
from hpcfl.main import main
from hpcfl.registries import load_config, resolve
from hpcfl.storage.ledger import METRICS, SPENT
from hpcfl.storage.runfolder import RunFolder

N, ROUNDS = 4, 3
TINY = [f"data.clients={N}", "data.per_client=20", "train.local_epochs=1", f"train.rounds={ROUNDS}"]
TABLES = {"metrics.csv", "clients.csv", "bytes.csv", "partition.csv"}
FILES = {"config.yaml", *TABLES, "checkpoint.h5", "report.html", "log.txt", ".lock"}

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that runs TINY with other settings and returns the folder; each is run once."""

    @cache
    def run_once(*words: str) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "run"
        assert main([*TINY, *words, "--quiet", "--out", str(folder)]) == FINISHED
        return folder

    return run_once


def column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def untimed(folder: Path) -> dict[str, Rows]:
    """Return the CSV files without the columns of seconds."""
    return {
        name: [{k: v for k, v in row.items() if k not in SECONDS} for row in read_csv(folder / name)]
        for name in TABLES
    }


def results(folder: Path) -> dict[str, bytes]:
    """Return the content of all files but the log."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "log.txt"}


def test_a_run_folder_has_its_files_and_columns(run: Callable[..., Path]) -> None:
    folder = run()
    assert {path.name for path in folder.iterdir()} == FILES
    metrics, clients, moved = (read_csv(folder / f"{name}.csv") for name in ("metrics", "clients", "bytes"))
    assert tuple(metrics[0]) == METRICS
    assert column(metrics, "round") == [1, 2, 3]
    assert sorted(column(metrics, "wall_s")) == column(metrics, "wall_s")
    assert column(clients, "client") == list(range(N))
    accuracy, samples = (np.array(column(clients, name)) for name in ("accuracy", "evaluated_samples"))
    assert float(metrics[-1]["accuracy_mean"]) == accuracy.mean()
    assert float(metrics[-1]["accuracy_std"]) == accuracy.std()
    assert float(metrics[-1]["loss_mean"]) == np.mean(column(clients, "loss"))
    assert np.allclose(accuracy * samples, np.round(accuracy * samples))
    assert set(np.array(column(clients, "train_samples")) + samples) == {20}
    assert {row["layer"] for row in moved} == {"conv1", "conv2", "fc1", "fc2"}
    spent = [sum(float(row[name]) for name in SPENT) for row in metrics]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert all(total <= wall for total, wall in zip(spent, column(metrics, "wall_s"), strict=True))

    classes = read_csv(folder / "partition.csv")
    for name in ("train_samples", "evaluated_samples"):
        of_clients = [sum(int(row[name]) for row in classes if int(row["client"]) == n) for n in range(N)]
        assert of_clients == column(clients, name)
    # each client owns four of the ten classes
    assert len(classes) == len({(row["client"], row["class"]) for row in classes}) == 4 * N


def test_the_saved_configuration_describes_the_run_and_can_be_run(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    words = ("method.name=heurpfedla", "method.k=3")
    folder = run(*words)
    record = yaml.safe_load((folder / "config.yaml").read_text())
    environment = record.pop("environment")
    assert resolve(record) == load_config(None, [*TINY, *words])
    assert environment["hpcfl"] == __version__
    assert environment["torch"] == torch.__version__
    typed = " ".join([*TINY, *words, "--quiet --out", str(folder)])
    assert environment["command"] == f"hpcfl {typed}"
    assert [place.split()[1:] for place in environment["ranks"]] == [["cpu", "loop"]]
    assert environment["processor"]
    again = tmp_path / "again"
    assert main([str(folder / "config.yaml"), "--quiet", "--out", str(again)]) == FINISHED
    assert untimed(again) == untimed(folder)


def test_a_finished_run_reports_it_and_is_not_changed(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run()
    before = results(folder)
    neutral = ["data.root=elsewhere", "run.checkpoint_every=1"]
    assert main([*TINY, *neutral, "--out", str(folder)]) == FINISHED
    out, err = capsys.readouterr()
    assert "this run is finished, no round follows round 3; --fresh starts over" in out
    assert "resuming" not in out
    assert f"mean accuracy, round {ROUNDS}" in out
    assert f"  in {folder}" in out
    assert err == ""
    assert results(folder) == before
    # a lost table is written again
    for name in TABLES - {"partition.csv"}:
        (folder / name).unlink()
    assert main([*TINY, "--quiet", "--out", str(folder)]) == FINISHED
    assert results(folder) == before
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("keys", [(), ("data.val_fraction=0.2", "train.patience=1", "train.lr=1e-9")])
def test_a_finished_run_that_is_started_again_keeps_its_files_until_they_are_replaced(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """Others may read them, and the process may end before it writes them."""
    keys += ("run.metrics=true",)
    words = [*TINY, *keys, "--quiet", "--out", str(shutil.copytree(run(*keys), tmp_path / "run"))]
    before = results(tmp_path / "run")
    assert "confusion.csv" in before

    def stop(*_: object) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_clients", stop)
        with pytest.raises(RuntimeError, match="power cut"):
            main(words)
    assert results(tmp_path / "run") == before
    assert main(words) == FINISHED
    assert results(tmp_path / "run") == before
    if "train.patience=1" in keys:
        # more rounds, none of which is left
        words.remove("run.metrics=true")
        assert main([*words, "train.rounds=9"]) == FINISHED
        assert results(tmp_path / "run")["clients.csv"] == before["clients.csv"]


def test_a_folder_that_may_not_be_read_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir(mode=0)
    assert exit_code(start_run(tmp_path / "run", TINY, give_up_capabilities)) == BAD_INPUT
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"hpcfl: error: {tmp_path / 'run'}: Permission denied; name another folder with")


def test_fresh_moves_the_old_folder_aside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*TINY, "train.rounds=1", "--out", str(tmp_path / "run")]
    assert main([*words, "--fresh"]) == FINISHED
    before = results(tmp_path / "run")
    for number in (1, 2):
        capsys.readouterr()
        assert main([*words, "--fresh", "run.seed=5"]) == FINISHED
        assert f"the run that was there is now in {tmp_path / 'run'}.old{number}" in capsys.readouterr().out
    assert results(tmp_path / "run.old1") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old1", "run.old2"]
    record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert record["run"]["seed"] == 5
    # what `hpcfl watch` gives as the command that resumes the run
    assert record["environment"]["command"] == f"hpcfl {' '.join([*words, 'run.seed=5'])}"


def test_fresh_keeps_a_link_to_the_folder_and_takes_a_dot_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "train.rounds=1", "--quiet", "--fresh", "--out"]
    link, scratch = tmp_path / "link", tmp_path / "scratch" / "run"
    # such as after a purge of the scratch disk
    link.symlink_to(scratch)
    assert main([*words, str(link)]) == main([*words, str(link)]) == FINISHED
    monkeypatch.chdir(scratch)
    assert main([*words, "."]) == FINISHED
    assert link.is_symlink()
    assert sorted(path.name for path in scratch.parent.iterdir()) == ["run", "run.old1", "run.old2"]
    assert all((path / "clients.csv").is_file() for path in scratch.parent.iterdir())


def test_the_default_folder_is_named_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "train.rounds=1", "--quiet"]) == FINISHED
    name = load_config(None, TINY).run_name()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")] == [f"runs/{name}"]
    assert set(results(tmp_path / "runs" / name)) | {"log.txt"} == FILES


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_another_torch_is_reported_and_another_number_of_ranks_where_it_matters(
    engine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*TINY, f"run.engine={engine}", "run.device=cpu", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*words, "train.rounds=1"]) == FINISHED
    record = tmp_path / "run" / "config.yaml"
    begun = record.read_text().replace(f"torch: {torch.__version__}", "torch: 1.0")
    record.write_text(begun.replace("  ranks:\n  - ", "  ranks:\n  - here cpu batched\n  - "))
    capsys.readouterr()
    assert main([*words, "train.rounds=2"]) == FINISHED
    *of_ranks, of_torch = capsys.readouterr().err.splitlines()
    expected = f"hpcfl: warning: this run began with torch 1.0 and continues with {torch.__version__}"
    assert of_torch.startswith(expected)
    warned = "this run began on 2 ranks and continues on 1: with run.engine=batched the last bits may differ"
    assert [warned in line for line in of_ranks] == [True] * (engine == "batched")


def test_a_folder_without_a_checkpoint_starts_at_round_0(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With any configuration; but not one whose figures say that it was finished."""
    folder = shutil.copytree(run(), tmp_path / "run")
    (folder / "checkpoint.h5").unlink()
    before = untimed(folder)
    message = refused(capsys, *TINY, "--out", folder)
    assert (
        "holds a finished run without its checkpoint, and to start over would delete its figures" in message
    )
    assert untimed(folder) == before
    (folder / "clients.csv").unlink()
    (folder / "metrics.csv").write_text("round\nrubbish\n")
    assert main([*TINY, "--quiet", "--out", str(folder), "run.seed=5"]) == FINISHED
    assert "has no checkpoint; starting over at round 0" in capsys.readouterr().err
    assert untimed(folder) == untimed(run("run.seed=5"))


def test_a_run_is_not_resumed_with_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is with its data in another place, as in the scratch folder of each job."""
    places, random = [tmp_path / "first.npz", tmp_path / "second.npz"], np.random.default_rng(0)
    words = ["data.source=npz", "data.layout=NCHW", "data.clients=4", "model.name=mlp", "method.name=fedavg"]
    words += ["train.local_epochs=1", "--quiet", "--out", str(tmp_path / "run")]
    first, second = ([*words, f"data.path={place}"] for place in places)
    np.savez(places[0], x=random.integers(0, 256, (200, 1, 8, 8), np.uint8), y=np.arange(200) % 4)
    assert main([*first, "train.rounds=1"]) == FINISHED
    places[0].rename(places[1])
    # of a finished run, config.yaml names the place; and where and how it was made
    before = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert main([*second, "train.rounds=1"]) == FINISHED
    before["data"]["path"] = str(places[1])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == before
    assert main([*second, "train.rounds=2"]) == FINISHED
    assert {row["round"] for row in read_csv(tmp_path / "run" / "bytes.csv")} == {"1", "2"}
    capsys.readouterr()
    np.savez(places[0], x=random.integers(0, 256, (200, 1, 8, 8), np.uint8), y=np.arange(200) % 4)
    message = refused(capsys, *first, "train.rounds=3")
    assert f"the data have changed since {tmp_path / 'run' / 'checkpoint.h5'} was written: bring" in message
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"] == before["data"]


def test_models_are_scored_after_the_download_and_after_training(run: Callable[..., Path]) -> None:
    fedavg = read_csv(run("method.name=fedavg") / "metrics.csv")
    assert column(fedavg, "accuracy_after_download") == column(fedavg, "accuracy_mean")
    assert column(fedavg, "accuracy_after_training") != column(fedavg, "accuracy_mean")
    # with one client, what it trained in a round is what it downloads in the next
    alone = read_csv(run("method.name=fedavg", "data.clients=1") / "metrics.csv")
    assert column(alone, "accuracy_after_training") == column(alone, "accuracy_after_download")
    local = read_csv(run("method.name=local") / "metrics.csv")
    assert column(local, "accuracy_after_training") == column(local, "accuracy_mean")
    assert {row["accuracy_after_download"] for row in local} == {"nan"}
    tuned = read_csv(run("method.name=fedavg", "train.finetune_epochs=1") / "metrics.csv")
    for name in ("accuracy_after_download", "accuracy_after_training"):
        assert column(tuned, name) == column(fedavg, name)
    assert column(tuned, "accuracy_mean") != column(fedavg, "accuracy_mean")


def test_scores_after_training_are_those_of_the_cohort(run: Callable[..., Path]) -> None:
    folder = run("method.name=fedavg", "train.participation=0.25", "run.seed=1")
    metrics, clients = read_csv(folder / "metrics.csv"), read_csv(folder / "clients.csv")
    known = [row for row in clients if row["accuracy_after_training"] != "nan"]
    assert len(known) == 1
    assert metrics[-1]["accuracy_after_training"] == known[0]["accuracy_after_training"]
    assert np.mean(column(clients, "accuracy_after_download")) == float(metrics[-1]["accuracy_mean"])
