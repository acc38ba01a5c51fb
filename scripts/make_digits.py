"""Writes src/gradwire/tasks/digits.npz from scikit-learn's copy of the UCI digits (run once, by hand).

The data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0. scikit-learn carries its test part: 1,797
images of 8x8 pixels with 17 grey levels. Nothing is changed; only the container is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parent.parent / "src" / "gradwire" / "tasks" / "digits.npz"

if __name__ == "__main__":
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    assert np.array_equal(images, digits.images), "pixels are whole numbers from 0 to 16"
    np.savez_compressed(TARGET, images=images, labels=labels)
    print(f"{TARGET}: {len(labels)} images, {TARGET.stat().st_size:,} bytes")
