"""Write images.npz: x uint8 [images, channels, height, width] and y, the classes."""

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
np.savez("images.npz", x=digits.images[:, None].astype("uint8"), y=digits.target)
