"""`hpcfl.run`: runs from Python are those of the command line."""

from __future__ import annotations

import importlib
import linecache
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from functools import cache, cached_property, partialmethod
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from bits import differing
from conftest import forgetting_own_code
from processes import Mpirun, run_tree
from torch.utils.data import TensorDataset

import hpcfl
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.config import own_code
from hpcfl.data.sources import SOURCES
from hpcfl.errors import FINISHED, UserError
from hpcfl.main import main
from hpcfl.methods.base import Method, Params, State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.methods.fedbn import FedBN
from hpcfl.randomness import generator_states
from hpcfl.results.run import Run, load_run
from hpcfl.training.client_group import ClientGroup

SMALL = ["data.clients=3", "data.per_client=40", "train.rounds=2", "train.local_epochs=1", "run.report=false"]


class Halved(FedAvg):
    """FedAvg whose clients send the middle between the model that they received and their own."""

    def train(self, clients: ClientGroup, down: Message) -> Message:
        trained = super().train(clients, down)
        return Message(per_client={"theta": (trained["theta"] + down["theta"]) / 2})


class Noisy(FedBN):
    """FedBN that calls a library, which warns at each call."""

    def train(self, clients: ClientGroup, down: Message) -> Message:
        warnings.warn("of a library: in\n  two lines", stacklevel=1)
        return super().train(clients, down)


@pytest.fixture(autouse=True)
def classes_unnamed() -> Iterator[None]:
    """Take off the names that runs gave to classes."""
    yield
    for kind in (Halved, Noisy, Interrupted):
        for name in {"name", "summary"} & vars(kind).keys():
            delattr(kind, name)


def run(*settings: Any, **options: Any) -> Run:
    files = [one for one in settings if isinstance(one, Path)]
    keys = [one for one in settings if not isinstance(one, Path)]
    found = hpcfl.run(*files, *SMALL, *keys, quiet=True, **options)
    assert found is not None
    return found


def test_a_run_from_python_equals_that_of_the_command_line(tmp_path: Path) -> None:
    words = [*SMALL, "method.name=fedprox", "method.mu=0.5", "run.seed=3"]
    assert main([*words, "--out", str(tmp_path / "typed"), "--quiet"]) == FINISHED
    file, given = tmp_path / "config.yaml", {"method": {"mu": 0.5}, "run.seed": 3}
    file.write_text("method: {name: fedprox, mu: 7}\ntrain: {rounds: 9}\n")
    found = hpcfl.run(file, *SMALL, given, out=tmp_path / "run", quiet=True)
    assert found is not None
    assert found.status.state == "finished"
    assert not differing(tmp_path / "typed", tmp_path / "run")


def test_a_class_may_be_the_method_and_its_run_is_resumed(tmp_path: Path) -> None:
    # a run has its page, and may be started in a thread
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, "run.report=true", method=Halved, out=tmp_path / "run").result()
    assert first.config.method.name == "halved"
    assert "halved" in (first.path / "report.html").read_text()
    longer = run("train.rounds=4", method=Halved, out=tmp_path / "run")
    assert len(longer.metrics["accuracy_mean"]) == 4
    whole = run("train.rounds=4", method=Halved, out=tmp_path / "whole")
    assert not differing(whole.path, longer.path)
    plain = run("train.rounds=4", method="fedavg", out=tmp_path / "plain")
    assert list(plain.metrics["loss_mean"]) != list(whole.metrics["loss_mean"])
    assert set(longer.model(0)) == set(plain.model(0))


def defined_by(text: str) -> type[Method]:
    """Return the class `Scaled` of a text, as a notebook's cell defines it."""
    file = f"<cell {text}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    found: dict[str, Any] = {"FedAvg": FedAvg}
    exec(compile(text, file, "exec"), found)
    kind: type[Method] = found["Scaled"]
    return kind


