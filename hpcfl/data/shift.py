"""Feature shift: the images of each client are changed in its own way, before they are normalised.

Rotated images by groups of clients: Ghosh et al., An Efficient Framework for Clustered Federated Learning,
NeurIPS 2020, section 6.1. Noise that grows over the clients: Li et al., Federated Learning on Non-IID Data
Silos: An Experimental Study, ICDE 2022, section IV-C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfl.config.keys import DataConfig, ShiftKind
from hpcfl.errors import UserError
from hpcfl.randomness import numpy_stream, torch_stream
from hpcfl.samples import SampleType
from hpcfl.torchvision_parts import torchvision_part


@dataclass(frozen=True)
class Shift:
    """The changes of a run's images; a pure function of seed, client and sample.

    Attributes:
        groups: number G of different changes; client c has that of group c mod G.
        turns_fully: whether rotations divide the full circle, and `strength` is not used.
        seed: the data's.
    """

    kind: ShiftKind
    strength: float
    groups: int
    turns_fully: bool
    seed: int

    def changed(self, x: Tensor, client: int, samples: np.ndarray) -> Tensor:
        """Return a client's images [n, C, H, W], changed.

        Args:
            x: values divided by `Arrays.scale`; those of bytes lie in [0, 1]. The result may lie outside.
            samples: where the images are in the pool [n]; noise depends on it.
        """
        if not len(x):
            return x
        group = client % self.groups
        if self.kind == "rotation":
            return _rotated(x, self.angle(group))
        if self.kind == "colour":
            return self._coloured(x, group)
        # from 0 to the strength over the groups
        amount = self.strength * group / max(1, self.groups - 1)
        if amount == 0:
            return x
        return self._with_noise(x, samples, amount) if self.kind == "noise" else _blurred(x, amount)

    def angle(self, group: int) -> float:
        """Return the angle of a group in degrees, counter-clockwise."""
        if self.turns_fully:
            return 360 * group / self.groups
        return self.strength * (2 * group / (self.groups - 1) - 1) if self.groups > 1 else 0.0

    def _coloured(self, x: Tensor, group: int) -> Tensor:
        """Multiply each channel by a factor; of grey images, change contrast and brightness."""
        stream = numpy_stream(self.seed, "shift/colour", client=group)
        if x.shape[1] == 1:
            contrast, brightness = stream.uniform(-self.strength, self.strength, 2).tolist()
            return x * (1 + contrast) + brightness / 2
        factors = 1 + stream.uniform(-self.strength, self.strength, x.shape[1])
        return x * torch.from_numpy(factors).to(x).view(1, -1, 1, 1)

    def _with_noise(self, x: Tensor, samples: np.ndarray, deviation: float) -> Tensor:
        shape = x.shape[1:]
        noise = [
            torch.randn(shape, generator=torch_stream(self.seed, "shift/noise", client=sample))
            for sample in samples.tolist()
        ]
        return x + deviation * torch.stack(noise)


def shift_of(data: DataConfig, seed: int, num_clients: int) -> Shift | None:
    """Return the shift that a configuration asks for; clients with no part in training count as well."""
    if data.shift is None:
        return None
    turns_fully = data.shift == "rotation" and data.shift_groups is not None
    return Shift(data.shift, data.shift_size, data.shift_groups or num_clients, turns_fully, seed)


def check_shift(data: DataConfig, sample: SampleType) -> None:
    """Raise UserError if `data.shift` is set and the samples are not images."""
    if data.shift is not None and sample.kind != "images":
        raise UserError(
            f"data.shift={data.shift} changes images, and the data are {sample}; set data.shift=null"
        )


def _rotated(x: Tensor, angle: float) -> Tensor:
    """Turn images; a multiple of 90 degrees moves the pixels as they are."""
    quarters = angle / 90
    if quarters == int(quarters) and (quarters % 2 == 0 or x.shape[2] == x.shape[3]):
        return torch.rot90(x, int(quarters), (2, 3))
    functional = torchvision_part("transforms.functional")
    turned: Tensor = functional.rotate(x, angle, functional.InterpolationMode.BILINEAR)
    return turned


def _blurred(x: Tensor, sigma: float) -> Tensor:
    """Convolve images with a Gaussian of `sigma` pixels, cut off at three of these or at the image's side."""
    reach = [min(math.ceil(3 * sigma), side - 1) for side in (x.shape[3], x.shape[2])]
    functional = torchvision_part("transforms.functional")
    blurred: Tensor = functional.gaussian_blur(x, [2 * pixels + 1 for pixels in reach], [sigma, sigma])
    return blurred
