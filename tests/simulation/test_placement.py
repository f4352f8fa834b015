"""Clients of a round are moved to less busy workers: how long workers wait, and that no state is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from harness import SMALL, Run
from marked_device import DEVICE, marked_device

from hpcfl.communication.communicator import Communicator
from hpcfl.communication.messages import Cohort
from hpcfl.data.shard import SPLITS
from hpcfl.randomness import numpy_stream
from hpcfl.registries import load_config
from hpcfl.setup.experiment import build
from hpcfl.simulation.federation import Federation
from hpcfl.simulation.migration import ClientMigration, Migration, assign_workers
from hpcfl.simulation.round_loop import Simulation
from hpcfl.simulation.sampling import Sampler
from hpcfl.terminal import Progress


def loads(work: Sequence[int], workers: Sequence[int], num_workers: int) -> list[int]:
    return [sum(w for w, own in zip(work, workers, strict=True) if own == n) for n in range(num_workers)]


def test_placements_equal_those_by_hand() -> None:
    # 4, 3, 3, 2 on two workers are 6 and 6; at home they would be 10 and 2
    work, homes = [4, 3, 3, 2], [0, 0, 0, 1]
    assert loads(work, assign_workers(work, homes, 2), 2) == [6, 6]


def test_no_client_is_moved_without_a_gain() -> None:
    assert assign_workers([100, 100, 100, 100], [0, 0, 1, 1], 2) == (0, 0, 1, 1)
    # one sample more or less is not worth a visit
    assert assign_workers([100, 100, 101, 100], [0, 1, 0, 1], 2) == (0, 1, 0, 1)
    # of three equal clients at worker 0, one goes
    assert sorted(assign_workers([5, 5, 5], [0, 0, 0], 3)) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_placement_is_close_to_the_shortest_possible_time(seed: int) -> None:
    stream = numpy_stream(seed, "placement")
    num_workers = int(stream.integers(1, 9))
    work = stream.integers(1, 1000, int(stream.integers(1, 60))).tolist()
    homes = stream.integers(0, num_workers, len(work)).tolist()
    workers = assign_workers(work, homes, num_workers)
    assert all(0 <= worker < num_workers for worker in workers)
    least = max(sum(work) / num_workers, max(work))
    assert max(loads(work, workers, num_workers)) <= 1.02 * 4 / 3 * least + 1


@pytest.mark.mpi
def test_moved_clients_bring_samples_and_state_and_return_their_state(world: Communicator) -> None:
    config = load_config(None, [*SMALL, "method.name=ditto", "train.buffers=local", "data.val_fraction=0.2"])
    experiment, alone = build(config, world), build(config, Communicator())
    # this rank has chosen to keep state on the CPU, wherever clients train
    home, count = replace(experiment.worker_context, device=torch.device("meta")), world.num_workers
    federation = Federation(replace(experiment, worker_context=home), world)
    for client in home.clients:
        home.state["theta"][home.clients.index(client)] += client
    # worker 0 keeps client 0, and everybody else goes one worker on, round the table
    cohort = federation.cohort_of(0, range(4))
    homes = federation.channel.homes(cohort)
    cohort = replace(cohort, workers=(homes[0], *((worker + 1) % count for worker in homes[1:])))
    migrations = federation.migration.migrations(cohort)
    away = [client for client, _, _ in migrations]
    assert away == ([1, 2, 3] if count > 1 else [])
    federation.migration.begin(cohort)
    own = world.worker_index if world.is_worker else None
    visitors = [client for client, _, worker in migrations if worker == own]
    place = federation.migration.worker_context
    assert list(place.clients if migrations else []) == visitors
    trained = [clients.ids for _, clients in federation.groups(cohort)]
    assert trained == [
        [client]
        for client in range(4)
        if client in visitors or (client in home.clients and client not in away)
    ]
    for local, client in enumerate(visitors):
        for split in SPLITS:
            samples = place.shard.samples(split, local)
            expected = alone.worker_context.shard.samples(split, client)
            assert all(torch.equal(*pair) for pair in zip(samples, expected, strict=True))
            assert len(samples[1])
        assert torch.equal(place.state["theta"][local], alone.worker_context.state["theta"][client] + client)
        place.state["theta"][local] *= -1
    federation.migration.end()
    for local, client in enumerate(home.clients):
        expected = alone.worker_context.state["theta"][client] + client
        assert torch.equal(home.state["theta"][local], -expected if client in away else expected)


@pytest.mark.mpi
def test_clients_moved_to_a_gpu_have_their_state_there_and_the_bits_of_a_serial_run(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second worker has no memory for the state of its clients, and keeps that on the CPU."""
    keys = [*SMALL, "method.name=ditto", "data.clients=8", "train.participation=0.5", "run.engine=loop"]
    alone, cpu = Run(*keys), torch.device("cpu")
    place = DEVICE if world.is_worker and world.worker_index % 2 == 0 else cpu
    begin, visited, travelled = ClientMigration.begin, set[torch.device](), list[Migration]()

    def begun(self: ClientMigration, cohort: Cohort) -> None:
        begin(self, cohort)
        travelled.extend(self.migrations(cohort))
        if self.migrations(cohort):
            visited.add(self.worker_context.state["theta"].device)

    monkeypatch.setattr(Communicator, "device", lambda world, _: DEVICE if world.is_worker else cpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33 if place == DEVICE else 0, 2**34))
    monkeypatch.setattr(ClientMigration, "begin", begun)
    with marked_device():
        experiment = build(load_config(None, keys), world)
        assert Simulation(experiment, world, None, Progress(), None).run() == "finished"
        kept = experiment.worker_context.state["theta"]
        assert kept.device == place
        # whether somebody travels is a matter of the cohorts; with two workers somebody does
        assert travelled or world.num_workers != 2
        assert visited == ({place} if travelled else set())
        trained = kept.cpu()
    assert torch.equal(trained, alone.clients["theta"][list(experiment.worker_context.clients)])


@pytest.mark.mpi
def test_cohorts_are_balanced_unless_clients_must_stay_at_home(world: Communicator) -> None:
    keys = [*SMALL, "data.clients=12", "data.per_client=20", "train.participation=0.5", "method.name=local"]

    def placed(*more: str) -> tuple[Federation, list[Cohort]]:
        federation = Federation(build(load_config(None, [*keys, *more]), world), world)
        sampler = Sampler(federation.method.context)
        cohorts = [federation.cohort_of(number, sampler.clients(number)) for number in range(6)]
        return federation, [federation.migration.placed(cohort) for cohort in cohorts]

    federation, cohorts = placed()
    assert any(federation.migration.migrations(cohort) for cohort in cohorts) is (world.num_workers > 1)
    for cohort in cohorts:
        spread = torch.tensor(federation.channel.workers(cohort)).bincount(minlength=world.num_workers)
        assert spread.max() == -(-len(cohort) // world.num_workers)
    # the server of a world with GPUs has none itself, and so another engine
    other_engine = f"run.engine={'loop' if world.is_server else 'batched'}"
    at_home = [*([other_engine] if world.size > 1 else []), "run.placement=home", "run.engine=batched"]
    for other in at_home:
        assert all(cohort.workers is None for cohort in placed(other)[1])
