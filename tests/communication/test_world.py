"""Ranks and collectives.

Tests marked mpi run under any number of ranks: see test_under_mpirun.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Mpirun, run_forked

from hpcfl.checks.messages import check_messages
from hpcfl.communication import heartbeat
from hpcfl.communication.communicator import (
    Communicator,
    abort_on_exception,
    check_foreign_launcher,
    open_world,
    run_collectively,
)
from hpcfl.errors import BAD_INPUT, FAULT, MAX_CHARACTERS, StorageError, UserError

DTYPES = (
    *(torch.float16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def numbers(count: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Return start, start + 1, ... modulo 251; modulo 2 as booleans."""
    values = (torch.arange(count) + start) % 251
    return values % 2 == 1 if dtype == torch.bool else values.to(dtype)


@pytest.mark.mpi
def test_shards_are_contiguous_and_even_and_homes_are_the_ranks_that_host_them(world: Communicator) -> None:
    # more workers than items leave some without one; a unit is the clients of a block of sharded models
    for num_items, unit in ((0, 1), (2, 1), (23, 1), (37, 4)):
        shards = [world.shard(num_items, worker, unit) for worker in range(world.num_workers)]
        assert [item for shard in shards for item in shard] == list(range(num_items))
        assert all(shard.start % unit == 0 or shard.start == num_items for shard in shards)
        units = [-(-len(shard) // unit) for shard in shards]
        assert max(units) - min(units) <= 1
        assert units == sorted(units, reverse=True)
        own = shards[world.worker_index] if world.is_worker else range(0)
        assert world.shard(num_items, unit=unit) == own
        of_shards = [worker for worker, shard in enumerate(shards) for _ in shard]
        assert world.homes(range(num_items), num_items, unit) == of_shards
    # shards of 10 are 0-9; 0-4, 5-9; 0-2, 3-5, 6-7, 8-9
    worked_out = {1: [0] * 5, 2: [0, 0, 0, 1, 1], 4: [0, 0, 1, 3, 3]}
    homes = world.homes([0, 2, 4, 8, 9], 10)
    assert homes == worked_out.get(world.num_workers, homes)


@pytest.mark.mpi
@pytest.mark.parametrize("max_elements", [3, 2**27])
def test_workers_exchange(max_elements: int) -> None:
    world = open_world()
    world.limit_pieces(max_elements)
    count = world.num_workers

    def sent(source: int, target: int) -> torch.Tensor:
        return numbers(10 * source + target, torch.uint8, start=target)

    if not world.is_worker:
        assert world.exchange({}, {}) == {}
        return
    me = world.worker_index
    others = [other for other in range(count) if other != me]
    # each worker sends to those before it, an empty tensor from worker 0's point of view included
    send = {target: sent(me, target) for target in others if target < me}
    received = world.exchange(send, {source: len(sent(source, me)) for source in others if source > me})
    assert list(received) == [source for source in others if source > me]
    assert all(torch.equal(tensor, sent(source, me)) for source, tensor in received.items())


@pytest.mark.mpi
@pytest.mark.parametrize("max_elements", [3, 2**27])
def test_ranks_in_a_ring_send_while_they_receive(max_elements: int) -> None:
    world = open_world()
    world.limit_pieces(max_elements)
    if world.size == 1:
        return
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    arrived = [torch.zeros(7), torch.zeros(2)]
    coming = [world.start_receive(tensor, before) for tensor in arrived]
    going = [world.start_send(torch.full((count,), float(world.rank)), after) for count in (7, 2)]
    for transfer in (*coming, *going):
        world.wait(transfer)
    assert [tensor.tolist() for tensor in arrived] == [[float(before)] * count for count in (7, 2)]


@pytest.mark.mpi
@pytest.mark.parametrize("max_elements", [3, 2**27])
def test_a_broadcast_sends_the_server_s_values_to_all_ranks(max_elements: int) -> None:
    world = open_world()
    world.limit_pieces(max_elements)
    for dtype in DTYPES:
        expected = numbers(10, dtype).reshape(2, 5)
        tensor = expected.clone() if world.is_server else torch.zeros(2, 5, dtype=dtype)
        world.broadcast(tensor)
        assert torch.equal(tensor, expected)
    world.broadcast(torch.empty(0))


@pytest.mark.mpi
def test_a_large_broadcast_changes_only_the_slice_it_is_given(world: Communicator) -> None:
    whole, sent = torch.full((3, 1_000_000), -1.0), numbers(1_000_000, torch.float32)
    if world.is_server:
        whole[1] = sent
    world.broadcast(whole[1])
    assert torch.equal(whole[1], sent)
    assert (whole[[0, 2]] == -1).all()


@pytest.mark.mpi
@pytest.mark.parametrize("offset", [0, 3])
def test_scatter_and_gather_copy_unequal_parts(world: Communicator, offset: int) -> None:
    # Worker w gets 7 w + offset elements: without an offset the first one gets nothing.
    counts = [7 * worker + offset for worker in range(world.num_workers)]
    own = slice(0, 0)
    if world.is_worker:
        own = slice(sum(counts[: world.worker_index]), sum(counts[: world.worker_index + 1]))
    for dtype in DTYPES:
        everything = numbers(sum(counts), dtype)
        sent = everything.clone()
        part = world.scatter(sent if world.is_server else None, counts, dtype)
        assert torch.equal(part, everything[own])
        changed, expected = (~t if dtype == torch.bool else t + 1 for t in (part, everything))
        part[:] = changed
        assert torch.equal(sent, everything)
        result = world.gather(part, counts)
        part.zero_()
        if world.is_server:
            assert result is not None
            assert result.dtype == dtype
            assert torch.equal(result, expected)
        else:
            assert result is None


@pytest.mark.mpi
def test_blocks_above_max_elements_are_refused_on_all_ranks() -> None:
    world = open_world()
    world.limit_pieces(8)
    fits, too_many = [0] * (world.num_workers - 1) + [8], [0] * (world.num_workers - 1) + [9]
    sent = numbers(9, torch.float32)
    part = world.scatter(sent[:8] if world.is_server else None, fits, torch.float32)
    world.gather(part, fits)
    with pytest.raises(UserError, match=r"max_elements=8 is too small .* allowed: 9 or more"):
        world.scatter(sent if world.is_server else None, too_many, torch.float32)
    with pytest.raises(UserError, match="max_elements=8 is too small"):
        world.gather(part, too_many)


def test_tensors_mpi_cannot_send_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a contiguous CPU tensor, not torch\.float32"):
        Communicator().broadcast(torch.zeros(2, 3).T)


@pytest.mark.mpi
@pytest.mark.parametrize("max_elements", [1, 2**27])
def test_bytes_are_sent_and_received(max_elements: int) -> None:
    world = open_world()
    world.limit_pieces(max_elements)
    assert world.broadcast_bytes(b"hello world" if world.is_server else None) == b"hello world"
    assert world.broadcast_bytes(b"" if world.is_server else None) == b""
    entries = world.gather_bytes(bytes([world.rank]) * 5 * world.rank)
    expected = [bytes([rank]) * 5 * rank for rank in range(world.size)]
    assert entries == (expected if world.is_server else None)
    assert world.all_gather([world.rank, "a"]) == [[rank, "a"] for rank in range(world.size)]


@pytest.mark.mpi
def test_the_maximum_over_ranks_is_known_to_all(world: Communicator) -> None:
    assert world.maximum(-5 - world.rank) == -5
    assert world.maximum(2**40 + world.rank) == 2**40 + world.size - 1


@pytest.mark.mpi
def test_ranks_agree_on_the_lowest_rank_with_an_error(world: Communicator) -> None:
    def fail(text: str, ranks: Sequence[int]) -> int:
        if world.rank in ranks:
            raise UserError(text)
        return world.rank

    assert run_collectively(world, lambda: fail("", [])) == world.rank
    with pytest.raises(UserError, match=r"^rank 0 has a pröblem$"):
        run_collectively(world, lambda: fail(f"rank {world.rank} has a pröblem", range(world.size)))
    with pytest.raises(UserError, match=r"^the last one$"):
        run_collectively(world, lambda: fail("the last one", [world.size - 1]))


@pytest.mark.mpi
def test_without_a_gpu_each_rank_has_the_cpu(world: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for setting in ("cpu", "auto"):
        assert world.device(setting) == torch.device("cpu")
    with pytest.raises(UserError, match=r"run\.device=cuda: rank .* sees no GPU"):
        world.device("cuda")


@pytest.mark.mpi(min_size=2)
def test_a_waiting_rank_uses_little_cpu_time(world: Communicator) -> None:
    world.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if world.rank == world.size - 1:
        while time.perf_counter() - wall_s < 1:
            pass
    world.barrier()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert wall_s > 0.9
    if world.rank < world.size - 1:
        assert cpu_s < 0.2 * wall_s


@pytest.mark.mpi(min_size=2)
def test_a_busy_rank_that_sends_heartbeats_is_waited_for() -> None:
    world = open_world()
    with world.heartbeat_timeout(1.2):
        for busy in (world.size - 1, 0):
            began_s = time.monotonic()
            while world.rank == busy and time.monotonic() - began_s < 1.8:
                time.sleep(0.2)
                world.heartbeat()
            world.barrier()


@pytest.mark.mpi(min_size=3)
def test_a_finished_rank_receives_heartbeats_of_a_running_one() -> None:
    world = open_world()
    assert world._comm is not None
    last = world.size - 1
    with world.heartbeat_timeout(1.2):
        if world.rank == 0:
            world.wait(world.start_receive(torch.zeros(1), last))
        if world.rank == last:
            began_s = time.monotonic()
            while time.monotonic() - began_s < 3:
                time.sleep(0.2)
                world.heartbeat()
            world.wait(world.start_send(torch.zeros(1), 0))
    world.barrier()
    assert not [peer for peer in range(world.size) if world._comm.Iprobe(peer, heartbeat.HEARTBEAT_TAG)]


@pytest.mark.mpi(min_size=2)
def test_nodes_are_distinguished_by_their_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    world = open_world()
    ranks_of_node = world.maximum(len(world.ranks_of_node()))
    world.host = f"host-{world.rank}"
    check_messages(world)
    assert (" and other nodes" in capsys.readouterr().out) is (ranks_of_node < world.size)


@pytest.mark.mpi(min_size=2)
def test_heartbeats_do_not_accumulate_in_ranks_that_hardly_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_EVERY_S", 0.02)
    world = open_world()
    comm = world._comm
    assert comm is not None
    world.begin_phase("in round 7 of the run before")
    with world.heartbeat_timeout(60):
        assert world._phase == "at the start"
        for _ in range(8):
            # the server waits for workers, and beats in each round
            time.sleep(0.1 if world.is_worker else 0)
            world.barrier()
        # all have stopped; each returns what has come
        comm.Barrier()
        time.sleep(0.05)
        world.heartbeat()
        comm.Barrier()
        queued = 0
        for peer in range(world.size):
            # the receive of each pair that is under way takes its byte
            while (message := comm.Improbe(peer, heartbeat.HEARTBEAT_TAG)) is not None:
                message.Recv(bytearray(1))
                queued += 1
        # no rank may end or wait in our barrier, which send one too, before all have counted
        comm.Barrier()
        # of some 20 to each worker
        assert not queued


@pytest.mark.mpi(min_size=2)
def test_a_waiting_server_sends_to_a_silent_rank_at_every_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only by what cannot be delivered do the system and MPI find out that a link is cut."""
    receive, received = heartbeat.Heartbeat._receive, 0

    def counted(self: heartbeat.Heartbeat, peer: int) -> Any:
        nonlocal received
        received += 1
        return receive(self, peer)

    monkeypatch.setattr(heartbeat, "_BEAT_EVERY_S", 0.02)
    monkeypatch.setattr(heartbeat.Heartbeat, "_receive", counted)
    world = open_world()
    with world.heartbeat_timeout(60):
        time.sleep(0.5 if world.is_worker else 0)
        world.barrier()
    assert world.maximum(received if world.is_worker else 0) > 8


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("num_gpus", "of_four"),
    [
        (3, ["cuda:0 2", "cuda:1 1", "cuda:2 1", "cuda:0 2"]),
        (8, ["cuda:0 1", "cuda:1 1", "cuda:2 1", "cuda:3 1"]),
    ],
)
def test_workers_of_a_node_are_distributed_over_its_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, of_four: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    world = open_world()
    found = world.gather_bytes(f"{world.device('cuda')} {world.workers_on_device}".encode())
    workers = range(world.num_workers)
    if "MPIR_CVAR_NOLOCAL" in os.environ:
        # by a network alone every rank is a node of its own
        expected = ["cuda:0 1" for _ in workers]
    else:
        turns = [worker % num_gpus for worker in workers]
        expected = [f"cuda:{turn} {turns.count(turn)}" for turn in turns]
        assert world.num_workers != 4 or expected == of_four
    if found is not None:
        assert [one.decode() for one in found] == ["cpu 1", *expected]


def test_a_serial_world_never_imports_mpi() -> None:
    code = """
import os, sys
import torch
for name in [name for name in sys.modules if name.startswith(("mpi4py", "hpcfl"))]:
    del sys.modules[name]
from hpcfl.communication.communicator import open_world
for variables in ({}, {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_NTASKS": "9"}):
    os.environ.update(variables)
    world = open_world()
    assert (world.rank, world.size, world.is_server, world.is_worker) == (0, 1, True, True)
    [os.environ.pop(name) for name in variables]
world.barrier()
tensor = torch.ones(3)
world.broadcast(tensor)
assert world.gather(world.scatter(tensor, [3], tensor.dtype), [3]).tolist() == [1, 1, 1]
assert world.gather_bytes(world.broadcast_bytes(b"ab")) == [b"ab"]
assert world.maximum(3) == 3
world.device("auto")
assert not [name for name in sys.modules if name.startswith("mpi4py")]
world.abort(7)
"""
    done = run_forked(["-c", code], check=False)
    assert (done.returncode, done.stderr) == (7, "")


MPICH = "MPICH Version: 5.0.2\nMPICH configure: --with-pm=hydra"
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
SRUN, PMIX, PMI2, OMPI = ({name: "0"} for name in LAUNCHERS[:4])


@pytest.mark.parametrize(
    ("library", "environment", "expected"),
    [
        (MPICH, SRUN | PMIX, "speaks PMIx, which this MPICH was built without; .*`srun --mpi=pmi2`"),
        (MPICH, SRUN | PMI2, None),
        # as those that Open MPI's mpirun starts
        (MPICH, PMIX | OMPI, "speaks PMIx, which this MPICH was built without; "),
        (MPICH.replace("hydra", "hydra --with-pmix"), SRUN | PMIX, None),
        ("Open MPI v4.1.4", SRUN, "does not speak PMIx, which Open MPI needs; .*`srun --mpi=pmix`"),
        ("Open MPI v4.1.4", SRUN | PMIX, None),
        ("Open MPI v4.1.4", SRUN | PMI2 | {"MPI_LOCALNRANKS": "2"}, "which Open MPI needs; "),
    ],
)
def test_an_mpi_that_does_not_match_its_launcher_is_refused_before_it_ends_the_rank(
    library: str, environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.nullcontext() if expected is None else pytest.raises(UserError, match=expected):
        check_foreign_launcher(library)


@pytest.mark.parametrize("words", [["table", "../t.yaml"], ["plan"], ["doctor"], ["x"]])
def test_a_file_that_one_rank_lacks_is_reported_by_all(
    words: list[str], mpirun: Mpirun, tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    for name in ("own.py", "x"):
        (tmp_path / "0" / name).write_text("")
    (tmp_path / "t.yaml").write_text(
        "title: t\nseeds: [0]\ncolumns: [{label: c}]\nrows: [{method: {name: local}}]\n"
    )
    code = f"""
import os, sys
from hpcfl.communication.communicator import open_world
from hpcfl.main import main
os.chdir({str(tmp_path)!r} + f"/{{open_world().rank}}")
sys.exit(main({[*words, "--own-code", "own.py"]!r}))
"""
    done = mpirun(2, "-c", code, timeout=60, check=False)
    assert done.returncode == BAD_INPUT, done.stderr
    (line,) = done.stderr.splitlines()
    expected = "unknown command 'x'" if words == ["x"] else "own-code=own.py: No such file or directory"
    assert expected in line


NO_ROOM = """full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, 1), os.dup2(full, 2)
            print("in the buffer", end="")"""


@pytest.mark.parametrize("prepare", ["pass", NO_ROOM])
def test_an_exception_aborts_all_ranks_even_if_it_cannot_be_printed(prepare: str, mpirun: Mpirun) -> None:
    code = f"""
import os, sys
from hpcfl.communication.communicator import abort_on_exception, open_world
world = open_world()
world.barrier()
try:
    with abort_on_exception(world):
        if world.rank:
            {prepare}
            raise RuntimeError(f"no client on rank {{world.rank}}")
        world.barrier()
finally:
    print("continues", file=sys.stderr, flush=True)
"""
    done = mpirun(3, "-c", code, timeout=60, check=False, anew=True)
    assert done.returncode == FAULT
    headed = re.findall(r"^rank (\d) of 3 on .* failed, so all ranks stop\nTraceback", done.stderr, re.M)
    messages = re.findall(r"^RuntimeError: no client on rank (\d)$", done.stderr, re.M)
    assert headed == messages
    assert done.stderr.count("Traceback") == len(set(headed)) >= (prepare == "pass")
    assert set(headed) <= {"1", "2"}
    # MPICH's abort may return before mpirun has ended the rank
    assert "continues" not in done.stderr


def test_an_error_on_one_of_several_ranks_is_reported_like_that_of_a_single_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Communicator()
    monkeypatch.setattr(world, "size", 2)
    with pytest.raises(SystemExit) as left, abort_on_exception(world):
        raise StorageError("/runs/a\x1b[2J\nb: " + 5000 * "x")
    assert left.value.code == StorageError.exit_code
    printed = capfd.readouterr().err
    assert printed.startswith("hpcfl: error: /runs/a\\x1b[2J b: xxx")
    assert printed.count("\n") == 1
    assert len(printed) < MAX_CHARACTERS + 50
