"""Bytes that a replica of torchft sends in a step: frames beside fp32 through torchft's own Gloo group.

sudo python benchmarks/torchft_bytes.py [--replicas 2,3] [--specs co3,ecq]

An MLP under torchft's DDP, AdamW. Every run has a network namespace of its own, whose loopback interface counts all
that replicas send each other in steps of one quorum: headers, acknowledgements, votes and heartbeats too. torchft's
fp8 (should_quantize=True) needs CUDA and NCCL, and is not among them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore

PLAIN = "fp32, torchft.ProcessGroupGloo"
SPECS = "co3:format=fp8,co3,ecq,topk:p=0.01;mask=off"  # ; stands for the comma in a spec
MINUTE = timedelta(seconds=60)


def train(replica: int, lighthouse: str, spec: str, width: int, steps: int, reading: Barrier) -> None:
    import gradwire.torchft
    import torchft

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    group = torchft.ProcessGroupGloo(MINUTE) if spec == PLAIN else gradwire.torchft.ProcessGroup(spec, timeout=MINUTE)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=group, load_state_dict=model.load_state_dict, state_dict=model.state_dict, min_replica_size=2,
        timeout=MINUTE, rank=0, world_size=1, store_addr="localhost", store_port=store.port, hostname="localhost",
        replica_id=f"replica_{replica}", lighthouse_addr=lighthouse,
    )  # fmt: skip
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), 1e-3))
    generator = torch.Generator().manual_seed(replica)
    reading.wait()
    for last in (10, 10 + steps):
        while manager.current_step() < last:
            x, y = torch.randn(16, width, generator=generator), torch.randint(0, 10, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        reading.wait()  # all have come so far,
        reading.wait()  # and the interface has been read
    manager.shutdown(wait=False)


def sent() -> int:
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def measure(replicas: int, spec: str, width: int, steps: int) -> float:
    """Bytes of a step and replica at the interface."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=replicas, join_timeout_ms=60_000)
    context = multiprocessing.get_context("spawn")
    reading = context.Barrier(replicas + 1, timeout=240)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    processes = [
        context.Process(target=train, args=(replica, address, spec, width, steps, reading))
        for replica in range(replicas)
    ]
    for process in processes:
        process.start()
    readings = []
    reading.wait()
    for _ in range(2):
        reading.wait()
        readings.append(sent())
        reading.wait()
    for process in processes:
        process.join(30)
        process.kill()
    lighthouse.shutdown()
    return (readings[1] - readings[0]) / steps / replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2,3")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--width", type=int, default=1024, help="of an MLP with 2·width² parameters")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        replicas, spec = options.inside.split("/")
        print(measure(int(replicas), spec, options.width, options.steps))
        return
    parameters = 2 * options.width**2 + 12 * options.width + 10
    print(
        f"{parameters} parameters: {4 * parameters / 1e6:.3f} MB in fp32; MB of a step and replica at the interface\n"
    )
    print("| replicas | exchange | MB sent | times fewer |\n|---:|---|---:|---:|", flush=True)
    for replicas in options.replicas.split(","):
        plain = 0.0
        for spec in (PLAIN, *(s.replace(";", ",") for s in options.specs.split(","))):
            inside = [sys.executable, __file__, "--inside", f"{replicas}/{spec}", "--steps", str(options.steps)]
            script = 'ip link set lo up && exec "$@"'
            command = ["unshare", "--net", "sh", "-c", script, "sh", *inside, "--width", str(options.width)]
            quiet = os.environ | {"RUST_LOG": "off", "GLOO_SOCKET_IFNAME": "lo"}
            run = subprocess.run(command, check=False, capture_output=True, text=True, env=quiet)
            if run.returncode:
                sys.exit(run.stderr[-2000:])
            count = float(run.stdout.splitlines()[-1])
            plain = plain or count
            print(f"| {replicas} | {spec} | {count / 1e6:.3f} | {plain / count:.1f} |", flush=True)


if __name__ == "__main__":
    main()
