"""Mistakes in hooks that would spoil results or a resume: the hook, the tensor and what to do are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import differing, method_settings, run_here, run_until_time_is_up
from harness import MLP, SMALL, Run, make_network
from processes import Mpirun
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import FINISHED, STOPPED
from hpcfl.methods import METHODS
from hpcfl.methods.adapter import MethodAdapter
from hpcfl.methods.base import Context, Method, Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.fedavg import FedAvg
from hpcfl.methods.fedmn import FedMN
from hpcfl.methods.local import Local
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward


def as_network(theta: Tensor) -> None:
    """Train a network of one's own from a model, which then shares its memory."""
    network = make_network("mlp", hidden=[16])
    vector_to_parameters(theta, network.parameters())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.sub_(0.1)


def raises(expected: str, base: type[Method] = FedAvg, *keys: str, **hooks: Any) -> None:
    """Assert that a run whose method has these hooks ends with this error."""
    kind = type("Mistaken", (base,), hooks)
    kind.name = "mistaken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "mistaken", kind)
        with pytest.raises((TypeError, ValueError, KeyError), match=expected):
            Run("method.name=mistaken", *MLP, *keys)


@pytest.mark.parametrize(
    ("hook", "value", "expected"),
    [
        ("eval_model", {"theta": torch.zeros(1, 3)}, r"eval_model returned a dict; return Message\("),
        ("train", None, r"train returned a NoneType; return Message\("),
        ("train", Message(per_client={"theta": torch.zeros(2, 3)}), r"'theta' of shape \[2, 3\] for 1 c"),
        ("train", Message(per_client={"theta": torch.zeros(1, 3)}), r"'theta' of shape \[1, 3\] and type to"),
        ("train", Message(per_client={"theta": np.zeros((1, 3))}), "'theta' is a ndarray; give a torch.T"),
        ("client_state", None, "client_state returned a NoneType; return a dictionary of tensors by name"),
        ("client_state", {"h": torch.zeros(3)}, r"client_state returned 'h' of shape \[3\] for"),
        ("client_state", {0: torch.zeros(4)}, "a tensor is named 0; names are words"),
        ("server_state", {"/h": torch.zeros(4)}, "a tensor is named '/h'; names are"),
        ("server_state", {"m": 0.5}, "'m' is a float; give a torch.Tensor"),
        ("server_state", {"m": torch.tensor(0.5)}, "'m' is a single number; .* such as torch.zeros"),
        ("server_state", {"m": torch.zeros(2, dtype=torch.bfloat16)}, "'m' is of type torch.bfloat16"),
        (
            "server_state",
            {"a": torch.zeros(2), "a/b": torch.zeros(2)},
            "'a' and 'a/b' exclude each other; rename one",
        ),
        ("download", Message(per_client={"theta": torch.zeros(3, 3)}), r"'theta' of shape \[3, 3\] for 4 c"),
        (
            "download",
            Message(shared={"x": torch.zeros(2, dtype=torch.bfloat16)}),
            "'x' is of type torch.bfloat16 .* messages and checkpoints hold dense tensors",
        ),
        ("download", Message(shared={"theta": 1.0}), "'theta' is a float; give a torch.Tensor"),
        (
            "download",
            Message({"x": torch.zeros(1)}, {"x": torch.zeros(4, 1)}),
            "returned x both as shared and as per_client; give one",
        ),
        (
            "train",
            Message(layer_mask=torch.ones(2) > 0),
            "train returned a Tensor; return a dictionary of te",
        ),
        ("train", Message(shared={"x": torch.zeros(3)}), "returned x as shared; return them per_client"),
        (
            "train",
            Message(per_client={"x": torch.ones(1, 2, requires_grad=True)}),
            r"'x' has a graph for gradients; give x.detach",
        ),
        (
            "client_state",
            {"buffers": torch.zeros(4, 2)},
            "'buffers', which train.buffers=local keeps",
        ),
        ("aggregate", {}, "aggregate returned a dict, which nobody reads; write into server, as in"),
        ("end_round", {}, "end_round returned a dict, which nobody reads; write into server, as in"),
        ("eval_model", Message(), "eval_model returned nothing, and no theta; return the models to score"),
    ],
)
def test_a_hook_with_a_wrong_return_value_is_named(hook: str, value: object, expected: str) -> None:
    raises(rf"Mistaken\.{hook}.* {expected.removeprefix(f'{hook} ')}", **{hook: lambda *_: value})


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("thetta", torch.ones(2, dtype=torch.bool), "layer_mask of 'thetta', which is not sent; sent: theta"),
        (
            "theta",
            torch.ones(3, dtype=torch.bool),
            r"shape \[3\] .*; expected: torch.bool of shape \[2\], or",
        ),
        ("theta", torch.ones(2), r"of shape \[2\] and type torch.float32; expected: torch.bool"),
        ("few", torch.ones(2, dtype=torch.bool), "'few', which does not consist of layers; expected: "),
    ],
)
def test_a_mask_that_does_not_fit_its_tensor_is_refused(name: str, mask: Tensor, expected: str) -> None:
    def masked(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        few = {"few": torch.zeros(len(clients), 3)} if name == "few" else {}
        return Message(per_client={"theta": down["theta"]} | few, layer_mask={name: mask})

    raises(rf"Mistaken\.train returned a layer_mask .*{expected.removeprefix('layer_mask ')}", train=masked)


# What clients send


def of_parity(of_even: Tensor | None, of_odd: Tensor | None) -> Callable[..., Message]:
    """Return a `train` in which clients of even and odd ids send another tensor, or none."""

    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        up = FedAvg.train(self, clients, down)
        chosen = of_odd if clients.ids[0] % 2 else of_even
        return up if chosen is None else up | Message(per_client={"sent": chosen}, num_clients=1)

    return train


DIFFERENT_UPLOADS = [
    (torch.tensor([7]), torch.tensor([5.0]), r"of client 0 is torch.int64 \[\], of client 1 torch.float32"),
    (
        torch.zeros(1, 2, 3),
        torch.zeros(1, 3, 2),
        r"of client 0 is torch.float32 \[2, 3\], of client 1 .* \[3, 2\]",
    ),
    (torch.zeros(1, 2), None, r"of client 0 is torch.float32 \[2\], of client 1 missing"),
    (None, torch.zeros(1, 2), r"of client 0 is missing, of client 1 torch.float32 \[2\]"),
]


@pytest.mark.parametrize(("of_even", "of_odd", "expected"), DIFFERENT_UPLOADS)
def test_clients_that_send_different_tensors_are_named(
    of_even: Tensor | None, of_odd: Tensor | None, expected: str
) -> None:
    raises(
        f"hooks must return the same tensors for all clients, and 'sent' {expected}",
        train=of_parity(of_even, of_odd),
    )


def test_clients_that_send_different_layers_are_named() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        mask = torch.tensor([True, clients.ids[0] == 0])
        return Message(per_client={"theta": down["theta"]}, layer_mask={"theta": mask})

    raises(
        r"'theta' of client 0 is .* with the layers \[0, 1\], of client 1 .* the layers \[0\]", train=train
    )


PARITY = '''"""FedAvg whose clients send another type if their ids are even."""

import torch

from hpcfl.communication.messages import Message
from hpcfl.methods.fedavg import FedAvg


class Parity(FedAvg):
    def train(self, clients, down):
        sent = torch.tensor([7]) if clients.ids[0] < 2 else torch.tensor([5.0])
        return super().train(clients, down) | Message(per_client={"sent": sent})
'''


def test_different_tensors_of_clients_on_different_ranks_are_named(tmp_path: Path, mpirun: Mpirun) -> None:
    own = tmp_path / "parity.py"
    own.write_text(PARITY)
    words = [*SMALL, *MLP, "run.engine=loop", f"method.path={own}", "--quiet", "--out", tmp_path / "run"]
    # clients 0 and 1 are on one rank, 2 and 3 on the other
    done = mpirun(3, "-m", "hpcfl.main", *words, timeout=60, check=False)
    assert done.returncode == 1
    expected = "'sent' of client 0 is torch.int64 [], of client 2 torch.float32 []"
    line = f"{own}: DifferentTensorsError: hooks must return the same tensors for all clients, and {expected}"
    first = done.stderr.splitlines()[0]
    # a process of the tests may know other files, too
    assert first.startswith("hpcfl: error: ")
    assert first.endswith(line)
    assert "Traceback" not in done.stderr


# What hooks must not change


def test_a_download_that_a_hook_changes_in_place_is_refused() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        down["theta"].mul_(0.9)
        return FedAvg.train(self, clients, down)

    def eval_model(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        down["theta"][0, :3] = 0
        return Message(shared={"theta": down.shared["theta"]})

    expected = r"changed 'theta' of its message in place, which others read too, .* such as \.clone\(\)"
    raises(rf"Mistaken\.train {expected}", train=train)
    raises(rf"Mistaken\.eval_model {expected}", eval_model=eval_model)


@pytest.mark.parametrize("change", [lambda w: w.data.mul_(0.9), lambda w: w.numpy().fill(0), as_network])
def test_a_change_that_torch_does_not_count_is_refused(change: Callable[[Tensor], Any]) -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        trained = clients.sgd(down["theta"]).theta
        change(down["theta"][0])
        return Message(per_client={"theta": trained})

    raises(r"Mistaken\.train changed 'theta' of its message in place", train=train)


def test_an_upload_that_its_scoring_changes_is_refused() -> None:
    def scored(self: FedAvg, clients: ClientGroup, down: Message, up: Message) -> Message:
        return Message(per_client={"theta": up["theta"].mul_(0.5)})

    expected = r"Mistaken\.model_after_training changed 'theta' of its message"
    raises(expected, model_after_training=scored)


def test_tensors_whose_changes_torch_does_not_count_may_be_in_the_state() -> None:
    @torch.inference_mode()
    def aggregate(self: FedAvg, server: State, cohort: Cohort, up: Upload) -> None:
        FedAvg.aggregate(self, server, cohort, up)

    kind = type("Inferring", (FedAvg,), {"aggregate": aggregate})
    assert Run("method.name=fedavg", *MLP, "train.rounds=2", kind=kind).server["theta"].is_inference()


def test_a_diagnostic_changes_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = Diagnostic("norm", ("client",), "", "", of_server=lambda _, server: server["theta"].mul_(0.9)[:3])
    monkeypatch.setitem(
        METHODS, "mistaken", type("Mistaken", (FedAvg,), {"diagnostics": (norms,), "name": "mistaken"})
    )
    with pytest.raises(TypeError, match=r"Mistaken\.diagnostics changed server\['theta'\]"):
        run_here(tmp_path / "run", [*SMALL, *MLP, "method.name=mistaken", "run.report=false"])


def test_labels_that_a_hook_changes_in_place_are_refused_and_x_is_a_copy() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        x, y = clients.samples("train", 0)
        before = x.clone()
        x.zero_()
        assert torch.equal(clients.samples("train", 0)[0], before)
        y.zero_()
        return FedAvg.train(self, clients, down)

    raises(r"Mistaken\.train changed y of its samples in place", train=train)


@pytest.mark.parametrize("hook", ["download", "eval_download", "new_client_download"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_download_that_changes_the_state_of_the_server_is_refused(hook: str, in_place: bool) -> None:
    def changing(self: FedAvg, server: State, cohort: Cohort) -> Message:
        if in_place:
            server["theta"] *= 0.9
        else:
            server["seen"] = torch.ones(1)
        return Message(shared={"theta": server["theta"].clone()})

    name, unseen = "theta" if in_place else "seen", "0.5" if hook == "new_client_download" else "0"
    expected = rf"Mistaken\.{hook} changed server\['{name}'\]: results would depend on run.eval_every"
    raises(expected, FedAvg, f"data.unseen_clients={unseen}", **{hook: changing})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Tensor.double, "changed 'theta' from shape .* and type torch.float32 to shape .* torch.float64"),
        (lambda theta: theta.view(1, -1), r"changed 'theta' from shape \[\d+\] .* to shape \[1, \d+\]"),
        (float, "'theta' is a float; give a torch.Tensor"),
        (None, "dropped 'theta' from the state; a resumed run would not find it"),
    ],
)
def test_a_state_that_could_not_be_resumed_is_refused_in_its_first_round(
    change: Callable[[Tensor], Any] | None, expected: str
) -> None:
    def aggregate(self: FedAvg, server: State, cohort: Cohort, up: Upload) -> None:
        theta = server.pop("theta")
        if change is not None:
            server["theta"] = theta.sum().item() if change is float else change(theta)

    raises(rf"Mistaken\.aggregate:? {expected}", aggregate=aggregate)


class Twins(FedAvg):
    """Keeps one model under two names, and changes one of them in place."""

    name = "twins"

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        return {"theta": theta, "last": theta}

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        server["theta"].mul_(0.5)
        if cohort.round == 2:
            server["last"] = server["theta"]


def test_tensors_in_one_memory_are_as_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "twins", Twins)
    keys = [*SMALL, *MLP, "method.name=twins", "train.rounds=4", "run.report=false"]
    assert run_here(tmp_path / "whole", keys) == FINISHED
    for _ in range(3):
        assert run_until_time_is_up(tmp_path / "resumed", keys) == STOPPED
    assert run_here(tmp_path / "resumed", keys) == FINISHED
    assert not differing(tmp_path / "whole", tmp_path / "resumed")


