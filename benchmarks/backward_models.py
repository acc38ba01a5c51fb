"""Whole trainings with weight gradients from K of M rows, against exact ones at equal steps.

A transformer (text: bytes of Python's standard library) and an MLP-Mixer (mixer: CIFAR-10), AdamW, all linear layers
converted. Results are appended to a file of JSON lines; what is there already is not computed again.

python benchmarks/backward_models.py --task text                                    # small: minutes on a CPU
python benchmarks/backward_models.py --task mixer --data-dir DIR                    # DIR holds CIFAR-10
python benchmarks/backward_models.py --size large --device cuda --dtype bfloat16 --task text
python benchmarks/backward_models.py --variants exact topk,k=0.25,decay=0,leave=head
python benchmarks/backward_models_report.py                                         # tables and the plot
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from backward_tasks import SIZES, TASKS, MixerTask, TextTask
from backward_training import EXACT, Training, now
from machine import processor

RESULTS = Path(__file__).parent / "results" / "backward_models.jsonl"
RULES = (
    "topk,decay=1", "topk,decay=0", "weightedk,decay=1", "weightedk,decay=0", "randk,decay=0.5", "randk,decay=0",
    "topk,decay=1,centre=no", "randk,decay=0,centre=no",
)  # fmt: skip
SMALLER = "exact,batch=0.75"  # of the three products of a layer, K = M/4 leaves 2¼: so does three quarters of a batch
VARIANTS = (EXACT, SMALLER, *(f"{rule},k={k}" for k in (0.25, 0.5, 0.125) for rule in RULES))
POINTS = 50  # of a loss curve
TIMED = 20  # steps of each kind, alternately


def train(task: TextTask | MixerTask, variant: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    cuda = task.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training, losses, start = Training(task, variant, options, seed), [], time.perf_counter()
    for step in range(options.steps):
        losses.append(training.step()[0])
        if (step + 1) % max(1, options.steps // 4) == 0:
            print(f"  step {step + 1} of {options.steps}: loss {float(losses[-1]):.4f}", flush=True)
    seconds = now(task.device) - start
    peak = torch.cuda.max_memory_allocated() / 1e6 if cuda else None
    values = torch.stack(losses).tolist()
    points = min(POINTS, len(values))
    ends = [round(i * len(values) / points) for i in range(points + 1)]
    curve = [[b, round(statistics.fmean(values[a:b]), 4)] for a, b in itertools.pairwise(ends)]
    loss, accuracy = training.validate()
    return {
        "loss": round(loss, 4), "accuracy": round(accuracy, 4), "curve": curve, "seconds": round(seconds, 1),
        "memory_mb": round(training.memory_mb(), 1), "peak_mb": peak and round(peak), "data": task.data,
        "parameters": sum(p.numel() for p in training.model.parameters()),
    }  # fmt: skip


def measure(task: TextTask | MixerTask, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of steps of an exact and a converted model, taken alternately on the same batches."""
    pair = {EXACT: Training(task, EXACT, options, 0), "converted": Training(task, variant, options, 0)}
    taken: dict[str, list[list[float]]] = {name: [] for name in pair}
    for _ in range(TIMED + 2):
        batch = pair[EXACT].task.batch(pair[EXACT].generator)
        for name, training in pair.items():
            taken[name].append(training.step(batch)[1])
    outcome: dict[str, Any] = {"memory_mb": round(pair["converted"].memory_mb(), 1)}
    for name, steps in taken.items():
        kept = steps[2:]  # the first ones allocate and compile
        parts = {"backward": (1, 2), "step": (0, 3)}
        outcome[name] = {
            f"{part}_ms": round(1e3 * statistics.median(t[b] - t[a] for t in kept), 2) for part, (a, b) in parts.items()
        }
    return outcome


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    size = SIZES[options.task, options.size]
    changed = {name: getattr(options, name) for name in ("width", "depth", "batch", "steps") if getattr(options, name)}
    size = size._replace(**changed)
    options.steps = size.steps
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    )
    same = {"task": options.task, "size": options.size, **size._asdict(), "lr": size.lr * options.lr_factor,
            "device": options.device, "dtype": options.dtype}  # fmt: skip
    jobs = [("train", variant, seed) for seed in options.seeds for variant in options.variants]
    if "times" in options.what:
        jobs = [("times", variant, 0) for variant in options.variants if variant != EXACT] + jobs
    done = options.results.read_text().splitlines() if options.results.exists() else []
    known = [json.loads(line) for line in done]
    task = TASKS[options.task](size, device, options.data_dir)
    for i, (kind, variant, seed) in enumerate(job for job in jobs if job[0] in options.what):
        key = {"kind": kind, "variant": variant, "seed": seed, **same}
        if any(key.items() <= record.items() for record in known):
            continue
        print(f"{options.task} {options.size}, {kind} {i + 1}: {variant}, seed {seed}", flush=True)
        outcome = train(task, variant, options, seed) if kind == "train" else measure(task, variant, options)
        print(" ", {name: value for name, value in outcome.items() if name != "curve"}, flush=True)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as file:
            file.write(json.dumps({**key, **outcome, "machine": where, "torch": torch.__version__}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="text")
    parser.add_argument("--size", choices=("small", "large"), default="small")
    for name in ("width", "depth", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="in place of that of --size")
    parser.add_argument("--lr-factor", type=float, default=1.0, help="of the learning rate of --size")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: by autocast")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help=f"{EXACT} or POLICY,decay=…,k=…[,leave=…]")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--what", nargs="+", choices=("train", "times"), default=("train", "times"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="holds CIFAR-10")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
