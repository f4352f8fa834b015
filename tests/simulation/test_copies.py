"""How often a model is copied between the state of the server and the training of a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from harness import Run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfl.communication.communicator import Communicator
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
            self.add(copied)
        return result

    def add(self, copied: Tensor) -> None:
        """Count a copied tensor, if it is made of models."""
        models, rest = divmod(copied.numel(), self.size)
        self.models += models if rest == 0 else 0


@pytest.mark.parametrize(
    ("method", "copies"),
    [
        # down for all; to the start of training, to the upload; in float64 by blocks for the sum's scale,
        # and in float64 and whole numbers for the sum, which comes back the same way
        ("fedavg", 1 + 5 * CLIENTS + 2),
        # down, to the start of training, to the upload, up; the server stores it, and measures it in float64
        ("pfedla", 4 * CLIENTS + 2 * CLIENTS),
    ],
)
def test_a_model_is_copied_only_if_necessary(
    method: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(f"method.name={method}", f"data.clients={CLIENTS}", "train.rounds=1")
    counted, gradient = Copies(run.method.layout.size), LoopEngine.plain_gradient

    def uncounted(self: LoopEngine, *arguments: Any) -> Any:
        counted.pauses = True
        found = gradient(self, *arguments)
        counted.pauses = False
        return found

    gather = Communicator.gather

    def gathered(self: Communicator, send: Tensor, counts: Sequence[int]) -> Tensor | None:
        # a copy by NumPy
        counted.add(send)
        return gather(self, send, counts)

    monkeypatch.setattr(LoopEngine, "plain_gradient", uncounted)
    monkeypatch.setattr(Communicator, "gather", gathered)
    with counted:
        run.simulation._round(run.simulation.cohort(1), False)
    assert counted.models == copies
