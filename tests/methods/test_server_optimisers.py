"""The server's optimisers: the equations, their reductions, and what they act on."""

from __future__ import annotations

import math

import pytest
import torch
from bits import ALIASES as FEDAVG_ALIASES
from harness import UNEQUAL, Run

from hpcfl.communication.messages import Cohort, Message
from hpcfl.config.keys import ServerConfig
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.methods._server_optimiser import ServerOptimiser
from hpcfl.methods.base import State
from hpcfl.methods.fedavg import FedAvg
from hpcfl.parameters import Layer
from hpcfl.registries import load_config

OPTIMISERS = ("momentum", "adagrad", "adam", "yogi")
AVERAGING = [name for name, method in METHODS.items() if method.traits.averages]
ALIASES = {"fedavgm": "momentum", "fedadagrad": "adagrad", "fedadam": "adam", "fedyogi": "yogi"}


def by_hand(optimiser: str, deltas: list[float], lr: float, beta1: float, beta2: float, tau: float) -> float:
    """Follow the printed equations for one number that starts at 0."""
    x, m, v = 0.0, 0.0, tau**2
    for delta in deltas:
        if optimiser == "momentum":
            m = beta1 * m + delta
            x += lr * m
            continue
        m = beta1 * m + (1 - beta1) * delta
        if optimiser == "adagrad":
            v = v + delta**2
        elif optimiser == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * math.copysign(1.0, v - delta**2)
        x += lr * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.quick
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_three_steps_equal_the_published_equations(optimiser: str) -> None:
    constants = {"lr": 0.3, "beta1": 0.8}
    constants |= {} if optimiser == "momentum" else {"tau": 0.1}
    constants |= {"beta2": 0.7} if optimiser in ("adam", "yogi") else {}
    settings = ServerConfig(optimiser=optimiser, **constants)
    # above and below v_0 = 0.01: both signs of Yogi's step
    deltas = [[0.5, -0.02], [-0.25, 0.05], [0.03, 0.4]]
    acting = ServerOptimiser(settings, ["theta"], [Layer("fc", 0, 2, 0, 0)])
    server = {"theta": torch.zeros(2)}
    server |= acting.initial(server)
    for delta in deltas:
        before = acting.before(server, {})
        # in place, as some methods do
        server["theta"] += torch.tensor(delta)
        acting.step(server, before)
    whole = {"lr": 0.3, "beta1": 0.8, "beta2": 0.7, "tau": 0.1}
    expected = [by_hand(optimiser, [row[n] for row in deltas], **whole) for n in range(2)]
    torch.testing.assert_close(server["theta"], torch.tensor(expected), rtol=1e-12, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_layer_that_no_client_sent_keeps_its_value_and_moments(optimiser: str) -> None:
    layers = [Layer("fc1", 0, 2, 0, 0), Layer("fc2", 2, 3, 0, 0)]
    acting = ServerOptimiser(ServerConfig(optimiser=optimiser), ["theta"], layers)
    # two models: of the first one fc2, of the second one fc1 is idle in the second round
    server = {"theta": torch.zeros(2, 3)}
    server |= acting.initial(server)
    rounds = [torch.ones(2, 3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])]
    for delta in rounds:
        held = {name: tensor.clone() for name, tensor in server.items()}
        before = acting.before(server, {})
        server["theta"] = server["theta"] + delta
        acting.step(server, before)
    idle = torch.tensor([[False, False, True], [True, True, False]])
    for name, tensor in server.items():
        assert torch.equal(tensor[idle], held[name][idle]), name
        # a number of a layer that moves has momentum, also where its own Delta is 0
        has_momentum = optimiser != "adagrad" and not name.startswith("server_v")
        assert (tensor[~idle] != held[name][~idle]).all() or not has_momentum


def test_the_rounding_of_what_was_sent_is_no_step_of_the_server() -> None:
    layers = [Layer("fc1", 0, 2, 0, 0), Layer("fc2", 2, 3, 0, 0)]
    acting = ServerOptimiser(ServerConfig(optimiser="momentum"), ["theta"], layers)
    server = {"theta": torch.tensor([1.0, 2.0, 3.0])}
    server |= acting.initial(server)
    before = acting.before(server, {"theta": torch.tensor([1.25, 2.0, 2.5])})
    # clients move fc1 by 1 from what they have received, and do not send fc2
    server["theta"] += torch.tensor([1.0, 1.0, 0.0])
    acting.step(server, before)
    assert server["theta"].tolist() == [2.0, 3.0, 3.0]
    assert server["server_m/theta"].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "tensor", "keys"),
    [
        (
            "fedmn",
            "theta",
            ["method.architecture=[2,2]", "method.pretrain_rounds=1", "method.router_lr=1e-12"],
        ),
        ("pfedmb", "branches", []),
        ("fedper", "theta", []),
    ],
)
@pytest.mark.parametrize("codec", ["int8", "float16"])
def test_rounding_of_a_model_that_is_sent_in_parts_is_no_step_either(
    name: str, tensor: str, keys: list[str], codec: str
) -> None:
    """Clients do not move."""
    coded = [f"comm.codec={codec}", "server.optimiser=adam", "train.lr=1e-12", "train.rounds=3", *keys]
    run = Run(f"method.name={name}", *coded)
    start = Run(f"method.name={name}", "train.lr=1e-12", "train.rounds=3", *keys).server[tensor]
    assert run.server[f"server_m/{tensor}"].abs().max() < 1e-7
    torch.testing.assert_close(run.server[tensor], start, rtol=0, atol=1e-5)


