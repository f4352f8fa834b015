"""Write images.npz: x uint8 [images, channels, height, width] and y, the classes."""

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
x = (digits.images * 15).astype("uint8")  # from 0..16 to bytes
np.savez("images.npz", x=x[:, None], y=digits.target)
