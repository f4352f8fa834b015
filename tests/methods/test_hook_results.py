"""Mistakes in hooks that would spoil results or a resume: the hook, the tensor and what to do are named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import differing, run_here, run_until_time_is_up
from harness import MLP, SMALL, Run, make_network
from processes import Mpirun
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from hpcfl.communication.aggregation import weighted_mean
from hpcfl.communication.messages import Cohort, Message
from hpcfl.communication.upload import Upload
from hpcfl.errors import FINISHED, STOPPED, UserError
from hpcfl.methods import METHODS
from hpcfl.methods.base import Context, Method, Params, State
from hpcfl.methods.diagnostics import Diagnostic
from hpcfl.methods.fedavg import FedAvg
from hpcfl.methods.fedem import FedEM
from hpcfl.methods.fedmn import FedMN
from hpcfl.methods.local import Local
from hpcfl.methods.pfedla import PFedLA
from hpcfl.training.batches import Batch
from hpcfl.training.client_group import ClientGroup
from hpcfl.training.forward import Forward
from hpcfl.training.optimiser import Trained


def as_network(theta: Tensor) -> None:
    """Train a network of one's own from a model, which then shares its memory."""
    network = make_network("mlp", hidden=[16])
    vector_to_parameters(theta, network.parameters())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.sub_(0.1)


def raises(expected: str, base: type[Method] = FedAvg, *keys: str, **hooks: Any) -> None:
    """Assert that a run whose method has these hooks ends with this error."""
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError), match=expected):
        run_with(base, *MLP, *keys, **hooks)


