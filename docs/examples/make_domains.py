"""Write domains/{digits,mnist,usps}.npz: handwritten digits of three data sets, x uint8 [n, h, w] and y.

Downloads MNIST and USPS with torchvision into the folder `data`, if they are not there. About a minute.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from torchvision.datasets import MNIST, USPS


def write(name: str, x: np.ndarray, y: np.ndarray) -> None:
    np.savez_compressed(f"domains/{name}.npz", x=x.astype(np.uint8), y=y.astype(np.int64))


Path("domains").mkdir(exist_ok=True)
digits = load_digits()
# 0 to 16 become 0 to 255
write("digits", (digits.images * 255 / 16).round(), digits.target)
for kind in (MNIST, USPS):
    parts = [kind("data", train=train, download=True) for train in (True, False)]
    x, y = (
        np.concatenate([np.asarray(getattr(part, name)) for part in parts]) for name in ("data", "targets")
    )
    write(kind.__name__.lower(), x, y)