def test_what_is_set_in_torch_changes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    plain = run(method="fedavg", out=tmp_path / "plain")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    before = generator_states()
    try:
        with torch.inference_mode():
            set_before = run(method="fedavg", out=tmp_path / "set")
            assert torch.is_inference_mode_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            inside = run(method="fedavg", out=tmp_path / "inside")
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32) == (False, True)
        assert generator_states() == before
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for found in (set_before, inside):
        assert not differing(plain.path, found.path)


PRECISIONS = [
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
]
PRECISION_OF_A_CALLER = """
import os, sys, torch, hpcfl
WIDE = {"name": "mlp", "hidden": [256, 256]}
def known(*readings):
    found = []
    for read in readings:
        try:
            found.append(read())
        except RuntimeError:
            found.append("of two minds")
    return found
cuda, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
BACKENDS = torch.backends, cuda, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv
READINGS = (
    torch.get_float32_matmul_precision, lambda: cuda.allow_tf32, lambda: cudnn.allow_tf32,
    *(lambda one=one: one.fp32_precision for one in BACKENDS),
)
SETTINGS = "train.rounds=1", "data.clients=2", "train.batch_size=256", {"model": WIDE}
def check(setting, folder):
    exec(setting)
    before = known(*READINGS)
    hpcfl.run(*SETTINGS, method="fedavg", out=folder, quiet=True)
    assert known(*READINGS) == before, (setting, before, known(*READINGS))
    torch.backends.fp32_precision = "ieee"
    after = known(*READINGS)
    exec(setting)
    torch.backends.fp32_precision = "ieee"
    assert known(*READINGS) == after, (setting, after, known(*READINGS))
hpcfl.run(*SETTINGS, method="fedavg", out="plain", quiet=True)
for number, setting in enumerate(sys.argv[1:]):
    child = os.fork()
    if not child:
        check(setting, str(number))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch keeps its precision once")
def test_a_caller_s_precision_of_products_stays_set_and_changes_nothing(tmp_path: Path) -> None:
    """Each in a process of its own: torch's older and newer settings cannot be mixed, nor taken back."""
    run_tree([sys.executable, "-c", PRECISION_OF_A_CALLER, *PRECISIONS], cwd=tmp_path)
    for number in range(len(PRECISIONS)):
        assert not differing(tmp_path / "plain", tmp_path / str(number))


NUM_CALLS = 1
SCALED = """
class Scaled(FedAvg):
    def aggregate(self, server, cohort, up):
        super().aggregate(server, cohort, up)
        server["theta"] *= FACTOR
"""


def test_a_class_with_another_text_does_not_resume_a_run_and_has_no_models(tmp_path: Path) -> None:
    first, other = (defined_by(SCALED.replace("FACTOR", factor)) for factor in ("0.5", "0.9"))
    made = run(method=first, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"a run with another text of method\.name=scaled; bring that"):
        run(method=other, out=tmp_path / "run")
    run(method=other, out=tmp_path / "other")
    assert made.metrics["accuracy_mean"].size
    for one in (made, load_run(tmp_path / "run")):
        assert one.config.method.name == "scaled"
        with pytest.raises(UserError, match=r"not those of the method\.name=scaled that .*; call hpcfl\.run"):
            one.model(0)
    assert len(run("train.rounds=3", method=first, out=tmp_path / "run").metrics["round"]) == 3
    run(method=first, out=tmp_path / "other", fresh=True)
    assert made.model(0)


def test_a_class_without_a_text_is_resumed_unless_it_does_something_else(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"FedAvg": FedAvg}
    for _ in range(2):
        exec(SCALED.replace("FACTOR", "0.5"), namespace)
        assert run(method=namespace["Scaled"], out=tmp_path / "run").status.state == "finished"
    exec(SCALED.replace("FACTOR", "0.9"), namespace)
    with pytest.raises(UserError, match=r"a run with another text of method\.name=scaled; bring that"):
        run(method=namespace["Scaled"], out=tmp_path / "run")


