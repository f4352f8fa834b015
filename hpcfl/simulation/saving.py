"""Start, resume and checkpoints: the state of server and clients, to and from the run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hpcfl.communication.messages import BUFFERS, Cohort, Message
from hpcfl.methods.base import State
from hpcfl.simulation.federation import Federation, stack
from hpcfl.storage.checkpoint import (
    Block,
    Header,
    LayoutRecord,
    LoadedCheckpoint,
    Rows,
    RowShape,
    Snapshot,
)
from hpcfl.storage.ledger import Ledger
from hpcfl.storage.runfolder import RunFolder


class Saver:
    """Reads and writes the checkpoints of one run; `folder` is the server's and None elsewhere."""

    def __init__(self, federation: Federation, ledger: Ledger, folder: RunFolder | None) -> None:
        self._federation, self._ledger, self._folder = federation, ledger, folder
        self._method, self._config = federation.method, federation.config

    def start(self) -> tuple[State, int]:
        """Go on from a checkpoint, or begin; return the server's state and the rounds done. Collective."""
        checkpoint = self._folder.checkpoint if self._folder is not None else None
        done = self._federation.world.maximum(checkpoint.header.round if checkpoint is not None else 0)
        server: State = {}
        if checkpoint is not None:
            server = checkpoint.server
            self._ledger.restore(checkpoint.ledger, checkpoint.history)
            self._forget_off_schedule(done)
        elif self._federation.world.is_server:
            server = self._method.initial_server()
        if done:
            self._restore_clients(checkpoint)
        if checkpoint is not None:
            checkpoint.close()
        if self._folder is not None:
            self._ledger.start_files(self._folder.path)
        return server, done

    def save(self, server: State, done: int) -> None:
        """Write a checkpoint after `done` rounds, with all evaluated models after the last. Collective."""
        is_last = done == self._config.train.rounds
        if self._folder is None:
            _take_part(self._client_rows())
            if is_last:
                _take_part(self._model_rows(server, done))
        else:
            self._folder.store.save(
                Snapshot(
                    Header(self._config.method, done, self._config.yaml()),
                    LayoutRecord.of(self._method.layout),
                    server,
                    self._method.derived(server),
                    self._client_rows(),
                    self._ledger.history(),
                    self._ledger.tables(),
                    (lambda: self._model_rows(server, done)) if is_last else None,
                )
            )
        self._federation.world.barrier()

    def _forget_off_schedule(self, done: int) -> None:
        """Drop the evaluation that a shorter run did at its end and this one would not have done."""
        if done == self._config.train.rounds or done % self._config.run.eval_every == 0:
            return
        if self._ledger.metrics and self._ledger.last("round") == done:
            self._ledger.forget_last_evaluation()

    def _restore_clients(self, checkpoint: LoadedCheckpoint | None) -> None:
        """Give every rank the state of its clients; `checkpoint` is the server's. Collective."""
        federation = self._federation
        for cohort in self._blocks():
            rows = {}
            if checkpoint is not None:
                rows = checkpoint.client_rows(cohort.clients[0], cohort.clients[-1] + 1)
            message = Message(rows=rows, num_clients=len(cohort)) if federation.world.is_server else None
            received = federation.channel.down(message, cohort)
            own = federation.own_rows(cohort)
            for name, tensor in received.rows.items():
                if own:
                    federation.place.state[name][own] = tensor

    def _blocks(self) -> Iterator[Cohort]:
        """Cut all clients in consecutive cohorts of bounded size."""
        federation = self._federation
        state = self._method.initial_clients([0])
        numbers = max(1, sum(rows.numel() for rows in state.values()))
        step = max(1, federation.world.max_elements // numbers)
        for start in range(0, federation.num_clients, step):
            yield federation.cohort_of(0, range(start, min(start + step, federation.num_clients)))

    def _client_rows(self) -> Rows:
        """Describe the state of all clients; its blocks are collective."""
        one = self._method.initial_clients([0])
        shapes = {
            name: RowShape(self._federation.num_clients, tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in one.items()
        }
        return Rows(shapes, self._client_blocks())

    def _client_blocks(self) -> Iterator[Block]:
        """Bring the state of all clients to the server, block by block. Collective."""
        federation = self._federation
        for cohort in self._blocks():
            own = federation.own_rows(cohort)
            rows = {name: tensor[own] for name, tensor in federation.place.state.items()} if own else {}
            for positions, block in federation.channel.up(Message(rows=rows, num_clients=len(own)), cohort):
                yield np.array(cohort.clients[positions]), block.rows

    def _model_rows(self, server: State, done: int) -> Rows:
        """Describe the evaluated models by client 0's, which stands for all if shared. Collective."""
        federation = self._federation
        of_client_0 = list(self._model_blocks(server, federation.cohort_of(done, [0]), lambda _: True))
        first = of_client_0[0][1] if of_client_0 else {}
        count = federation.num_clients
        shapes = {
            name: RowShape(1 if self._is_shared(name) else count, tuple(row.shape[1:]), row.dtype)
            for name, row in first.items()
        }

        def blocks() -> Iterator[Block]:
            yield np.array([0]), {name: row for name, row in first.items() if self._is_shared(name)}
            for cohort in federation.everyone(done):
                yield from self._model_blocks(server, cohort, lambda name: not self._is_shared(name))

        return Rows(shapes, blocks())

    def _model_blocks(
        self, server: State, cohort: Cohort, is_wanted: Callable[[str], bool]
    ) -> Iterator[Block]:
        """Bring some tensors of the cohort's evaluated models to the server, block by block. Collective."""
        models = [
            Message(
                rows={name: rows for name, rows in model.items() if rows.numel() and is_wanted(name)},
                num_clients=len(clients),
            )
            for clients, down in self._federation.evaluation_downloads(server, cohort)
            for model in [self._method.evaluated(clients, down)]
        ]
        for positions, block in self._federation.channel.up(stack(models), cohort):
            yield np.array(cohort.clients[positions]), block.rows

    def _is_shared(self, name: str) -> bool:
        """Whether all clients are evaluated on the same tensor, so that one row says it all."""
        if self._config.train.finetune_epochs:
            return False
        if name == BUFFERS:
            return bool(self._method.shared_parts) and self._method.buffers == "average"
        return name in self._method.shared_parts


def _take_part(rows: Rows) -> None:
    """Take a worker's part in what the server writes. Collective."""
    for _ in rows.blocks:
        pass
