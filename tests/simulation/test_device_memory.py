"""Plans for the free memory of a device, and a device with too little memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from harness import SMALL

from hpcfl.communication.communicator import Communicator
from hpcfl.data.shard import Shard
from hpcfl.errors import OUT_OF_MEMORY
from hpcfl.main import main
from hpcfl.methods import Method
from hpcfl.registries import load_config
from hpcfl.setup.device_memory import VECTORS, bytes_of_client, clients_at_once, state_device
from hpcfl.setup.experiment import build, load_data, make_method
from hpcfl.training.engines import BatchedEngine, LoopEngine
from hpcfl.training.scoring import BatchedScorer

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def method_of(*keys: str) -> Method:
    config = load_config(None, [*SMALL, *keys])
    return make_method(config, *load_data(config))


def full(*_: Any) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("owner", "hook", "engine"),
    [
        (LoopEngine, "plain_gradient", "loop"),
        (BatchedEngine, "gradient", "batched"),
        (BatchedScorer, "scores", "batched"),
        # its samples
        (Shard, "build", "loop"),
    ],
)
def test_a_gpu_out_of_memory_error_names_what_to_lower(
    owner: type[Any],
    hook: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(owner, hook, full)
    keys = [*SMALL, f"run.engine={engine}", "run.eval_every=1"]
    assert main([*keys, "--out", str(tmp_path / "run"), "--quiet"]) == OUT_OF_MEMORY
    printed = capsys.readouterr().err
    assert printed.startswith("hpcfl: error: the GPU of rank 0 on ")
    assert "is out of memory; try fewer ranks on a GPU, run.state=host, a smaller run.clients_at_" in printed
    assert "a smaller train.batch_size" in printed
    assert printed.count("\n") == 1


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many bytes of the GPU are free."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (num_bytes, 2 * num_bytes))

    return set_free


def test_clients_at_once_is_a_power_of_two_that_fits_into_half_of_the_free_memory(
    free: Callable[[int], None],
) -> None:
    method = method_of()
    each = bytes_of_client(method)

    def chosen(clients: float, sharing: int = 1, most: int = 1000) -> int:
        free(int(2 * clients * each))
        return clients_at_once(None, method, GPU, sharing, most)

    assert [chosen(n) for n in (0.5, 1.01, 3.9, 4.01, 100)] == [1, 1, 2, 4, 64]
    assert chosen(100, sharing=4) == 16
    assert chosen(100, most=10) == 10
    assert clients_at_once(None, method, CPU, 1, 1000) == 32
    assert clients_at_once(5, method, GPU, 1, 1000) == 5
    chain = SimpleNamespace(sequential="method.order=chain")
    assert clients_at_once(5, chain, GPU, 1, 1000) == 1  # type: ignore[arg-type]


def test_state_is_on_the_device_if_it_fits_into_a_quarter_of_the_free_memory(
    free: Callable[[int], None],
) -> None:
    method = method_of()
    each = bytes_of_client(method)
    free(64 * each)

    def chosen(state: int, sharing: int = 1, setting: str = "auto") -> torch.device:
        return state_device(setting, GPU, sharing, state)

    assert [chosen(16 * each), chosen(16 * each + 1)] == [GPU, CPU]
    assert [chosen(4 * each, 4), chosen(4 * each + 1, 4)] == [GPU, CPU]
    assert [chosen(10**15, 1, "device"), chosen(1, 1, "host")] == [GPU, CPU]
    for key in ("auto", "device", "host"):
        assert state_device(key, CPU, 1, 1) == CPU
    # what that choice allows leaves clients at once what they have without it; more takes it from them
    at_once = [clients_at_once(None, method, GPU, 1, 1000, state * each) for state in (0, 16, 17, 40, 48, 90)]
    assert at_once == [32, 32, 16, 8, 1, 1]


@pytest.mark.parametrize("name", ["fedavg", "fedmn", "pfedla"])
def test_the_memory_of_a_client_is_its_vectors_and_activations(name: str) -> None:
    large, small = (
        method_of(f"method.name={name}", "model.batchnorm=true", f"train.batch_size={size}")
        for size in (16, 8)
    )
    vectors = VECTORS * 4 * small.layout.size
    activations = [bytes_of_client(method) - vectors for method in (large, small)]
    # the output of the first convolution and its inputs, of 8 samples at the least
    assert activations[1] >= 8 * 16 * 8 * 8 * 4
    assert 1.5 < activations[0] / activations[1] <= 2


@pytest.mark.parametrize("tf32", [True, False])
def test_cudnn_adds_in_a_fixed_order_and_tf32_is_an_option(tf32: bool) -> None:
    build(load_config(None, [*SMALL, f"run.tf32={tf32}"]), Communicator())
    assert torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is tf32
