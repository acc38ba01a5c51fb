"""NNCodec on the tensors of a folder, for benchmarks/structure.py, which starts this in NNCodec's own environment.

    PYTHON benchmarks/nncodec_peer.py FOLDER

Reads in.npz and targets.json (as many relative squared errors for each array, in turn), writes out.json: bytes, error
and seconds of encoding. A tensor is scaled until its error is within 1% of the target, which is finer than NNCodec's
own steps. Trellis quantization is on. torchvision and others, which NNCodec imports and does not need for tensors, are
replaced where they are missing.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch

UNUSED = ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.transforms.functional",
          "torchvision.datasets", "cv2", "ptflops", "torchmetrics")  # fmt: skip
QP = -4


class Stub(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {"__init__": lambda self, *a, **k: None})


MISSING = [module for module in UNUSED if importlib.util.find_spec(module.split(".")[0]) is None]
for module in MISSING:
    sys.modules[module] = Stub(module)
    sys.modules[module].__path__ = []  # type: ignore[attr-defined]

from nncodec.tensor import decode, encode  # noqa: E402


def coded(x: torch.Tensor, scale: float) -> tuple[int, float, float]:
    options = {
        "approx_method": "uniform", "qp": QP, "nonweight_qp": -75, "use_dq": True, "bitdepth": None,
        "quantize_only": False, "tca": False, "row_skipping": True, "sparsity": 0.0, "struct_spars_factor": 0.0,
        "job_identifier": "peer", "results": sys.argv[1], "tensor_id": "0", "tensor_path": None,
        "compress_differences": False, "verbose": False,
    }  # fmt: skip
    scaled = x * scale
    started = time.process_time()
    stream = encode(scaled, options)
    seconds = time.process_time() - started
    back = torch.as_tensor(np.asarray(decode(stream, "0"))).double().reshape(x.shape) / scale
    return len(stream), float((back - x.double()).square().sum() / x.double().square().sum()), seconds


def at_error(x: torch.Tensor, target: float) -> tuple[int, float, float]:
    scale = float(1 / x.double().square().mean().sqrt())
    found = coded(x, scale)
    for _ in range(5):
        if abs(found[1] / target - 1) < 0.01:
            break
        scale *= (found[1] / target) ** 0.6
        found = coded(x, scale)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    targets, results = json.loads((folder / "targets.json").read_text()), []
    with np.load(folder / "in.npz") as file:
        each = len(targets) // len(file.files)
        for i in range(len(file.files)):
            x = torch.from_numpy(file[str(i)])
            x = x.reshape(len(x), -1) if x.dim() > 1 else x.reshape(1, -1)
            results += [at_error(x, target) for target in targets[each * i : each * (i + 1)]]
            print(f"NNCodec: {i + 1} of {len(file.files)} layers", file=sys.stderr, end="\r")
    (folder / "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
