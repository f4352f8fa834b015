"""Models that stay with the workers: the same bits on any number of ranks, and the whole server's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bits import differing, run_here, run_until_time_is_up, tiny_settings
from harness import Run
from processes import run_in_one_world

from hpcfl.communication import sharded
from hpcfl.errors import FINISHED, STOPPED

RANKS = 4
BLOCKS = (4, 3)
"""Clients of a block, and members at once: shards of few clients have several."""
NUM_CLIENTS = 19
MODEL_NUMBERS = 13_802

CASES = {
    "pfedla": ["method.name=pfedla"],
    "heurpfedla": ["method.name=heurpfedla", "method.k=2", "train.buffers=mixed"],
    "coded": ["method.name=heurpfedla", "method.k=2", "comm.codec=topk"],
    "own": ["method.name=pfedla", "method.initial_models=own", "method.head_init=default"],
}
"""By name; only in the last do models and weights differ in the first round."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "BLOCK_CLIENTS", BLOCKS[0])
    monkeypatch.setattr(sharded, "MEMBERS_AT_ONCE", BLOCKS[1])


@pytest.fixture(scope="module")
def settings(digits: Path) -> list[str]:
    return [
        *tiny_settings(digits),
        f"data.clients={NUM_CLIENTS}",
        "data.subset_per_class=40",
        "data.partition.min_samples=6",
        "train.participation=0.3",
        "train.rounds=2",
        "run.eval_every=2",
        "method.server=sharded",
    ]


@pytest.fixture(scope="module")
def parallel(
    settings: list[str], tmp_path_factory: pytest.TempPathFactory, mpirun_command: list[str]
) -> Path:
    """Return the folder of all cases on several ranks, which send the fewest clients a block."""
    folder = tmp_path_factory.mktemp("ranks")
    more = f"run.max_elements={MODEL_NUMBERS}"
    runs = {folder / name: [*settings, *case, more] for name, case in CASES.items()}
    run_in_one_world(mpirun_command, RANKS, runs, BLOCKS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_number_of_ranks_and_after_a_stop(
    parallel: Path, settings: list[str], tmp_path: Path, case: str
) -> None:
    keys = [*settings, *CASES[case]]
    assert run_here(tmp_path / "serial", keys) == FINISHED
    assert not differing(tmp_path / "serial", parallel / case)
    assert run_until_time_is_up(tmp_path / "stopped", keys) == STOPPED
    assert run_here(tmp_path / "stopped", keys) == FINISHED
    assert not differing(tmp_path / "serial", tmp_path / "stopped")


LOW_RANK = ["method.heads=low_rank", "method.rank=3"]
CODED = ["comm.codec=int8", "comm.directions=up"]


@pytest.mark.parametrize(("case", "more"), [("pfedla", []), ("heurpfedla", LOW_RANK), ("own", CODED)])
@pytest.mark.usefixtures("double")
def test_a_sharded_server_has_the_numbers_of_a_whole_one(
    settings: list[str], case: str, more: list[str]
) -> None:
    digits = ("method.", "data.source", "data.path", "data.layout")
    keys = [*(key for key in settings if not key.startswith(digits)), "data.per_client=null"]
    whole = Run(*keys, *CASES[case], *more)
    ours = Run(*keys, *CASES[case], *more, "method.server=sharded")
    assert "theta" not in ours.server
    torch.testing.assert_close(ours.clients["theta"], whole.server["theta"], rtol=1e-9, atol=1e-11)
    for name, tensor in ours.server.items():
        torch.testing.assert_close(tensor, whole.server[name], rtol=1e-9, atol=1e-11)
    expected = whole.evaluated()
    for name, rows in ours.evaluated().items():
        torch.testing.assert_close(rows, expected[name], rtol=1e-9, atol=1e-11)
    assert torch.equal(ours.bytes_by_client, whole.bytes_by_client)
    assert (ours.method.alpha(ours.server, range(NUM_CLIENTS)) - 1 / NUM_CLIENTS).abs().max() > 1e-5