def run_with(base: type[Method] = FedAvg, *keys: str, **hooks: Any) -> Run:
    """Return a run whose method has these hooks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, base.name, type("Mistaken", (base,), hooks))
        return Run(f"method.name={base.name}", *keys)


NOT_IN_NUMPY = torch.zeros(4, dtype=torch.bfloat16)
TRAINED = Trained(torch.zeros(1, 3), torch.ones(1))


@pytest.mark.parametrize(
    ("hook", "value", "expected"),
    [
        ("eval_model", {"theta": torch.zeros(1, 3)}, r"eval_model returned a dict; return Message\("),
        ("train", None, r"train returned a NoneType; return Message\("),
        ("train", Message({}, {"theta": TRAINED}), r"is a Trained; give clients\.sgd\(\.\.\.\)\.theta$"),
        ("train", Message(per_client={"theta": torch.zeros(2, 3)}), r"'theta' of shape \[2, 3\] for 1 c"),
        ("train", Message(per_client={"theta": torch.zeros(1, 3)}), r"'theta' of shape \[1, 3\] and type to"),
        ("train", Message(per_client={"theta": np.zeros((1, 3))}), "'theta' is a ndarray; give a torch.T"),
        ("client_state", None, "client_state returned a NoneType; return a dictionary of tensors by name"),
        (
            "client_state",
            {"h": torch.zeros(3)},
            r"client_state returned 'h' of shape \[3\] for.*a row to each$",
        ),
        ("client_state", {0: torch.zeros(4)}, "a tensor is named 0; names are words"),
        ("server_state", {"/h": torch.zeros(4)}, "a tensor is named '/h'; names are"),
        ("server_state", {"m": 0.5}, "'m' is a float; give a torch.Tensor"),
        ("server_state", {"m": torch.tensor(0.5)}, "'m' is a single number; .* such as torch.zeros"),
        ("server_state", {"m": NOT_IN_NUMPY}, "'m' is of type torch.bfloat16"),
        ("server_state", {"a": torch.zeros(2), "a/b": torch.zeros(2)}, "'a' and 'a/b' exclude each other"),
        (
            "download",
            Message(per_client={"theta": torch.zeros(3, 3)}),
            r"'theta' of shape \[3, 3\] for 4 .* or under",
        ),
        ("download", Message({"x": NOT_IN_NUMPY}), "'x' is of type torch.bfloat16 .* hold dense tensors"),
        ("download", Message(shared={"theta": 1.0}), "'theta' is a float; give a torch.Tensor"),
        ("download", Message({"x": torch.zeros(1)}, {"x": torch.zeros(4, 1)}), "returned x both as shared a"),
        ("train", Message(layer_mask=torch.ones(2) > 0), "train returned a Tensor; return a dictionary"),
        ("train", Message(shared={"x": torch.zeros(3)}), "returned x as shared; return them per_client"),
        ("train", Message({}, {"x": torch.ones(1, 2, requires_grad=True)}), "'x' has a graph for gradients"),
        ("client_state", {"buffers": torch.zeros(4, 2)}, "'buffers', which train.buffers=local keeps"),
        ("aggregate", {}, "aggregate returned a dict, which is not used; write into server, as in"),
        ("end_round", {}, "end_round returned a dict, which is not used; write into server, as in"),
        ("eval_model", Message(), "eval_model returned nothing, and no theta; return the models to score"),
    ],
)
def test_a_hook_with_a_wrong_return_value_is_named(hook: str, value: object, expected: str) -> None:
    raises(rf"Mistaken\.{hook}.* {expected.removeprefix(f'{hook} ')}", **{hook: lambda *_: value})


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("thetta", torch.ones(2) > 0, "of 'thetta', which is not sent; sent: theta"),
        ("theta", torch.ones(3) > 0, r"shape \[3\] .*; expected: torch.bool of shape \[2\], or"),
        ("theta", torch.ones(2), r"of shape \[2\] and type torch.float32; expected: torch.bool"),
        ("few", torch.ones(2) > 0, "'few', which does not consist of layers; expected: "),
    ],
)
def test_a_mask_that_does_not_fit_its_tensor_is_refused(name: str, mask: Tensor, expected: str) -> None:
    def masked(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        few = {"few": torch.zeros(len(clients), 3)} if name == "few" else {}
        return Message(per_client={"theta": down["theta"]} | few, layer_mask={name: mask})

    raises(rf"Mistaken\.train returned a layer_mask .*{expected}", train=masked)


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
    (torch.zeros(1, 2, 3), torch.zeros(1, 3, 2), r"of client 0 is torch.float32 \[2, 3\], .* \[3, 2\]"),
    (torch.zeros(1, 2), None, r"of client 0 is torch.float32 \[2\], of client 1 missing"),
    (None, torch.zeros(1, 2), r"of client 0 is missing, of client 1 torch.float32 \[2\]"),
]


@pytest.mark.parametrize(("of_even", "of_odd", "expected"), DIFFERENT_UPLOADS)
def test_clients_that_send_different_tensors_are_named(
    of_even: Tensor | None, of_odd: Tensor | None, expected: str
) -> None:
    same = "hooks must return the same tensors for all clients, and"
    raises(f"{same} 'sent' {expected}", train=of_parity(of_even, of_odd))


def test_clients_that_send_different_layers_are_named() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        mask = torch.tensor([True, clients.ids[0] == 0])
        return Message(per_client={"theta": down["theta"]}, layer_mask={"theta": mask})

    raises(r"client 0 is .* with the layers \[0, 1\], of client 1 .* the layers \[0\]", train=train)


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


CHANGED = "changed 'theta' of its message in place, which others read too"


@pytest.mark.parametrize(
    "change", [lambda w: w.mul_(0.9), lambda w: w.data.mul_(0.9), lambda w: w.numpy().fill(0), as_network]
)
def test_a_download_that_training_changes_in_place_is_refused(change: Callable[[Tensor], Any]) -> None:
    """Also by means that torch does not count."""

    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        trained = clients.sgd(down["theta"]).theta
        change(down["theta"][0])
        return Message(per_client={"theta": trained})

    raises(rf"Mistaken\.train {CHANGED}", train=train)


def test_a_download_that_an_evaluation_changes_in_place_is_refused() -> None:
    def eval_model(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        down["theta"][0, :3] = 0
        return Message(shared={"theta": down.shared["theta"]})

    raises(rf"Mistaken\.eval_model {CHANGED}, .* such as \.clone\(\)", eval_model=eval_model)


def test_an_upload_that_its_scoring_changes_is_refused() -> None:
    expected = r"Mistaken\.model_after_training changed 'theta' of its message"
    halved = {"model_after_training": lambda *given: Message({}, {"theta": given[-1]["theta"].mul_(0.5)})}
    raises(expected, **halved)


def test_tensors_whose_changes_torch_does_not_count_may_be_in_the_state() -> None:
    @torch.inference_mode()
    def aggregate(self: FedAvg, server: State, cohort: Cohort, up: Upload) -> None:
        FedAvg.aggregate(self, server, cohort, up)

    assert run_with(FedAvg, *MLP, "train.rounds=2", aggregate=aggregate).server["theta"].is_inference()


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


def refuses_diagnostic(folder: Path, expected: str, axes: str, name: str = "own", **given: Any) -> None:
    """Assert that a run of FedAvg with a diagnostic of its own ends with this error."""
    one = Diagnostic(name, tuple(axes.split()), "", "", **given)
    words = [*SMALL, *MLP, "method.name=fedavg", "train.rounds=2", "run.eval_every=1", "run.report=false"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "fedavg", type("Watched", (FedAvg,), {"diagnostics": (one,)}))
        with pytest.raises(TypeError, match=expected):
            run_here(folder / "run", words)


@pytest.mark.parametrize(
    ("axes", "values", "expected"),
    [
        ("client", lambda server: server["theta"].mul_(0.9)[:4], r"diagnostics changed server\['theta'\]"),
        ("client", lambda server: NOT_IN_NUMPY, r"Watched\.diagnostics: 'own' is of type torch\.bfloat16"),
        ("client", lambda server: 0.5, r"Watched\.diagnostics has 'own' as a float; expected: a tensor \[4"),
        ("client", lambda server: torch.zeros(3), r"as \[3\]; expected: a tensor \[4\]"),
        ("client layer", lambda server: torch.zeros(4, 9), r"as \[4, 9\]; expected: a tensor \[4, 2\]"),
        ("client path", lambda server: torch.zeros(4), r"as \[4\]; expected: a tensor \[4, path\]"),
    ],
)
def test_computed_values_of_a_diagnostic_have_its_axes_and_change_no_state(
    axes: str, values: Callable[[State], Any], expected: str, tmp_path: Path
) -> None:
    refuses_diagnostic(tmp_path, expected, axes, of_server=lambda _, server: values(server))


@pytest.mark.parametrize("name", ["accuracy", "loss", "loss_unseen"])
def test_a_diagnostic_has_no_name_of_a_figure_of_all_runs(name: str, tmp_path: Path) -> None:
    expected = f"fedavg: the diagnostic {name} has the name of a figure of all runs"
    refuses_diagnostic(tmp_path, expected, "client", name, of_server=lambda *_: torch.ones(4))


def test_a_diagnostic_has_one_shape(tmp_path: Path) -> None:
    def growing(_: FedAvg, group: ClientGroup) -> Tensor:
        return torch.ones(len(group), 1 + group.round)

    expected = r"own has the shape \[\d, 3\], and \[\d, 2\] in earlier evaluations"
    refuses_diagnostic(tmp_path, expected, "client component", of_clients=growing)


class Twins(FedAvg):
    """Keeps one model under two names, and changes one of them in place."""

    def server_state(self) -> State:
        theta = self.context.initial_parameters()
        return {"theta": theta, "last": theta}

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        server["theta"].mul_(0.5)
        if cohort.round == 2:
            server["last"] = server["theta"]


class Restless(FedAvg):
    """Draws from the own generators of torch, NumPy and Python wherever it may."""

    def __init__(self, context: Context, params: Params) -> None:
        super().__init__(context, params)
        self.start = torch.rand(())

    def server_state(self) -> State:
        return {"theta": super().server_state()["theta"] * self.start + torch.rand(())}

    def download(self, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"] + torch.rand(())})

    def train(self, clients: ClientGroup, down: Message) -> Message:
        return Message(per_client={"theta": down["theta"] + np.random.rand() + torch.rand(())})

    def aggregate(self, server: State, cohort: Cohort, up: Upload) -> None:
        super().aggregate(server, cohort, up)
        server["theta"] += torch.rand(())

    def end_round(self, server: State, cohort: Cohort) -> None:
        server["theta"] += torch.rand(()) * np.random.rand() * random.random()


class Watched(FedAvg):
    """Has a diagnostic with a graph for gradients and of random numbers."""

    diagnostics = (
        Diagnostic(
            *("own", ("client",), "", ""),
            of_server=lambda *_: torch.rand(4, requires_grad=True) + float(np.random.rand()),
        ),
    )


@pytest.mark.parametrize("kind", [Twins, Restless, Watched])
def test_a_resumed_run_has_the_same_numbers(
    kind: type[Method], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if tensors are in one memory, or hooks draw from generators that are elsewhere by then."""
    monkeypatch.setitem(METHODS, "fedavg", kind)
    keys = [*SMALL, *MLP, "method.name=fedavg", "train.rounds=4", "run.eval_every=1", "run.report=false"]
    assert run_here(tmp_path / "whole", keys) == FINISHED
    torch.rand(()), np.random.rand(), random.random()
    for _ in range(3):
        assert run_until_time_is_up(tmp_path / "resumed", keys) == STOPPED
    assert run_here(tmp_path / "resumed", keys) == FINISHED
    assert not differing(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.parametrize("shape", [(7,), (3, 4)])
def test_a_diagnostic_in_the_server_s_state_has_an_entry_for_each_client(shape: tuple[int, ...]) -> None:
    own = Diagnostic("own", ("client", "component")[: len(shape)], "", "")
    expected = rf"has 'own' as \[{', '.join(map(str, shape))}\]; expected: a tensor \[4"
    hooks = {"server_state": lambda method: FedAvg.server_state(method) | {"own": torch.zeros(shape)}}
    raises(expected, diagnostics=(own,), **hooks)


def test_a_diagnostic_that_nothing_records_is_refused() -> None:
    nowhere = (Diagnostic("nowhere", ("client",), "", ""),)
    raises(r"diagnostics names 'nowhere', which neither server_state nor client_state", diagnostics=nowhere)


def test_clients_that_start_with_one_tensor_for_all_have_rows_of_their_own() -> None:
    start = torch.zeros(2)

    def client_state(self: FedAvg, clients: Sequence[int]) -> State:
        return {"sum": start.expand(len(clients), 2)}

    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        clients["sum"] = clients["sum"] + torch.tensor(clients.ids).view(-1, 1)
        return FedAvg.train(self, clients, down)

    run = run_with(FedAvg, *MLP, "train.rounds=2", client_state=client_state, train=train)
    assert run.clients["sum"].tolist() == [[0, 0], [2, 2], [4, 4], [6, 6]]
    # also where a rank has one client, of whom a view would be as it is written
    view = run.adapter.initial_clients([0])["sum"]
    assert view.untyped_storage().data_ptr() != start.untyped_storage().data_ptr()


def test_a_worker_without_clients_asks_for_no_empty_state() -> None:
    def client_state(self: FedAvg, clients: Sequence[int]) -> State:
        return {"id": torch.stack([torch.tensor(float(client)) for client in clients])}

    run = run_with(FedAvg, *MLP, client_state=client_state)
    assert run.adapter.initial_clients(range(0))["id"].shape == (0,)


@pytest.mark.parametrize("hook", ["train", "eval_model"])
def test_a_hook_that_every_method_needs_is_missed_before_training(hook: str) -> None:
    with pytest.raises(TypeError, match=f"^Mistaken needs the hook {hook}$"):
        run_with(FedAvg, *MLP, **{hook: getattr(Method, hook)})


def train_with(loss: Callable[[Forward, State, Batch], Tensor]) -> Callable[..., Message]:
    """Return FedAvg's `train` on an own loss."""

    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        gradient = clients.gradient_with_constants(loss, lambda batch: {})
        return Message(per_client={"theta": clients.sgd(down["theta"], gradient=gradient).theta})

    return train


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_may_have_an_axis_of_one_number(engine: str) -> None:
    def loss(forward: Forward, tensors: State, batch: Batch) -> Tensor:
        return forward.cross_entropy(forward.logits(tensors["theta"], batch.x), batch.y).view(1)

    keys = (*MLP, f"run.engine={engine}")
    own, plain = run_with(FedAvg, *keys, train=train_with(loss)), run_with(FedAvg, *keys)
    torch.testing.assert_close(own.server["theta"], plain.server["theta"])


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_that_is_no_number_is_refused(engine: str) -> None:
    train = train_with(lambda forward, tensors, batch: forward.logits(tensors["theta"], batch.x).sum(dim=1))
    expected = r"a loss of one client has the shape \[\d+\]; return one number: \.mean\(\)"
    raises(expected, FedAvg, f"run.engine={engine}", train=train)


def test_a_response_that_changes_a_type_of_the_state_is_refused() -> None:
    def server_response(self: FedMN, server: State, cohort: Cohort, requests: State) -> Message:
        response = FedMN.server_response(self, server, cohort, requests)
        server["theta"] = server["theta"].double()
        return response

    expected = r"Mistaken\.server_response changed 'theta' from .* torch\.float64"
    raises(expected, FedMN, server_response=server_response)


@pytest.mark.parametrize(
    "number", [lambda ids: torch.arange(len(ids)), lambda ids: torch.zeros(len(ids), 1 + ids[0])]
)
def test_a_state_that_depends_on_the_group_is_refused(number: Callable[[Sequence[int]], Tensor]) -> None:
    expected = "returned another 'number' for client 3 alone than for it"
    raises(expected, client_state=lambda method, clients: {"number": number(clients)})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(1, 3), r"the shape \[1, 3\] and type torch.float32: client_state has \[\d+\]"),
        (torch.zeros(1, 3).long(), ".* type torch.int64: client_state has .* torch.float32 for each"),
    ],
)
def test_the_state_of_clients_keeps_its_shape_and_type(value: Tensor, expected: str) -> None:
    def train(self: Local, clients: ClientGroup, down: Message) -> Message:
        clients["theta"] = value
        return Message()

    raises(rf"clients\['theta'\] cannot have {expected}", Local, train=train)


