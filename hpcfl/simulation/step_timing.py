"""How long a training step of a method takes on a device, by an engine."""

from __future__ import annotations

import time

import torch

from hpcfl.methods import Method
from hpcfl.training.batches import Batch
from hpcfl.training.engines import Engine

TIMED_STEPS, TIMED_S = 10, 2.0
"""Most steps that are timed, and most seconds that they take; four steps are in any case."""


def seconds_of_step(engine: Engine, method: Method, device: torch.device, count: int) -> float:
    """Return the seconds of one client's gradient and update of the method's network, on random images.

    That is the fastest of a few steps of `count` clients, as whatever else the machine does only slows them.
    """
    context, train = method.context, method.context.train
    stream = torch.Generator().manual_seed(0)
    initial = method.layout.flatten(method.network)
    theta, buffers = (numbers.expand(count, -1).clone().to(device) for numbers in initial)
    x = torch.randn(count, train.batch_size, *context.image_shape, generator=stream).to(device)
    y = torch.randint(context.num_classes, (count, train.batch_size), generator=stream).to(device)
    index = torch.zeros(count, train.batch_size, dtype=torch.int64, device=device)
    batch = Batch(slice(None), x, y, index)
    times: list[float] = []
    while len(times) < 4 or (len(times) <= TIMED_STEPS and sum(times) < TIMED_S):
        began_s = time.perf_counter()
        slope, _ = engine.gradient(method.timed_loss, {"theta": theta}, buffers, batch)
        theta = theta.add(slope["theta"], alpha=-train.lr * 1e-3)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_s)
    return min(times) / count
