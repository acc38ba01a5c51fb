"""At which link rate does a recipe still pay on a GPU that does nothing else? A model, from measured codec times.

python benchmarks/gpu_links.py    reads benchmarks/results/gpu.json, which benchmarks/gpu.py --json wrote

One exchange of a gradient, without overlap with anything: plain all-reduce of fp32 moves 2·4·(W−1)/W bytes an entry
through each rank's link; a recipe encodes once, sends its frame to W−1 ranks, and decodes W frames. Both use the whole
rate of the link, latency is left out. The break-even rate is where both take equally long; above it, all-reduce is
faster.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "gpu.json"
RATES = (10, 25, 50, 100, 200, 400)  # Gbit/s


def exchange_ms(row: dict[str, float], entries: int, ranks: int, gigabits: float) -> float:
    """Return the time of one exchange by frames."""
    decode = row["decode_ms"] + (row["decode_8_ms"] - row["decode_ms"]) * (ranks - 1) / 7  # of 1 and of 8 frames
    sent = (ranks - 1) * row["bits"] * entries / (gigabits * 1e6)
    return row["encode_ms"] + decode + sent


def all_reduce_ms(entries: int, ranks: int, gigabits: float, bits: int = 32) -> float:
    """Return the time of one all-reduce."""
    return 2 * bits * (ranks - 1) / ranks * entries / (gigabits * 1e6)


def break_even(row: dict[str, float], entries: int, ranks: int, bits: int = 32) -> float:
    """Return the rate in Gbit/s up to which frames are faster."""
    fixed = exchange_ms(row, entries, ranks, float("inf"))
    saved = (2 * bits / ranks - row["bits"]) * (ranks - 1) * entries / 1e6
    return saved / fixed if saved > 0 else 0.0


def main() -> None:
    results = json.loads(RESULTS.read_text())
    entries = results["entries"]
    for ranks in (2, 8):
        print(f"\n{ranks} ranks, {entries / 1e6:.0f} M entries, {results['device']}; ms of one exchange\n")
        print(f"| | {' | '.join(f'{rate} Gbit/s' for rate in RATES)} | pays up to | against fp16 |")
        print("|---" * (len(RATES) + 3) + "|")
        plain = [f"{all_reduce_ms(entries, ranks, rate):.1f}" for rate in RATES]
        print(f"| fp32 all-reduce | {' | '.join(plain)} | | |")
        for spec, row in results["codecs"].items():
            if "encode_ms" not in row:
                continue
            times = [f"{exchange_ms(row, entries, ranks, rate):.1f}" for rate in RATES]
            pays, pays_fp16 = break_even(row, entries, ranks), break_even(row, entries, ranks, 16)
            print(f"| `{spec}` | {' | '.join(times)} | {pays:.0f} Gbit/s | {pays_fp16:.0f} |")


if __name__ == "__main__":
    main()