def test_names_that_are_not_there_are_answered_with_those_that_are() -> None:
    expected = "'tetha'.*: client_state does not return it; it returns theta"
    raises(expected, Local, train=lambda method, clients, down: clients["tetha"])
    expected = "this message has no tensor 'tetha'; it has theta"
    raises(expected, train=lambda method, clients, down: down["tetha"])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda network, x: network(x), "returned rows that are not probabilities; .* logits.softmax"),
        (lambda network, x: network(x).argmax(dim=1), r"returned shape \[\d+\]; expected: probabilities \["),
        (lambda network, x: network(x).softmax(dim=1)[:, :-1], r"returned shape .*, 9\]; expected: .*, 10\]"),
    ],
)
def test_predictions_must_be_probabilities(call: Callable[..., Tensor], expected: str) -> None:
    def predict(_: FedAvg, clients: ClientGroup, model: Message, position: int, x: Tensor) -> Tensor:
        return clients.outputs(model, position, call, x)

    rule = FedAvg.traits.replace(predicts_by="rule")
    raises(rf"Mistaken\.predict {expected}", traits=rule, predict=predict)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda _, clients, *rest: clients["theta"], r"clients\['theta'\]"),
        (lambda _, clients, *rest: clients.class_counts(10), "the clients' labels"),
        (lambda _, clients, *rest: clients.samples("train", 0), "the clients' samples"),
        (lambda _, clients, *rest: clients.num_samples, r"clients\.num_samples"),
    ],
)
def test_predictions_are_made_from_the_model_alone(read: Callable[..., object], expected: str) -> None:
    """`predict` of a finished run has nothing else."""
    rule = Local.traits.replace(predicts_by="rule")
    expected = f"predict reads {expected}, which a finished run does not have; let eval_model return what"
    raises(expected, Local, traits=rule, predict=read)


