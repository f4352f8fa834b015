"""Write texts.npz from a CSV file of AG News: python make_texts.py test.csv

Lines are class (1 to 4), title and text. A sample is its first 64 words as numbers: 0 fills up, 1 is any word
that is not among the 4,998 commonest.
"""

import csv
import re
import sys
from collections import Counter

import numpy as np

LENGTH, VOCABULARY = 64, 5000

with open(sys.argv[1], newline="") as file:
    lines = list(csv.reader(file))
texts = [re.findall("[a-z']+", f"{title} {text}".lower()) for _, title, text in lines]
common = Counter(word for words in texts for word in words).most_common(VOCABULARY - 2)
number = {word: place + 2 for place, (word, _) in enumerate(common)}
x = np.zeros((len(texts), LENGTH), np.int64)
for row, words in zip(x, texts, strict=True):
    row[: len(words)] = [number.get(word, 1) for word in words[:LENGTH]]
np.savez("texts.npz", x=x, y=[int(label) - 1 for label, *_ in lines], vocabulary=VOCABULARY)