def with_diagnostic(monkeypatch: pytest.MonkeyPatch, *axes: str, **given: Any) -> list[str]:
    """Add FedAvg with a diagnostic of its own; return the words of a run of it."""
    one = Diagnostic(given.pop("name", "own"), axes, "", "", **given)
    kind = type("Watched", (FedAvg,), {"diagnostics": (one,), "name": "watched"})
    monkeypatch.setitem(METHODS, "watched", kind)
    return [*SMALL, *MLP, "method.name=watched", "train.rounds=2", "run.eval_every=1", "run.report=false"]


@pytest.mark.parametrize("name", ["accuracy", "loss", "loss_unseen"])
def test_a_diagnostic_has_no_name_of_a_figure_of_all_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = with_diagnostic(
        monkeypatch, "client", name=name, of_clients=lambda _, group: torch.ones(len(group))
    )
    expected = f"watched: the diagnostic {name} has the name of a figure of all runs; choose another"
    with pytest.raises(TypeError, match=expected):
        run_here(tmp_path / "run", words)


def test_a_diagnostic_has_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(_: FedAvg, group: ClientGroup) -> Tensor:
        return torch.ones(len(group), 1 + group.round)

    words = with_diagnostic(monkeypatch, "client", "component", of_clients=growing)
    with pytest.raises(TypeError, match=r"own has the shape \[\d, 3\], and \[\d, 2\] in earlier evaluations"):
        run_here(tmp_path / "run", words)