def test_evaluated_models_with_parts_of_other_shapes_are_refused_at_once() -> None:
    def eval_model(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        own = torch.zeros(1, 1 + clients.ids[0])
        return Message(per_client={"theta": down["theta"], "own": own})

    raises(r"'own' of client 0 is .* \[1\], of client 1 torch\.float32 \[2\]", eval_model=eval_model)


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

    expected = r"weights of 'theta' have the shape .*, and the cohort has 2 clients"
    raises(expected, FedAvg, "train.participation=0.5", aggregate=aggregate)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_statistics_of_trained_models_are_each_clients_own_beside_a_shared_part(engine: str) -> None:
    """The first client's would be all clients' otherwise."""

    def finetune(self: FedAvg, clients: ClientGroup, down: Message, epochs: int) -> Message:
        tuned = clients.sgd(down["theta"], epochs=epochs, purpose="finetune").theta
        return Message(shared={"more": torch.zeros(2)}, per_client={"theta": tuned}, num_clients=len(clients))

    keys = ("model.batchnorm=true", "train.rounds=1", "train.finetune_epochs=1", f"run.engine={engine}")
    own = run_with(FedAvg, *keys, finetune=finetune).evaluated()["buffers"]
    assert torch.equal(own, run_with(FedAvg, *keys).evaluated()["buffers"])
    assert not torch.equal(own[0], own[1])


# What a class declares


ALPHA = Diagnostic("alpha", ("client",), "", "")


@pytest.mark.parametrize(
    ("base", "member", "value", "expected"),
    [
        (FedAvg, "as_module", nn.Linear, "predicts_by=network needs neither predict nor as_module of its"),
        (FedEM, "predict", FedAvg.predict, "predicts_by=module needs both predict and as_module, from the"),
        (FedAvg, "traits", FedAvg.traits.replace(predicts_by="rule"), "predicts_by=rule needs predict of"),
        (FedAvg, "trian", FedAvg.train, r"Mistaken\.trian is not a hook; did you mean train\? If not, name"),
        (FedAvg, "train", lambda self, clients: clients, r"train does not take \(self, clients, down\)"),
        (FedAvg, "diagnostic", (), r"Mistaken\.diagnostic is not a hook; did you mean diagnostics\?"),
        (FedAvg, "local_gradient", None, r"Mistaken\.local_gradient is not a hook; did you mean finetune"),
        (FedAvg, "client_request", FedAvg.train, "client_request is never called; derive the class from Two"),
        (FedAvg, "traits", FedAvg.traits.replace(eval_after="trainig"), r"traits\.eval_after cannot be 'tra"),
        (FedAvg, "traits", FedAvg.traits.replace(averages="theta"), r"traits\.averages cannot be 'theta': "),
        (FedAvg, "needs_body", True, r"needs_body is not a hook; did you mean traits\.needs_body\?"),
        (FedAvg, "name", "a/b", "name cannot be 'a/b'; allowed: letters, digits and _"),
        (FedAvg, "privacy_units", ("clients",), "privacy_units has 'clients'; allowed: client, sample"),
        (FedAvg, "traits", FedAvg.traits.replace(refuses={"lrr": "which"}), r"traits\.refuses has 'lrr'"),
        (FedAvg, "traits", FedAvg.traits.replace(train_defaults={"x": 1}), r"traits\.train_defaults has 'x'"),
        (FedAvg, "diagnostics", (ALPHA, ALPHA), "two diagnostics of one name: alpha, alpha"),
        (FedAvg, "diagnostics", ALPHA, r"Mistaken\.diagnostics is not a tuple; write \(Diagnostic"),
        (FedAvg, "traits", {"eval_after": "training"}, r"Mistaken\.traits is not a Traits; write traits = "),
    ],
)
def test_a_class_with_contradictory_hooks_is_refused(
    base: type[Method], member: str, value: object, expected: str
) -> None:
    raises(expected, base, **{member: value})


def test_the_first_axis_of_a_diagnostic_is_clients() -> None:
    with pytest.raises(ValueError, match="must be 'client'"):
        Diagnostic("alpha", ("layer", "client"), "", "")
    with pytest.raises(ValueError, match="'alpha' has the axis 'rank'; allowed: client, layer, branch, "):
        Diagnostic("alpha", ("client", "rank"), "", "")


@pytest.mark.parametrize(
    ("axes", "expected"),
    [(("client",), r"\[1\], by its axes \('client',"), (("client", "layer"), r"\[1, 2\]")],
)
def test_a_diagnostic_with_other_axes_than_its_values_is_refused_at_once(
    axes: tuple[str, ...], expected: str
) -> None:
    gates = {"client_state": lambda method, clients: {"alpha": torch.zeros(len(clients), 3)}}
    expected = rf"'alpha' as \[1, 3\]; expected: a tensor {expected}"
    raises(expected, diagnostics=(replace(ALPHA, axes=axes),), **gates)
    run_with(FedAvg, *MLP, diagnostics=(replace(ALPHA, axes=("client", "component")),), **gates)


def test_averages_are_in_the_state_of_the_server() -> None:
    expected = r"Mistaken\.traits\.averages names mean, which server_state does not"
    raises(expected, traits=FedAvg.traits.replace(averages=("mean",)))


@pytest.mark.warns
def test_a_codec_sends_differences_only_of_tensors_that_the_method_names() -> None:
    keys = ("train.rounds=1", "comm.codec=topk", "comm.topk_ratio=0.01")
    plain = run_with(FedAvg, *keys).simulation.ledger.client_bytes
    whole = run_with(FedAvg, *keys, traits=FedAvg.traits.replace(differences=()))
    assert whole.simulation.ledger.client_bytes[:, 1].sum() > 10 * plain[:, 1].sum()


# What hooks may not do


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda count: [random.random()] * count])
def test_numbers_of_clients_that_depend_on_ranks_are_refused(draw: Callable[[int], Any]) -> None:
    expected = r"Mistaken\.client_state drew from torch's, NumPy's or Python's own"
    raises(expected, client_state=lambda method, clients: {"start": torch.as_tensor(draw(len(clients)))})