def test_what_changes_while_a_run_goes_makes_no_other_class(tmp_path: Path) -> None:
    """Counters, the values of its module, and values that are neither functions nor plain."""
    num_calls, found = 0, list[float]()
    sparse = torch.sparse_coo_tensor(size=(2,), check_invariants=True)
    itself: dict[str, Any] = {"sparse": sparse, "meta": torch.ones(1, device="meta"), "other": object()}
    itself["itself"] = itself

    class Counting(FedAvg):
        def aggregate(self, server: State, cohort: Cohort, up: Upload, file: TextIO = sys.stderr) -> None:
            nonlocal num_calls
            num_calls += len(itself) * NUM_CALLS
            found.append(float(server["theta"].norm()))
            super().aggregate(server, cohort, up)

    with forgetting_own_code():
        for number in (1, 2):
            globals()["NUM_CALLS"] = number
            made = run(method=Counting, out=tmp_path / "run")
            assert made.is_finished
            assert made.model(0)
        assert num_calls == 2 * 4
        assert not sys.stderr.closed


def test_a_class_is_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "imported_method.py"
    text = f"from hpcfl.methods.fedavg import FedAvg\n{SCALED}"
    file.write_text(text.replace("FACTOR", "0.5"))
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = importlib.import_module("imported_method")
    run(method=imported.Scaled, out=tmp_path / "run")
    file.write_text(text.replace("FACTOR", "0.9  # another"))
    assert run(method=imported.Scaled, out=tmp_path / "run").is_finished
    del sys.modules["imported_method"]
    changed = importlib.import_module("imported_method")
    with pytest.raises(UserError, match=r"a run with another text of method\.name=scaled; bring that"):
        run(method=changed.Scaled, out=tmp_path / "run")


def test_a_run_object_reads_no_other_run(tmp_path: Path) -> None:
    first = run(method="fedavg", out=tmp_path / "run")
    assert first.done == 2
    run("train.lr=0.2", method="fedavg", out=tmp_path / "run", fresh=True)
    with pytest.raises(UserError, match=r"run has another train\.lr now than when this run was loaded"):
        _ = first.clients
    with pytest.raises(UserError, match=r"another train\.lr now"):
        first.model(0)
    # what it has read stays
    assert first.done == 2


