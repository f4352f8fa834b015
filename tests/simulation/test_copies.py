"""How often a model is copied on its way from the server's state to a client's training and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfl.communication.world import World
from hpcfl.training.engines import LoopEngine

COPIES = ("clone", "copy_", "cat", "stack", "index", "index_put_", "index_select", "_to_copy")
"""Operations that copy numbers."""

CLIENTS = 4


class Copies(TorchDispatchMode):
    """Counts how many models of `size` numbers are copied, unless it pauses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.models, self.pauses = size, 0, False

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **(kwargs or {}))
        name = call.overloadpacket.__name__
        if name in COPIES and not self.pauses:
            copied: Tensor = args[2] if name == "index_put_" else result
            models, rest = divmod(copied.numel(), self.size)
            self.models += models if rest == 0 else 0
        return result


@pytest.mark.parametrize(
    ("method", "copies"),
    [
        # down for all, to the start of training, to the upload
        ("fedavg", 1 + 2 * CLIENTS),
        # down, to the start of training, to the upload; the server stores it, and measures it in float64
        ("pfedla", 3 * CLIENTS + 2 * CLIENTS),
    ],
)
def test_a_round_copies_a_model_three_times_on_its_way(
    method: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(f"method.name={method}", f"data.clients={CLIENTS}", "train.rounds=1")
    counted, gradient = Copies(run.method.layout.size), LoopEngine.gradient

    def uncounted(self: LoopEngine, *arguments: Any) -> Any:
        counted.pauses = True
        found = gradient(self, *arguments)
        counted.pauses = False
        return found

    monkeypatch.setattr(LoopEngine, "gradient", uncounted)
    with counted:
        run.simulation._round(run.simulation.cohort(1), False)
    assert counted.models == copies


def test_a_serial_world_gathers_without_a_copy() -> None:
    rows = torch.arange(3.0)
    assert World().gather(rows, [3]) is rows