@pytest.mark.parametrize("hook", ["train", "aggregate"])
def test_an_attribute_that_a_round_sets_is_refused(hook: str) -> None:
    def remember(self: FedAvg, *arguments: object) -> object:
        self.last = arguments
        return getattr(FedAvg, hook)(self, *arguments)

    raises(r"Mistaken\.last cannot be set in a round: a resumed run and othe", **{hook: remember})


@pytest.mark.parametrize("hook", ["train", "eval_model"])
def test_running_statistics_of_another_shape_are_refused(hook: str) -> None:
    def flatten(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        message = getattr(FedAvg, hook)(self, clients, down)
        clients.buffers = clients.buffers[0]
        return message

    expected = rf"Mistaken\.{hook} set clients\.buffers of shape \[96\]; expected: \[1, 96\]"
    with pytest.raises(ValueError, match=expected):
        run_with(FedAvg, "model.batchnorm=true", **{hook: flatten})


def test_the_traffic_of_an_own_tensor_is_counted_by_its_name() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        mood = Message(per_client={"mood": torch.zeros(len(clients), 2)}, num_clients=len(clients))
        return FedAvg.train(self, clients, down) | mood

    keys = (*MLP, "train.rounds=1")
    more = run_with(FedAvg, *keys, train=train).bytes_by_client - run_with(FedAvg, *keys).bytes_by_client
    assert more.tolist() == [[0, 8]] * len(more)


def test_scoring_an_upload_does_not_change_it() -> None:
    keys = ("model.batchnorm=true", "train.buffers=local", "run.eval_every=1")
    own = run_with(FedAvg, *keys, model_after_training=lambda method, clients, down, up: up)
    assert torch.equal(own.bytes_by_client, run_with(FedAvg, *keys).bytes_by_client)


def test_a_network_that_does_not_match_its_layout_is_reported() -> None:
    def careless(self: FedAvg, context: Context, params: Params) -> None:
        super(FedAvg, self).__init__(context, params)
        self.network = nn.Linear(3, 2)

    raises(r"Mistaken set network after .* return it from make_network", __init__=careless)


def test_a_network_of_a_method_with_other_outputs_is_refused() -> None:
    def small(self: FedAvg) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    with pytest.raises(
        UserError, match=r"fedavg, make_network: .* \[2, 3\] for two .*: \[2, 10\], the logits"
    ):
        run_with(make_network=small)


def test_layers_that_leave_out_parameters_are_refused() -> None:
    def start(self: FedAvg, context: Context, params: Params) -> None:
        super(FedAvg, self).__init__(context, params)
        self.layers = self.layers[1:]

    raises(r"Mistaken\.layers leave out parameters or have them twice", __init__=start)


def test_an_exit_in_a_hook_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(FedAvg, "train", leave)
    with pytest.raises(RuntimeError, match=r"own code ends the process by sys\.exit\(0\); raise an error"):
        run_here(tmp_path / "run", [*SMALL, *MLP, "method.name=fedavg"])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("hook", "key", "expected"),
    [
        ("eval_model", "train.finetune_epochs=0", "cannot be written here"),
        ("finetune", "train.finetune_epochs=1", "cannot be written here"),
        ("new_client_model", "data.unseen_clients=0.5", r"inside `clients\.temporary_state\(\)`"),
    ],
)
def test_an_evaluation_cannot_write_the_state_of_clients(
    hook: str, key: str, expected: str, in_place: bool
) -> None:
    def write(self: Local, clients: ClientGroup, *_: object) -> Message:
        if in_place:
            clients["theta"].add_(1)
        else:
            clients["theta"] = clients["theta"] + 1
        return Message(per_client={"theta": clients["theta"]})

    raises(expected, Local, key, **{hook: write})


def test_an_upload_without_a_model_is_refused_with_what_is_missing() -> None:
    def train(self: FedAvg, clients: ClientGroup, down: Message) -> Message:
        assert clients.round == 0
        return Message(per_client={"update": clients.sgd(down["theta"]).theta - down["theta"]})

    raises(r"uploads update, and no theta: name .* theta, or override model_after_training", train=train)


def test_the_sharded_state_waits_for_the_upload() -> None:
    hooks = {"aggregate": lambda method, *_: method.sharded.products(torch.zeros(4, method.layout.size))}
    raises("read all of the upload, or drain it", PFedLA, "method.server=sharded", **hooks)