def test_a_diagnostic_of_gradients_and_random_numbers_is_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two runs, and in a run that is resumed."""

    def drawn(method: FedAvg, server: State) -> torch.Tensor:
        return torch.rand(method.context.num_clients, requires_grad=True) + float(np.random.rand())

    words = with_diagnostic(monkeypatch, "client", of_server=drawn)
    for name in ("one", "two"):
        assert run_here(tmp_path / name, words) == FINISHED
    assert run_until_time_is_up(tmp_path / "resumed", words) == STOPPED
    assert run_here(tmp_path / "resumed", words) == FINISHED
    assert not differing(tmp_path / "one", tmp_path / "two")
    assert not differing(tmp_path / "one", tmp_path / "resumed")


def test_a_diagnostic_of_a_type_that_no_checkpoint_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = with_diagnostic(
        monkeypatch,
        "client",
        of_server=lambda method, _: torch.ones(method.context.num_clients, dtype=torch.bfloat16),
    )
    with pytest.raises(TypeError, match=r"Watched\.diagnostics: 'own' is of type torch\.bfloat16"):
        run_here(tmp_path / "run", words)


@pytest.mark.parametrize("shape", [(7,), (3, 4)])
def test_a_diagnostic_in_the_server_s_state_has_an_entry_for_each_client(shape: tuple[int, ...]) -> None:
    def state(self: FedAvg) -> State:
        return FedAvg.server_state(self) | {"own": torch.zeros(shape)}

    own = Diagnostic("own", ("client", "component")[: len(shape)], "", "")
    raises(
        rf"has 'own' as \[{', '.join(map(str, shape))}\]; expected: a tensor \[4",
        diagnostics=(own,),
        server_state=state,
    )


def test_a_diagnostic_that_nothing_records_is_refused() -> None:
    nowhere = (Diagnostic("nowhere", ("client",), "", ""),)
    raises(r"diagnostics names 'nowhere', which neither server_state nor client_state", diagnostics=nowhere)


def test_clients_that_start_with_one_tensor_for_all_have_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Expanded(FedAvg):
        name = "expanded"

        start = torch.zeros(2)

        def client_state(self, clients: Sequence[int]) -> State:
            return {"sum": self.start.expand(len(clients), 2)}

        def train(self, clients: ClientGroup, down: Message) -> Message:
            clients["sum"] = clients["sum"] + torch.tensor(clients.ids).view(-1, 1)
            return super().train(clients, down)

    monkeypatch.setitem(METHODS, "expanded", Expanded)
    run = Run("method.name=expanded", *MLP, "train.rounds=2")
    assert run.clients["sum"].tolist() == [[0, 0], [2, 2], [4, 4], [6, 6]]
    # also where a rank has one client, of whom a view would be as it is written
    view = run.adapter.initial_clients([0])["sum"]
    assert view.untyped_storage().data_ptr() != run.method.start.untyped_storage().data_ptr()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_may_have_an_axis_of_one_number(engine: str) -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        def loss(forward: Forward, tensors: State, batch: Batch) -> Tensor:
            return forward.cross_entropy(forward.logits(tensors["theta"], batch.x), batch.y).view(1)

        gradient = clients.gradient_with_constants(loss, lambda batch: {})
        return Message(per_client={"theta": clients.sgd(down["theta"], gradient=gradient).theta})

    keys = ("method.name=fedavg", *MLP, f"run.engine={engine}")
    own, plain = (
        Run(*keys, kind=kind).server["theta"] for kind in (type("Own", (FedAvg,), {"train": train}), None)
    )
    torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_that_is_no_number_is_refused(engine: str) -> None:
    def loss(forward: Forward, tensors: State, batch: Batch) -> Tensor:
        return forward.logits(tensors["theta"], batch.x).sum(dim=1)

    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        gradient = clients.gradient_with_constants(loss, lambda batch: {})
        return Message(per_client={"theta": clients.sgd(down["theta"], gradient=gradient).theta})

    expected = r"a loss of one client has the shape \[\d+\]; return one number: \.mean\(\)"
    raises(expected, FedAvg, f"run.engine={engine}", train=train)


def test_a_response_that_changes_a_type_of_the_state_is_refused() -> None:
    def server_response(self: FedMN, server: State, cohort: Cohort, requests: State) -> Message:
        response = FedMN.server_response(self, server, cohort, requests)
        server["theta"] = server["theta"].double()
        return response

    kind = type("Mistaken", (FedMN,), {"server_response": server_response})
    with pytest.raises(ValueError, match=r"Mistaken\.server_response changed 'theta' from .* torch\.float64"):
        Run("method.name=fedmn", *method_settings("fedmn"), kind=kind)


def test_a_state_that_depends_on_the_group_is_refused() -> None:
    def by_position(self: FedAvg, clients: Sequence[int]) -> State:
        return {"number": torch.arange(len(clients))}

    def by_client(self: FedAvg, clients: Sequence[int]) -> State:
        return {"number": torch.zeros(len(clients), 1 + min(clients))}

    for client_state in (by_position, by_client):
        raises("returned another 'number' for client 3 alone than for it", client_state=client_state)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            torch.zeros(1, 3),
            r"cannot have the shape \[1, 3\] and type torch.float32: client_state has \[\d+\]",
        ),
        (
            torch.zeros(1, 3, dtype=torch.int64),
            "cannot have .* type torch.int64: client_state has .* torch.float32 for each",
        ),
    ],
)
def test_the_state_of_clients_keeps_its_shape_and_type(value: Tensor, expected: str) -> None:
    def train(self: Local, clients: ClientGroup, down: Message) -> Message:
        clients["theta"] = value
        return Message()

    raises(rf"clients\['theta'\] {expected}", Local, train=train)


def test_names_that_are_not_there_are_answered_with_those_that_are() -> None:
    def reads_state(self: Local, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": clients["tetha"]})

    def reads_message(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["tetha"]})

    raises("'tetha'.*: client_state does not return it; it returns theta", Local, train=reads_state)
    raises("this message has no tensor 'tetha'; it has theta", train=reads_message)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda network, x: network(x), "returned rows that are no probabilities; .* logits.softmax"),
        (lambda network, x: network(x).argmax(dim=1), r"returned shape \[\d+\]; expected: probabilities \["),
        (lambda network, x: network(x).softmax(dim=1)[:, :-1], r"returned shape .*, 9\]; expected: .*, 10\]"),
    ],
)
def test_predictions_must_be_probabilities(call: Callable[..., Tensor], expected: str) -> None:
    def predict(self: FedAvg, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        return clients.outputs(model, position, call, x)

    rule = FedAvg.traits.replace(predicts_by="rule")
    raises(rf"Mistaken\.predict {expected}", traits=rule, predict=predict)


def test_evaluated_models_with_parts_of_other_shapes_are_refused_at_once() -> None:
    def eval_model(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        own = torch.zeros(1, 1 + clients.ids[0])
        return Message(per_client={"theta": down["theta"], "own": own})

    raises(
        r"'own' of client 0 is torch\.float32 \[1\], of client 1 torch\.float32 \[2\]", eval_model=eval_model
    )


class Tempered(FedAvg):
    """Predicts with a temperature, which the server sends and `eval_model` shares."""

    traits = FedAvg.traits.replace(predicts_by="rule")

    def server_state(self) -> State:
        return super().server_state() | {"temperature": torch.full((1,), 2.0)}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"], "temperature": server["temperature"]})

    def eval_model(self, clients: ClientGroup, down: Message) -> Message:
        return Message(shared=dict(down.shared))

    def predict(self, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        temperature = model["temperature"][position]
        return clients.outputs(model, position, lambda network, x: network(x) / temperature, x).softmax(dim=1)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_fine_tuned_models_keep_what_else_is_evaluated(buffers: str) -> None:
    keys = ("model.name=digits_cnn", "model.batchnorm=true", f"train.buffers={buffers}")
    # after training, models are scored too
    keys += ("data.unseen_clients=0.5", "train.finetune_epochs=1", "run.eval_every=1")
    run = Run("method.name=fedavg", *keys, kind=Tempered)
    for models in (run.evaluated(), run.adapted()):
        assert (models["temperature"] == 2).all()
        theta, statistics = models["theta"], models["buffers"]
        assert len(theta) == len(statistics) > 1
        assert not torch.equal(theta[0], theta[1])
        assert not torch.equal(statistics[0], statistics[1])


@pytest.mark.parametrize(
    "weights",
    [lambda run, cohort: run.context.num_samples, lambda run, cohort: cohort.num_samples.unsqueeze(1)],
)
def test_weights_of_others_than_the_cohort_are_refused(weights: Callable[..., Tensor]) -> None:
    """Those of all clients would be normalised over all, and the first ones taken."""

    def aggregate(self: FedAvg, server: State, cohort: Cohort, up: Upload) -> None:
        server["theta"] = weighted_mean(up, "theta", weights(self, cohort))

    kind = type("Mistaken", (FedAvg,), {"aggregate": aggregate})
    with pytest.raises(
        ValueError, match=r"weights of 'theta' have the shape .*, and the cohort has 2 clients"
    ):
        Run("method.name=fedavg", *MLP, "train.participation=0.5", "train.rounds=1", kind=kind)


@pytest.mark.parametrize(
    ("axes", "values", "expected"),
    [
        (("client",), lambda _, server: 0.5, r"as a float; expected: a tensor \[4\]"),
        (("client",), lambda _, server: torch.zeros(3), r"as \[3\]; expected: a tensor \[4\]"),
        (
            ("client", "layer"),
            lambda _, server: torch.zeros(4, 9),
            r"as \[4, 9\]; expected: a tensor \[4, 2\]",
        ),
        (("client", "path"), lambda _, server: torch.zeros(4), r"as \[4\]; expected: a tensor \[4, path\]"),
    ],
)
def test_computed_values_of_a_diagnostic_have_its_axes(
    axes: tuple[str, ...], values: Callable[..., Any], expected: str
) -> None:
    wrong = Diagnostic("norm", axes, "", "", of_server=values)
    run = Run(
        "method.name=fedavg", *MLP, "train.rounds=1", kind=type("Own", (FedAvg,), {"diagnostics": (wrong,)})
    )
    with pytest.raises(TypeError, match=r"Own\.diagnostics has 'norm' " + expected):
        MethodAdapter(run.method).server_diagnostics(run.server)


def test_layers_that_leave_out_parameters_are_refused() -> None:
    def start(self: FedAvg, context: Context, params: Params) -> None:
        super(FedAvg, self).__init__(context, params)
        self.layers = self.layers[1:]

    with pytest.raises(TypeError, match=r"Few\.layers leave out parameters or have them twice"):
        Run("method.name=fedavg", *MLP, kind=type("Few", (FedAvg,), {"__init__": start}))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_statistics_of_trained_models_are_each_clients_own_beside_a_shared_part(engine: str) -> None:
    """The first client's would be all clients' otherwise."""

    def finetune(self: FedAvg, clients: ClientGroup, down: Message, epochs: int) -> Message:
        tuned = clients.sgd(down["theta"], epochs=epochs, purpose="finetune").theta
        return Message(shared={"more": torch.zeros(2)}, per_client={"theta": tuned}, num_clients=len(clients))

    kind = type("Tuning", (FedAvg,), {"finetune": finetune})
    keys = ["model.batchnorm=true", "train.rounds=1", "train.finetune_epochs=1", f"run.engine={engine}"]
    run = Run("method.name=fedavg", *keys, kind=kind)
    plain = Run("method.name=fedavg", *keys)
    assert torch.equal(run.evaluated()["buffers"], plain.evaluated()["buffers"])
    assert not torch.equal(run.evaluated()["buffers"][0], run.evaluated()["buffers"][1])
