"""Write domains/{digits,mnist,usps}.npz: handwritten digits of three data sets, x uint8 [n, h, w] and y.

Downloads MNIST and USPS with torchvision into the folder `data`, if they are not there. About a minute.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from hpcfl.torchvision_parts import torchvision_part


def write(name: str, x: np.ndarray, y: np.ndarray) -> None:
    np.savez_compressed(f"domains/{name}.npz", x=x.astype(np.uint8), y=y.astype(np.int64))


Path("domains").mkdir(exist_ok=True)
digits = load_digits()
# 0 to 16 become 0 to 255
write("digits", (digits.images * 255 / 16).round(), digits.target)
# torchvision.datasets, also where torchvision's compiled part does not fit torch
datasets = torchvision_part("datasets")
for name in ("MNIST", "USPS"):
    parts = [getattr(datasets, name)("data", train=train, download=True) for train in (True, False)]
    x, y = (np.concatenate([np.asarray(getattr(part, key)) for part in parts]) for key in ("data", "targets"))
    write(name.lower(), x, y)
