"""Exported models work without hpcfl, and predict every sample as the run did."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bits
import numpy as np
import pytest
import torch
from bits import raw_tests, refused, right, right_of_run, run_here
from processes import files_up_to, run_tree

import hpcfl
from hpcfl.errors import BAD_INPUT, FINISHED, STORAGE_ERROR, UserError
from hpcfl.main import main
from hpcfl.methods import METHODS, Method
from hpcfl.results.export import KINDS
from hpcfl.results.run import Run


@dataclass(frozen=True)
class Place:
    """A folder of runs of one kind, made when they are first asked for."""

    folder: Path
    digits: Path

    def run(self, case: str, *more: str, name: str | None = None) -> Run:
        """Return the run of a case of tests/bits.py: three rounds, four of seven clients, with BatchNorm."""
        folder = self.folder / (name or case)
        if not folder.exists():
            settings = [*bits.tiny_settings(self.digits), *bits.MEETS_ALL_SOON, *bits.method_settings(case)]
            if any(word.startswith("model.path=") for word in more):
                settings = [word for word in settings if not word.startswith("model.")]
            assert run_here(folder, [*settings, "train.participation=0.6", *more]) == FINISHED
        return hpcfl.load_run(folder)


@pytest.fixture(scope="module")
def place(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("runs"), digits)


def test_exported_models_have_the_same_accuracy_without_hpcfl(place: Place, tmp_path: Path) -> None:
    """Those of all methods whose networks are not the configured one, of one other and an own model."""
    own_networks = [
        name
        for name, method in METHODS.items()
        if method.as_module is not Method.as_module or method.make_network is not Method.make_network
    ]
    assert len(own_networks) >= 5
    (tmp_path / "own_net.py").write_text(OWN_MODEL)
    runs = {case: place.run(case) for case in ("fedbn", *own_networks)}
    runs["own model"] = place.run("fedavg", f"model.path={tmp_path / 'own_net.py'}", name="own")
    expected = {}
    for case, run in runs.items():
        expected[case] = right_of_run(run)[6]
        files = run.export(6, tmp_path / case)
        assert len(files) == len(set(files)) == 4
        x, y = raw_tests(run)[6]
        np.savez(tmp_path / case / "images.npz", x=x, y=y)
    script = """
import sys
for name in ("hpcfl", "mpi4py", "h5py", "torchvision"):
    sys.modules[name] = None
import json, pathlib
import numpy as np
import torch
found = {}
for path in pathlib.Path(".").glob("*/client6.pt2"):
    images = np.load(path.with_name("images.npz"))
    x, model = torch.from_numpy(images["x"]), torch.export.load(path).module()
    assert len(model(x[:1])) == 1
    found[path.parent.name] = int((model(x).argmax(dim=1).numpy() == images["y"]).sum())