def test_a_method_that_sends_another_model_than_the_server_has_steps_from_the_server_s() -> None:
    """Momentum with lr 1 and without memory is the method's own step."""

    def download(self: FedAvg, server: State, cohort: Cohort) -> Message:
        return Message(shared={"theta": server["theta"] + 0.5})

    ahead = type("Ahead", (FedAvg,), {"download": download})
    keys = ["method.name=fedavg", "train.rounds=2"]
    plain = Run(*keys, kind=ahead)
    run = Run(*keys, "server.optimiser=momentum", "server.beta1=0", "server.lr=1", kind=ahead)
    torch.testing.assert_close(run.server["theta"], plain.server["theta"])


@pytest.mark.usefixtures("double")
def test_the_server_steps_along_the_mean_difference_of_its_clients() -> None:
    """A round of FedAdam, worked out from FedAvg's mean; running statistics are averaged as in FedAvg."""
    keys = ["train.rounds=1", "model.batchnorm=true", *UNEQUAL]
    first, run = (Run(f"method.name={name}", *keys) for name in ("fedavg", "fedadam"))
    start = first.method.context.initial_parameters()
    delta = first.server["theta"] - start
    m, v = 0.1 * delta, 0.99e-6 + 0.01 * delta.square()
    expected = start + 0.01 * m / (v.sqrt() + 1e-3)
    assert torch.equal(run.server["buffers"], first.server["buffers"])
    torch.testing.assert_close(run.server["theta"], expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(run.server["server_m/theta"], m, rtol=1e-10, atol=1e-16)
    torch.testing.assert_close(run.server["server_v/theta"], v, rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize("method", AVERAGING)
def test_every_method_whose_server_averages_accepts_an_optimiser(method: str) -> None:
    keys = ["train.rounds=2", "data.clients=2", "data.per_client=16", "model.batchnorm=true"]
    # its hypernetwork is the second of its averages
    keys += ["method.hyper_head=true"] if method == "fedrod" else []
    run = Run(*keys, f"method.name={method}", "server.optimiser=momentum")
    for name in run.method.traits.averages:
        moment = run.server[f"server_m/{name}"]
        assert moment.shape == run.server[name].shape
        assert moment.abs().sum() > 0


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(AVERAGING)))
def test_a_method_whose_server_averages_nothing_refuses_an_optimiser(method: str) -> None:
    with pytest.raises(UserError, match=rf"server\.optimiser=adam does not go with method\.name={method}"):
        Run(f"method.name={method}", "server.optimiser=adam")


@pytest.mark.quick
@pytest.mark.parametrize("method", ALIASES)
def test_names_of_methods_set_the_optimiser(method: str) -> None:
    assert load_config(None, [f"method.name={method}"]).server.optimiser == ALIASES[method]
    assert load_config(None, [f"method.name={method}", "server.optimiser=none"]).server.optimiser is None


@pytest.mark.quick
@pytest.mark.parametrize("method", FEDAVG_ALIASES)
def test_other_names_of_fedavg_have_no_own_code(method: str) -> None:
    """Tests of every method leave them out."""
    found = METHODS[method]
    assert found.__bases__ == (METHODS["fedavg"],)
    assert {name for name in vars(found) if name[0] != "_"} <= {"name", "summary", "privacy_units", "traits"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["server.lr=2"], r"server\.lr=2\.0 needs server\.optimiser=.*; set"),
        (
            ["server.optimiser=momentum", "server.tau=1"],
            r"server\.tau=1\.0 needs .*=adagrad or adam or yogi; set",
        ),
        (["server.optimiser=adagrad", "server.beta2=0.9"], r"server\.beta2=0\.9 needs .*adam or yogi"),
        (["server.optimiser=sgd"], r"server\.optimiser=sgd is invalid; allowed: momentum, adagrad"),
        (["server.optimiser=adam", "server.beta1=1"], r"server\.beta1=1 is invalid; allowed"),
    ],
)
def test_keys_that_do_nothing_or_are_impossible_are_refused(keys: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load_config(None, ["method.name=fedavg", *keys])
