"""Three replicas that train with torchft and exchange frames; one is killed, and comes back.

python examples/torchft_training.py                          all three, on this machine
torchft_lighthouse --min_replicas 2                          or each by itself, on any machine: first the lighthouse,
python examples/torchft_training.py --replica 0 --lighthouse http://HOST:29510        then as many as you like
"""

import argparse
import multiprocessing
import os
import time
import zlib
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn.utils import parameters_to_vector

import gradwire.torchft
from torchft import DistributedDataParallel, Manager, Optimizer


def train(replica: int, lighthouse: str, args: argparse.Namespace, die_at: int = -1) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state_dict() -> dict:  # what a replica gets that joins: never an error memory
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica; torchrun brings one
    group = gradwire.torchft.ProcessGroup(args.spec, timeout=timedelta(seconds=30))  # ← the line
    manager = Manager(
        pg=group, load_state_dict=load_state_dict, state_dict=state_dict, min_replica_size=2,
        timeout=timedelta(seconds=30), rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        replica_id=f"replica_{replica}", lighthouse_addr=lighthouse,
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adamw)
    generator = torch.Generator().manual_seed(time.time_ns())
    loss = torch.tensor(float("nan"))
    while manager.current_step() < args.steps:
        x = torch.randn(64, 32, generator=generator)
        optimizer.zero_grad()  # begins a round: who is there?
        loss = nn.functional.mse_loss(wrapped(x), teacher(x).detach())
        loss.backward()
        if manager.current_step() == die_at:
            print(f"replica {replica}: killed at step {die_at}", flush=True)
            os.kill(os.getpid(), 9)
        optimizer.step()  # ends it: did everything arrive?
        time.sleep(0.02)  # as if the network were larger
        if manager.current_step() % 50 == 0:
            there = manager.num_participants()
            print(
                f"replica {replica}: step {manager.current_step()}, loss {loss:.4f}, {there} replicas\n",
                end="",
                flush=True,
            )
    stats = group.stats()
    checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
    print(
        f"replica {replica}: {stats['steps']} steps, loss {loss:.4f}, {stats['frame_bytes']} bytes of frames "
        f"({stats['ratio']:.1f} times fewer than fp32), checksum of the parameters {checksum:08x}\n",
        end="",
        flush=True,
    )
    manager.shutdown(wait=False)


def train_three(args: argparse.Namespace) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=1000)
    context = multiprocessing.get_context("forkserver")  # which starts a replica anew within a second
    context.set_forkserver_preload(["gradwire.torchft", "__main__"])

    def start(replica: int, die_at: int = -1) -> multiprocessing.Process:
        process = context.Process(target=train, args=(replica, lighthouse.address(), args, die_at))
        process.start()
        return process

    processes = [start(0), start(1), start(2, args.steps // 4)]
    processes[2].join()
    processes[2] = start(2)
    for process in processes:
        process.join()
    lighthouse.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="co3", help="a recipe")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--replica", type=int, help="train only this one")
    parser.add_argument("--lighthouse", default=os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510"))
    args = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "warn")
    train_three(args) if args.replica is None else train(args.replica, args.lighthouse, args)