print(json.dumps(found))
"""
    done = run_tree([sys.executable, "-W", "error", "-c", script], cwd=tmp_path)
    assert json.loads(done.stdout) == expected


def test_the_recipe_is_written_beside_the_tensors_and_inside_them(place: Place, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    run = place.run("fedem")
    run.export(2, tmp_path)
    recipe = json.loads((tmp_path / "client2.json").read_text())
    assert (recipe["run"], recipe["client"], recipe["round"]) == ("fedem", 2, 3)
    assert recipe["method"] == {"name": "fedem", "components": 2}
    assert recipe["model"] == {"name": "digits_cnn", "batchnorm": True, "groupnorm": None}
    assert (recipe["sample_shape"], recipe["sample_type"], recipe["scale"]) == ([1, 7, 7], "float32", 1.0)
    assert (recipe["mean"], recipe["std"], recipe["classes"]) == ([0.0], [1.0], list(range(10)))
    assert "weights[m] * softmax(components.m(x))" in recipe["parts"]
    assert recipe["accuracy"] == run.clients["accuracy"][2]
    weights = torch.load(tmp_path / "client2.pt", weights_only=True)
    assert recipe["tensors"] == {name: list(tensor.shape) for name, tensor in weights.items()}
    assert recipe["tensors"]["weights"] == [2]
    assert recipe["tensors"]["components.1.body.bn1.running_var"] == [16]
    with safetensors.safe_open(tmp_path / "client2.safetensors", "pt") as file:
        metadata = file.metadata()
        assert all(torch.equal(file.get_tensor(name), weights[name]) for name in weights)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in recipe.items()}
    assert metadata == texts
    assert torch.equal(weights["weights"], run.models.saved(2)["weights"])


def test_the_global_model_is_the_one_that_fedavg_scores(place: Place, tmp_path: Path) -> None:
    run = place.run("fedavg")
    assert [right(run.predict("global", x), y) for x, y in raw_tests(run)] == right_of_run(run)
    files = run.export("global", tmp_path / "a.pt")
    assert [path.name for path in files] == ["a.pt", "a.json"]
    assert json.loads((tmp_path / "a.json").read_text())["client"] == "global"
    weights = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.model(0).items())


def test_a_method_has_a_global_model_or_refuses_to_export_it(place: Place) -> None:
    assert all(METHODS[name].traits.has_global_model for name in ("scaffold", "fedprox", "fedrod"))
    for name in ("fedem", "fedbn", "local", "fedmn", "knn_per"):
        message = rf"method.name={name} has no global model; take a client's, 0 to 6; .*fedavg"
        with pytest.raises(UserError, match=message):
            place.run(name).model("global")
    with pytest.raises(UserError, match=r"ditto has no running statistics.*train.buffers=local.*client's"):
        place.run("ditto").model("global")
    without = place.run("ditto", "model.batchnorm=false", name="ditto without BatchNorm")
    theta = without.checkpoint.server["theta"] if without.checkpoint else None
    assert theta is not None
    assert torch.equal(torch.cat([t.flatten() for t in without.model("global").values()]), theta)


def test_predict_writes_labels_and_probabilities(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place.run("fedmn")
    x, y = raw_tests(run)[5]
    images, out = tmp_path / "images.npz", tmp_path / "p.csv"
    np.savez(images, x=x.transpose(0, 2, 3, 1))
    command = ["predict", str(run.path), "--client", "5", str(images), "--out", str(out)]
    expected = run.predict(5, x)
    assert right(expected, y) == right_of_run(run)[5]
    assert main(command) == FINISHED
    rows = bits.read_csv(out)
    assert list(rows[0]) == ["label", *(f"probability_{n}" for n in range(10))]
    assert np.array_equal([[float(row[f"probability_{n}"]) for n in range(10)] for row in rows], expected)
    assert [int(row["label"]) for row in rows] == expected.argmax(axis=1).tolist()
    # a sample without probabilities
    out.unlink()
    x[1] = 3e38
    np.savez(images, x=x)
    assert main(command) == BAD_INPUT
    error = f"hpcfl: error: the model of --client 5 has no probabilities (nan) for 1 of {len(x)} samples: "
    assert capsys.readouterr().err.startswith(error)
    assert not out.exists()


def test_images_may_have_either_layout_and_grey_ones_no_channel_axis(place: Place) -> None:
    run = place.run("fedavg")
    x = raw_tests(run)[0][0]
    expected = run.predict(0, x, "NCHW")
    for other, layout in ((x.transpose(0, 2, 3, 1), None), (x[:, 0], None), (x.astype(np.float64), "NCHW")):
        assert np.allclose(run.predict(0, other, layout), expected, atol=1e-6)
    assert np.allclose(run.predict(0, torch.from_numpy(x[:, 0])), expected, atol=1e-6)


def test_bytes_are_scaled_and_normalised_as_in_the_run(tmp_path: Path) -> None:
    few = ["data.clients=4", "data.per_client=40", "train.rounds=2", "data.normalise=half"]
    assert run_here(tmp_path / "run", ["method.name=fedavg", *few]) == FINISHED
    run = hpcfl.load_run(tmp_path / "run")
    assert (run.models.data.dtype, run.models.data.scale) == ("uint8", 16.0)
    assert (run.models.data.mean, run.models.data.std) == ((0.5,), (0.5,))
    assert run.models.data.num_samples == tuple(run.clients["train_samples"].astype(int))
    assert [right(run.predict(n, x), y) for n, (x, y) in enumerate(raw_tests(run))] == right_of_run(run)
    x = raw_tests(run)[0][0]
    with pytest.raises(UserError, match=r"x has type float64; allowed: uint8, 0..16"):
        run.predict(0, x / 16)


def test_a_method_with_its_own_prediction_rule_is_exported(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = tmp_path / "own_rule.py"
    method.write_text(OWN_METHOD)
    ruled = place.run("fedavg", "method.name=own_rule", f"method.path={method}", name="ruled")
    assert [right(ruled.predict(n, x), y) for n, (x, y) in enumerate(raw_tests(ruled))] == right_of_run(ruled)
    with pytest.raises(UserError, match="own_rule predicts by a rule of its own"):
        ruled.network(0)
    files = ruled.export(0, tmp_path / "ruled")
    model = tmp_path / "ruled" / "client0.pt2"
    assert caplog.messages == [f"no {model}: own_rule does not predict by one network"]
    assert [path.name for path in files] == ["client0.pt", "client0.safetensors", "client0.json"]
    weights = torch.load(files[0], weights_only=True)
    assert weights.keys() >= {"theta.body.conv1.weight", "buffers.body.bn1.running_mean", "sharpness"}


OWN_MODEL = '''"""A network with its own layer."""
import math
from collections import OrderedDict
import torch
from torch import nn
from hpcfl.models.networks import Model, Network, NetworkOptions
class Scaled(nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, 8)
        self.scale = nn.Parameter(torch.ones(8))
    def forward(self, x):
        return torch.tanh(super().forward(x)) * self.scale
class Own(Model):
    options = NetworkOptions
    def build(self, sample, num_classes, options):
        body = OrderedDict(flatten=nn.Flatten(), scaled=Scaled(math.prod(sample.shape)))
        return Network(body, OrderedDict(fc=nn.Linear(8, num_classes)))
OWN = Own("a network with a layer of its own")
'''

OWN_METHOD = '''"""FedAvg that predicts by a rule of its own."""
import torch
from hpcfl.methods.fedavg import FedAvg
class OwnRule(FedAvg):
    traits = FedAvg.traits.replace(predicts_by="rule")
    def eval_model(self, clients, down):
        model = super().eval_model(clients, down)
        model.per_client["sharpness"] = torch.full((len(clients), 1), 2.0)
        return model
    def predict(self, clients, model, position, x):
        power = model["sharpness"][position] if "sharpness" in model else 2.0
        sharp = super().predict(clients, model, position, x) ** power
        return sharp / sharp.sum(dim=1, keepdim=True)
'''


def test_only_tensors_are_exported_of_a_network_that_torch_cannot_export(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = place.run("fedavg")
    network = run.models.method.network
    plain = type(network).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, -x if x.sum() < -1e9 else x)

    monkeypatch.setattr(type(network), "forward", forward)
    files = run.export(0, tmp_path)
    # torch.export logs as well
    warning = caplog.messages[-1]
    assert warning.startswith(f"no {tmp_path / 'client0.pt2'}: torch.export cannot follow the network: ")
    assert [path.name for path in files] == ["client0.pt", "client0.safetensors", "client0.json"]
    assert run.network(0).load_state_dict(torch.load(files[0], weights_only=True))


def test_an_unfinished_run_has_no_personalised_models(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished, images = tmp_path / "unfinished", tmp_path / "images.npz"
    settings = [*bits.tiny_settings(place.digits), "method.name=fedavg", "run.checkpoint_every=1"]
    assert run_here(unfinished, settings) == FINISHED
    # the last checkpoint lost, as of a run that is stopped before
    (unfinished / "checkpoint.h5").unlink()
    (unfinished / "clients.csv").unlink()
    np.savez(images, x=np.zeros((1, 7, 7), np.float32))
    why = r"prev.h5 is of round 2 of 3 and has no personalised models yet.*take global, which is there"
    for words, out in ((["export", unfinished], "out"), (["predict", unfinished, images], "out.csv")):
        line = refused(capsys, *words, "--out", tmp_path / out, "--client", "0", may_warn=True)
        assert re.search(why, line)
    line = refused(capsys, "compare", unfinished, unfinished, may_warn=True)
    assert "not finished: its last evaluation is of round 3 of 3, and clients.csv" in line
    command = ["export", str(unfinished), "--out", str(tmp_path / "out"), "--client"]
    assert main([*command, "global"]) == FINISHED
    assert json.loads((tmp_path / "out" / "global.json").read_text())["round"] == 2

    (unfinished / "checkpoint.prev.h5").write_bytes(b"half a file")
    error = refused(capsys, *command, "0", may_warn=True)
    assert "checkpoint.prev.h5 is damaged" in error
    (unfinished / "checkpoint.prev.h5").unlink()
    error = refused(capsys, *command, "0", may_warn=True)
    assert "has no checkpoint.h5, which has the models; " in error
    assert "or let the run finish (run its command again to resume)" in error


def test_a_finished_run_without_its_checkpoint_says_what_to_copy(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(place.run("fedavg").path, tmp_path / "run")
    (folder / "checkpoint.h5").unlink()
    line = refused(capsys, "export", folder, "--client", "0", "--out", tmp_path / "out")
    assert f"{folder} has no checkpoint.h5, which has the models; copy it from where the run was made" in line


def test_damaged_lines_are_named(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = place.run("fedavg").path
    other = place.run("local").path

    def found(name: str, old: bytes, new: bytes, *words: object) -> str:
        folder = shutil.copytree(made, tmp_path / "run", dirs_exist_ok=True)
        text = (folder / name).read_bytes()
        assert old in text
        (folder / name).write_bytes(text.replace(old, new, 1))
        message = refused(capsys, *(folder if word == "RUN" else word for word in words))
        return message.removeprefix("error: ").removeprefix(f"{folder}/")

    compare, report = ("compare", "RUN", other), ("report", "RUN")
    for words in (compare, report):
        assert "clients.csv, line 3: damaged; " in found("clients.csv", b"\n1,0", b"\n1,x", *words)
        assert "clients.csv, line 8: damaged; " in found("clients.csv", b"\n6,", b"\n6", *words)
    too_large = b"\n0,%d," % 2**63
    assert "partition.csv, line 2: damaged; " in found("partition.csv", b"\n0,1,", too_large, *report)
    # the last line is lost
    folder = shutil.copytree(made, tmp_path / "short")
    lines = (folder / "clients.csv").read_text().splitlines(keepends=True)
    (folder / "clients.csv").write_text("".join(lines[:-1]))
    assert "clients.csv, line 8: damaged; " in refused(capsys, "compare", folder, other)
    # no command that reads knows --fresh
    (folder / "checkpoint.h5").write_bytes(b"half a file")
    (folder / "checkpoint.prev.h5").unlink(missing_ok=True)
    advice = refused(capsys, "export", folder, "--client", "0", "--out", tmp_path / "out")
    assert "the figures in its CSV files are not" in advice
    assert "--fresh" not in advice


def test_a_client_that_is_not_in_the_run_is_refused(place: Place) -> None:
    run = place.run("fedavg")
    for client in ("all", "3", 3.5, float("nan"), True, None):
        for ask in (run.model, run.network):
            with pytest.raises(UserError, match=re.escape(f"client {client!r} is not in this run")):
                ask(client)  # type: ignore[arg-type]
    # as columns of clients.csv have them
    for client in (np.int64(3), np.float64(3)):
        assert run.model(client).keys() == run.model(3).keys()  # type: ignore[arg-type]


def test_a_full_disk_is_reported(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.run("fedavg").path
    for kind in KINDS:
        with files_up_to(500):
            words = ["export", str(run), "--client", "3", "--out", str(tmp_path / f"model{kind}")]
            assert main(words) == STORAGE_ERROR
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"cannot write {tmp_path / 'model'}{kind}: File too large; free space on the disk" in error
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_reported(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.run("fedavg").path
    images = tmp_path / "images.npz"

    def predict(**arrays: np.ndarray) -> str:
        np.savez(images, **arrays)
        return refused(capsys, "predict", run, "--client", "0", images, "--out", tmp_path / "p.csv")

    out = ["--out", tmp_path / "out"]
    for expected, *words in (
        (f"{tmp_path / 'none'} is not a run folder: No such", tmp_path / "none", "--client", "0", *out),
        ("client 7 is not in this run; allowed: 0 to 6", run, "--client", "7", *out),
        ("allowed: a client's number or global or all", run, "--client", "x", *out),
        ("give --out FOLDER", run, "--client", "all", "--out", tmp_path / "a.pt"),
        ("--out", run, "--client", "1"),
        ("a folder, FILE.pt, FILE.safetensors, FILE.pt2", run, "--client", "3", "--out", tmp_path / "3.pth"),
        ("cannot write ", run, "--client", "1", "--out", run / "clients.csv" / "x"),
    ):
        assert expected in refused(capsys, "export", *words)
    assert list(tmp_path.iterdir()) == []

    x = np.zeros((2, 1, 7, 7), np.float32)
    for expected, wrong in (
        ("x has shape [2, 1, 8, 8]; allowed: [n, 7, 7, 1] with layout NHWC", np.zeros((2, 1, 8, 8))),
        ("x has shape [0, 7, 7]", x[:0, 0]),
        ("x has type uint8; allowed: float", x.astype(np.uint8)),
        ("not finite", np.full((1, 7, 7), np.nan)),
    ):
        assert expected in predict(x=wrong)
    assert "has no array 'x' (it holds images); needed: x" in predict(images=x)
    images.write_text("no zip file")
    words = ["predict", run, "--client", "0", images]
    expected = "cannot be read as an npz file; write it with numpy.savez(FILE, x=x) (BadZipFile: File is not"
    assert expected in refused(capsys, *words)
    before = (run / "clients.csv").read_bytes()
    assert "is in a run folder" in refused(capsys, *words, "--out", run / "clients.csv")
    assert (run / "clients.csv").read_bytes() == before
    assert "no such file" in refused(capsys, "predict", run, "--client", "0", tmp_path / "none.npz")
    for name in ("p.txt", "images.npz"):
        assert "give a FILE.csv" in refused(capsys, *words, "--out", tmp_path / name)


def test_samples_are_refused_where_they_are_not_those_that_the_run_had(place: Place, tmp_path: Path) -> None:
    x, y = place.run("fedavg").samples(6, "train")
    assert (len(x), x.dtype, y.dtype) == (len(y), np.float32, np.int64)
    with pytest.raises(UserError, match="client 7 is not in this run; allowed: 0 to 6"):
        place.run("fedavg").samples(7)
    shutil.copytree(place.run("fedavg").path, tmp_path / "run")
    record = (tmp_path / "run" / "config.yaml").read_text()
    with np.load(place.digits) as pool:
        np.savez(tmp_path / "other.npz", x=pool["x"][40:], y=pool["y"][40:])
    for changed, expected in (
        (
            record.replace(str(place.digits), str(tmp_path / "other.npz")),
            "the data set is not that of the run",
        ),
        (record.replace("shift: null", "shift: blur"), "data.shift changed its samples"),
        (record.replace("beta: 0.5", "beta: 5.0"), "divides the data in another way"),
    ):
        assert changed != record
        (tmp_path / "run" / "config.yaml").write_text(changed)
        with pytest.raises(UserError, match=expected):
            hpcfl.load_run(tmp_path / "run").samples(0)


def test_reading_does_not_change_a_run_folder(place: Place, tmp_path: Path) -> None:
    run = place.run("fedavg")
    before = {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()}
    run.export(0, tmp_path)
    run.predict(0, raw_tests(run)[0][0])
    assert {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()} == before
