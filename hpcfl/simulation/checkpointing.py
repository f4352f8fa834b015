"""Start, resume and checkpoints: write the state of server and clients to the run folder, and read it
back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from hpcfl.communication.communicator import run_collectively
from hpcfl.communication.messages import Cohort, Message
from hpcfl.errors import UserError, one_line
from hpcfl.methods.base import State
from hpcfl.methods.hook_results import kinds, misfit
from hpcfl.simulation.evaluation import Evaluator
from hpcfl.simulation.federation import Federation, stack
from hpcfl.storage.hdf5 import LoadedCheckpoint
from hpcfl.storage.ledger import Ledger, is_off_schedule
from hpcfl.storage.runfolder import RunFolder
from hpcfl.storage.slurm import write_job_note
from hpcfl.storage.snapshot import Block, Rows, Snapshot


class Saver:
    """Reads and writes the checkpoints of one run; `folder` is the server's and None elsewhere."""

    def __init__(
        self, federation: Federation, evaluator: Evaluator, ledger: Ledger, folder: RunFolder | None
    ) -> None:
        self._federation, self._ledger, self._folder = federation, ledger, folder
        self._evaluator = evaluator
        self._method, self._adapter = federation.method, federation.adapter

    def start(self) -> tuple[State, int]:
        """Resume from a checkpoint, or start; return the server's state and the rounds done. Collective.

        Raises UserError on all ranks if the checkpoint does not have the parts of this run.
        """
        checkpoint = self._folder.take_checkpoint() if self._folder is not None else None
        world = self._federation.world
        server: State = run_collectively(
            world, lambda: {} if checkpoint is None else self._restore_server(checkpoint)
        )
        done = world.maximum(checkpoint.round if checkpoint is not None else 0)
        if checkpoint is not None:
            self._forget_off_schedule(done)
        elif world.is_server:
            server = self._adapter.initial_server()
        if done:
            self._restore_clients(checkpoint)
        if checkpoint is not None:
            checkpoint.close()
        if self._folder is not None:
            self._folder.start_files(self._ledger)
        return server, done

    def save(self, server: State, done: int, with_models: bool) -> None:
        """Write a checkpoint after `done` rounds, with all evaluated models if asked. Collective.

        The models are computed again, cohort by cohort: memory may not hold those of all clients.
        """
        federation = self._federation
        models = {
            name: partial(self._model_rows, server, federation.cohorts(done, clients))
            for name, clients in (("personalised", federation.in_training), ("unseen", federation.unseen))
            if with_models and clients
        }
        if self._folder is None:
            # through all blocks, as the server while it writes them
            deque(self._client_rows().blocks, maxlen=0)
            for rows in models.values():
                deque(rows().blocks, maxlen=0)
        else:
            self._folder.save(
                Snapshot(
                    method=self._method.name,
                    round=done,
                    config=self._folder.config.yaml(),
                    layout=self._method.layout.slots,
                    data=self._federation.experiment.data,
                    server=server,
                    derived=self._adapter.checkpoint_diagnostics(server, done),
                    clients=self._client_rows(),
                    history=self._ledger.history,
                    ledger=self._ledger.tables,
                    models=models,
                )
            )
            write_job_note("saved", f"{self._folder.path} {done}")
        self._federation.world.barrier()

    def _restore_server(self, checkpoint: LoadedCheckpoint) -> State:
        """Restore the ledger and return the server's state.

        Raises UserError unless the checkpoint has the parts and shapes of this run.
        """
        # freed before the checkpoint is read: memory may not hold two states
        own, of_client = kinds(self._adapter.initial_server()), kinds(self._adapter.initial_clients([0]))
        server, growing = checkpoint.server, self._method.traits.growing_state
        try:
            if part := misfit(own, kinds(server), growing):
                raise ValueError(f"server/{part} is missing or has another shape")
            if part := misfit(of_client, kinds(checkpoint.client_rows(0, 1))):
                raise ValueError(f"clients/{part} is missing or has another shape")
            self._ledger.restore(checkpoint.ledger, checkpoint.history)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{checkpoint.path} does not fit this run: {one_line(error)}; restore this run's own "
                "checkpoint, finish the run with the version of hpcfl that began it, or add --fresh to move "
                "the folder aside and start over"
            ) from error
        return server

    def _forget_off_schedule(self, done: int) -> None:
        """Drop the last evaluation of a shorter run if the extended run has none after that round."""
        every = self._federation.experiment.run.eval_every
        if not is_off_schedule(done, self._method.context.train.rounds, every):
            return
        if self._ledger.metrics and self._ledger.last("round") == done:
            self._ledger.forget_last_evaluation()

    def _restore_clients(self, checkpoint: LoadedCheckpoint | None) -> None:
        """Give every rank the state of its clients; `checkpoint` is the server's. Collective."""
        federation = self._federation
        for cohort in self._blocks():
            federation.world.heartbeat()
            rows = {}
            if checkpoint is not None:
                rows = checkpoint.client_rows(cohort.clients[0], cohort.clients[-1] + 1)
            message = (
                Message(per_client=rows, num_clients=len(cohort)) if federation.world.is_server else None
            )
            received = federation.channel.down(message, cohort)
            own = self._own_rows(cohort)
            count, state = len(federation.worker_context.clients), federation.worker_context.state
            for name, tensor in received.per_client.items():
                # a codec's state exists once it has sent something
                stored = state.setdefault(name, tensor.new_zeros(count, *tensor.shape[1:]))
                stored[own] = tensor

    def _blocks(self) -> Iterator[Cohort]:
        """Split all clients into consecutive cohorts of bounded size."""
        federation = self._federation
        row_size = sum(math.prod(rows.shape[1:]) for rows in self._client_state().values())
        for block in federation.world.blocks(row_size, federation.num_clients):
            yield federation.cohort_of(0, federation.in_training[block])

    def _client_rows(self) -> Rows:
        """Describe the state of all clients; its blocks are collective."""
        shapes = {
            name: _shape(tensor, self._federation.num_clients)
            for name, tensor in self._client_state().items()
        }
        return Rows(shapes, self._client_blocks())

    def _client_state(self) -> State:
        """Return tensors of the shapes of the clients' state, those that a codec keeps included."""
        return self._adapter.initial_clients([0]) | self._federation.kept_by_codec()

    def _client_blocks(self) -> Iterator[Block]:
        """Bring the state of all clients to the server, block by block. Collective."""
        federation = self._federation
        for cohort in self._blocks():
            own = self._own_rows(cohort)
            rows = {name: tensor[own] for name, tensor in federation.worker_context.state.items()}
            message = Message(per_client=rows, num_clients=own.stop - own.start)
            for positions, block in federation.channel.up(message, cohort):
                yield np.array(cohort.clients[positions]), block.per_client

    def _own_rows(self, cohort: Cohort) -> slice:
        """Return the rows of this rank's client state that belong to consecutive clients."""
        # a view: a selection of rows would be a second copy in GPU memory
        federation = self._federation
        rows = [federation.worker_context.clients.index(client) for client in federation.own(cohort)]
        return slice(rows[0], rows[-1] + 1) if rows else slice(0, 0)

    def _model_rows(self, server: State, cohorts: Iterator[Cohort]) -> Rows:
        """Return the evaluated models of all clients of some cohorts as rows to write. Collective.

        The first client's model gives their shapes; its row is the first.
        """
        cohort, federation, models_of = next(cohorts), self._federation, self._evaluator.models
        models = list(models_of(server, cohort))
        shared, first = self._first_model(models, cohort)
        first_id = cohort.clients[0]
        count = federation.num_unseen if federation.is_unseen(cohort) else federation.num_clients
        shapes = {name: _shape(row, 1 if name in shared else count) for name, row in first.items()}

        def blocks() -> Iterator[Block]:
            yield np.array([0]), {name: row for name, row in first.items() if name in shared}
            yield from self._model_blocks(cohort, models, shared, first_id)
            for other in cohorts:
                yield from self._model_blocks(other, list(models_of(server, other)), shared, first_id)

        return Rows(shapes, blocks())

    def _first_model(self, models: Sequence[Message], cohort: Cohort) -> tuple[list[str], State]:
        """Return the names of the parts that all models share, and the first client's model. Collective.

        The model is empty on ranks other than the server. `models` are those of this rank's members of the
        cohort: one message per group, in client order.
        """
        federation = self._federation
        alone = cohort.select([0])
        names = federation.world.all_gather([name for model in models for name in model.shared])
        # ranks without models name none
        shared: list[str] = next(filter(None, names), [])
        own = federation.own(alone)
        whole = [_rows(model.select(slice(0, 1)), []) for model in models[: len(own)]]
        return shared, federation.channel.up(stack(whole, own), alone).collect()

    def _model_blocks(
        self, cohort: Cohort, models: list[Message], shared: Sequence[str], first_id: int
    ) -> Iterator[Block]:
        """Bring what the cohort's models do not share to the server, block by block. Collective.

        Client `first_id` has the first row. `models` is emptied, so that a GPU's memory is free for the next
        cohort's.
        """
        own = stack([_rows(model, shared) for model in models], self._federation.own(cohort))
        models.clear()
        for positions, block in self._federation.channel.up(own, cohort):
            yield np.array(cohort.clients[positions]) - first_id, block.per_client


def _shape(rows: Tensor, count: int) -> Tensor:
    """Return shape and type of `count` rows like the given ones."""
    return rows.new_empty(count, *rows.shape[1:], device="meta")


def _rows(model: Message, without: Sequence[str]) -> Message:
    """Return a group's models as rows, leaving out empty parts and the parts named in `without`."""
    rows = {name: model[name] for name in model.names if name not in without and model[name].numel()}
    return Message(per_client=rows, num_clients=model.num_clients)
