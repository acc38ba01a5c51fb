"""Training step over a thin link: plain DDP, the fp16 hook and gradwire, interleaved in one run.

    sudo python benchmarks/link.py [--rate 1gbit] [--ranks 2] [--codec co3] [--save]

Every rank is a host of its own: a network namespace behind a bridge, its link shaped to RATE in both directions with
tc's token bucket (Linux, root, iproute2). The burst is 1 ms of the rate: with a larger one short messages would pass
unshaped. Bytes are those that the interface itself counts. The model is an MLP of 10.5 M parameters, batch 16, one
thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETWORK = "10.77.0"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class Hosts:
    """Namespaces gw1, gw2, … with addresses 10.77.0.1, …, on one bridge in the namespace gwsw."""

    def __init__(self, count: int, rate: str):
        self.count, self.rate = count, rate

    def __enter__(self) -> Hosts:
        run("ip", "netns", "add", "gwsw")
        run("ip", "-n", "gwsw", "link", "add", "br0", "type", "bridge")
        run("ip", "-n", "gwsw", "link", "set", "br0", "up")
        for i in range(1, self.count + 1):
            host, port = f"gw{i}", f"gwp{i}"
            run("ip", "netns", "add", host)
            run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", "gwsw")
            run("ip", "-n", host, "addr", "add", f"{NETWORK}.{i}/24", "dev", "eth0")
            run("ip", "-n", "gwsw", "link", "set", port, "master", "br0")
            for namespace, device in ((host, "lo"), (host, "eth0"), ("gwsw", port)):
                run("ip", "-n", namespace, "link", "set", device, "up")
            self._shape(host, "eth0")
            self._shape("gwsw", port)
        return self

    def _shape(self, namespace: str, device: str) -> None:
        if self.rate == "none":
            return
        number, unit = int(self.rate[:-4]), self.rate[-4:]
        bits = number * {"gbit": 10**9, "mbit": 10**6}[unit]
        burst = max(16_000, bits // 8 // 1000)
        shape = ["tbf", "rate", self.rate, "burst", str(burst), "latency", "100ms"]
        run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *shape)

    def __exit__(self, *_: object) -> None:
        for name in [*(f"gw{i}" for i in range(1, self.count + 1)), "gwsw"]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def interface_bytes() -> tuple[int, int]:
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def worker(options: argparse.Namespace) -> None:
    """One rank: all contestants in turn, a few steps each, round after round."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    import gradwire

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, y = torch.randn(16, 3072), torch.randint(0, 10, (16,))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )  # fmt: skip

    contestants: dict[str, nn.Module] = {"compute only": model(), "plain DDP": DistributedDataParallel(model())}
    half = DistributedDataParallel(model())
    half.register_comm_hook(None, fp16_compress_hook)
    contestants["fp16 hook"] = half
    handles = {}
    for spec in options.codec:
        contestants[spec] = DistributedDataParallel(model())
        handles[spec] = gradwire.ddp.attach(contestants[spec], spec)
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.01) for name, m in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    sent: dict[str, int] = dict.fromkeys(contestants, 0)
    stated: dict[str, float] = dict.fromkeys(contestants, 0.0)

    for round_number in range(options.rounds + 1):
        for name, network in contestants.items():
            before, known = interface_bytes()[0], handles[name].stats()["wire_bytes_sent"] if name in handles else 0
            for _ in range(options.steps):
                dist.barrier()
                start = time.perf_counter()
                optimizers[name].zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                optimizers[name].step()
                if round_number:  # in the first round DDP rebuilds its buckets
                    seconds[name].append(time.perf_counter() - start)
            if round_number:
                sent[name] += interface_bytes()[0] - before
                if name in handles:
                    stated[name] += handles[name].stats()["wire_bytes_sent"] - known
    if dist.get_rank() == 0:
        steps = options.rounds * options.steps
        rows = {}
        for name, times in seconds.items():
            rows[name] = {"ms": statistics.median(times) * 1e3, "interface_bytes_per_step": sent[name] / steps}
            if name in handles:
                s = handles[name].stats()
                rows[name] |= {"stated_bytes_per_step": stated[name] / steps, "frame_ratio": s["ratio"]}
                rows[name] |= {k: s[k] / s["steps"] * 1e3 for k in ("encode_s", "wait_s", "decode_s")}
        Path(options.worker).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def report(rows: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    compute = rows["compute only"]["ms"]
    print(f"\n{options.ranks} ranks at {options.rate}, 10.5 M parameters, batch 16, median step")
    print(f"{'':16s}{'ms':>9s}{'× compute':>11s}{'MB sent':>9s}{'stated':>9s}   encode / wait / decode, ms")
    for name, r in rows.items():
        line = f"{name:16s}{r['ms']:9.1f}{r['ms'] / compute:11.2f}{r['interface_bytes_per_step'] / 1e6:9.2f}"
        if "stated_bytes_per_step" in r:
            line += f"{r['stated_bytes_per_step'] / 1e6:9.2f}   "
            line += " / ".join(f"{r[k]:.1f}" for k in ("encode_s", "wait_s", "decode_s"))
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="such as 100mbit, 1gbit, 10gbit, none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codec", action="append", help="a gradwire spec; may be given several times")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.codec = options.codec or ["co3"]
    if options.worker:
        worker(options)
        return
    if os.geteuid() != 0:
        sys.exit("link.py needs root to make network namespaces: run it with sudo")
    with tempfile.TemporaryDirectory() as folder, Hosts(options.ranks, options.rate):
        result = Path(folder) / "rows.json"
        common = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": "29511"}
        processes = []
        for rank in range(options.ranks):
            env = {**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = ["ip", "netns", "exec", f"gw{rank + 1}", sys.executable, __file__, *sys.argv[1:]]
            processes.append(subprocess.Popen([*command, "--worker", str(result)], env=env))
        codes = [p.wait() for p in processes]
        if any(codes):
            sys.exit("a worker failed")
        rows = json.loads(result.read_text())
    report(rows, options)
    if options.save:
        path = Path(__file__).parent / "results" / f"link_{options.rate}_{options.ranks}.json"
        command = f"python benchmarks/link.py --rate {options.rate} --ranks {options.ranks}"
        path.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