def test_a_run_of_a_class_says_where_its_page_is(tmp_path: Path) -> None:
    with forgetting_own_code():
        run(method=defined_by(SCALED.replace("FACTOR", "0.5")), out=tmp_path / "run")
    with pytest.raises(UserError, match=r"method\.name=scaled is what a script gave to hpcfl\.run"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    "member",
    [
        "@staticmethod\n    def factor(): return 0.5",
        "@property\n    def factor(self): return 0.5",
        "factor = 0.5",
        "traits = FedAvg.traits.replace(eval_after='training' if 0.5 > 0.6 else FedAvg.traits.eval_after)",
        "factor = torch.tensor(0.5)",
        "factor = np.float32(0.5)",
        "factor = {'all': {0.5}}",
        "factor = [[0], [1, 2]] if 0.5 < 0.6 else [[0, 1], [2]]",
        "factor = b'0.5'",
        "factor = range(int(10 * 0.5))",
        "factor = cache(constant(0.5))",
        "def factor(self, by=0.5): return by",
        "def factor(self, *, by=0.5): return by",
        "factor = constant(0.5)",
        "factor = cached_property(constant(0.5))",
        "factor = partialmethod(constant(1), 0.5)",
        "factor = torch.full((2,), 0.5, dtype=torch.bfloat16)",
        "factor = constant((slotted(0.5),))",
        "class Params(Params):\n        @property\n        def factor(self): return 0.5",
    ],
)
def test_any_change_of_a_class_is_noticed(member: str) -> None:
    def constant(value: float) -> Callable[..., float]:
        return lambda self, *_: value

    slotted = make_dataclass("Slotted", ["value"], slots=True)
    known = {"FedAvg": FedAvg, "Params": Params, "torch": torch, "np": np, "slotted": slotted}
    known |= {"constant": constant, "cache": cache, "cached_property": cached_property}
    known |= {"partialmethod": partialmethod}
    digests = []
    for text in (member, member, member.replace("0.5", "0.9")):
        namespace: dict[str, Any] = {"__name__": "script", **known}
        exec(f"class Mine(FedAvg):\n    {text}", namespace)
        own_code.add_class("method.path", "mine", namespace["Mine"])
        digests.append(own_code.class_code("method.path", "mine"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.filterwarnings("always:of a library")
def test_warnings_go_to_the_caller_s_logging_or_are_printed_once_for_each_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = "of a library: in"
    own = "model.name=digits_cnn has no BatchNorm, so fedbn trains as fedavg does"
    for name in ("routed", "printed", "printed again"):
        caplog.clear()
        run(method=Noisy, out=tmp_path / name)
        printed = capsys.readouterr().err.splitlines()
        log = (tmp_path / name / "log.txt").read_text()
        assert [log.count(f" warning: {text}") for text in (own, library)] == [1, 1]
        if name == "routed":
            assert printed == []
            assert [record.name for record in caplog.records[:2]] == ["hpcfl.methods.fedbn", "py.warnings"]
        else:
            expected = [f"hpcfl: warning: {text}" for text in (own, f"{library}   two lines")]
            assert [line.partition("; networks ")[0] for line in printed] == expected
        # as without the handlers of pytest
        monkeypatch.setattr(logging.getLogger("hpcfl"), "propagate", False)


@pytest.mark.parametrize("has_channels", [True, False])
def test_a_dataset_may_be_the_source(tmp_path: Path, has_channels: bool) -> None:
    images = torch.rand(120, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(120) % 3
    dataset = TensorDataset(images[:, None] if has_channels else images, labels)
    keys = {"data": {"partition": {"name": "iid"}}, "model.name": "digits_cnn", "method.name": "local"}
    found = run(keys, dataset=dataset, out=tmp_path / "run")
    assert found.config.data.source.startswith("dataset-")
    assert found.network(0)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(UserError, match=r"data\.source"):
        run(keys, dataset=TensorDataset(1 - images, labels), out=tmp_path / "run")
    del SOURCES[found.config.data.source]
    with pytest.raises(UserError, match=r"is what a script gave to hpcfl\.run; call it again"):
        load_run(tmp_path / "run")


def test_a_file_runs_that_the_caller_names(tmp_path: Path) -> None:
    own, file = tmp_path / "mine.py", tmp_path / "config.yaml"
    own.write_text("from hpcfl.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")
    file.write_text(f"method: {{path: {own}}}\n")
    with pytest.raises(UserError, match=r"refused to run this Python file.*own_code="):
        run(file, out=tmp_path / "run")
    assert run(file, out=tmp_path / "run", own_code=own).config.method.name == "mine"
    other = tmp_path / "other.py"
    other.write_text(own.read_text().replace("Mine", "Other"))
    assert run({"method": {"path": str(other)}}, out=tmp_path / "other").config.method.name == "other"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": type("Again", (FedAvg,), {"name": "fedprox"})}, "Again has the name of a method"),
        ({"method": type("Odd", (FedAvg,), {"Params": dict})}, "method=Odd: its options must be a class"),
        ({"method": dict}, "is not a method; give a name, or a class derived from Method"),
        ({"method": "fedavgg"}, "method.name=fedavgg is unknown"),
        ({"dataset": [1, 2]}, "dataset: "),
        (
            {"dataset": [{"image": 1, "label": 2}]},
            "a sample is a dictionary; give a sequence of (image, label)",
        ),
        ({"dataset": [(torch.zeros(1, n, 8), n) for n in (8, 9)]}, "tensors or arrays of one shape"),
        ({"dataset": [(torch.zeros(1, 8, 8), 0.5)]}, "integer; give labels as integers from 0 on"),
        ({"dataset": [(torch.zeros(8, 8, 3), 0)] * 4}, "the shape [8, 8, 3], with channels last; give"),
        ({"settings": ["config.json"]}, "config.json comes after words or dictionaries; give YAML"),
        ({"settings": [["train.rounds=3"]]}, "is not a setting; give a YAML file, a word"),
        ({"settings": [3]}, "is not a setting; give a YAML file, a word"),
        ({"settings": ["mine.yaml"]}, "mine.yaml comes after words or dictionaries; give YAML files"),
    ],
)
def test_mistakes_are_reported_with_one_line(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(*options.pop("settings", []), out=tmp_path / "run", **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_keys_of_another_method_are_refused_but_those_of_a_file(tmp_path: Path) -> None:
    for given in (
        [{"method.nu": 0.5}, {"method.name": "fedprox"}],
        [{"model": {"name": "mlp"}, "method": {"nu": 0.5}}, "method.name=fedprox"],
    ):
        with pytest.raises(UserError, match=r"method\.nu=0\.5 is an unknown key"):
            run(*given, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"method\.nu=0\.5 is an unknown key"):
        run({"method.nu": 0.5}, method=Halved, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"method\.mu=0\.5 is an unknown key"):
        run({"method": {"name": "fedprox", "mu": 0.5}}, method="fedavg", out=tmp_path / "run")
    file = tmp_path / "fedprox.yaml"
    file.write_text("method: {name: fedprox, mu: 0.5}\n")
    assert run(file, method="fedavg", out=tmp_path / "run").config.method.name == "fedavg"


class Interrupted(FedAvg):
    """FedAvg during whose first round somebody types Ctrl-C."""

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        super().aggregate(server, cohort, up)
        if cohort.round == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_checkpoint_and_the_cell(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    with pytest.raises(KeyboardInterrupt):
        run(method=Interrupted, out=tmp_path / "run")
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert load_run(tmp_path / "run").status.state == "stopped"
    assert run(method=Interrupted, out=tmp_path / "run").done == 2


def test_a_script_on_several_ranks_has_the_bits_of_one_rank(tmp_path: Path, mpirun: Mpirun) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport hpcfl\nfrom hpcfl.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    pass\n"
        f"run = hpcfl.run(*{SMALL!r}, 'train.participation=0.4', out=sys.argv[1], quiet=True, method=Mine)\n"
        "print(None if run is None else run.config.method.name)\n"
    )
    alone = type("Mine", (FedAvg,), {})
    run("train.participation=0.4", method=alone, out=tmp_path / "alone")
    done = mpirun(3, script, tmp_path / "ranks")
    assert sorted(done.stdout.split()) == ["None", "None", "mine"]
    assert not differing(tmp_path / "alone", tmp_path / "ranks")
    assert "2 workers train 1 clients a round: start fewer ranks" in (tmp_path / "ranks/log.txt").read_text()


def test_ranks_with_different_data_are_refused(tmp_path: Path, mpirun: Mpirun) -> None:
    script = tmp_path / "script.py"
    dataset = "TensorDataset(torch.rand(120, 1, 8, 8), torch.arange(120) % 4)"
    for given, expected in (
        (f"'model.name=mlp', dataset={dataset}", "rank 1 has read other data than rank 0: copy the same"),
        ("f'train.lr={torch.rand(1).item()}'", "rank 1 has train.lr=0."),
    ):
        script.write_text(
            "import hpcfl, sys, torch\nfrom torch.utils.data import TensorDataset\ntorch.seed()\n"
            f"try:\n    hpcfl.run(*{SMALL!r}, {given}, method='fedavg', out=sys.argv[1])\n"
            "except hpcfl.errors.UserError as error:\n    print(error)\n"
        )
        assert expected in mpirun(2, script, tmp_path / "run").stdout


def test_a_record_of_a_class_with_a_parameter_without_a_default_is_read(tmp_path: Path) -> None:
    class NeedsStrengthParams(Params):
        strength: float

    class NeedsStrength(FedAvg):
        Params = NeedsStrengthParams
        params: NeedsStrengthParams

    keys = {"method.strength": 2.0}
    with forgetting_own_code():
        run(keys, method=NeedsStrength, out=tmp_path / "run")
        again = run(tmp_path / "run" / "config.yaml", method=NeedsStrength, out=tmp_path / "run")
        assert again.is_finished
