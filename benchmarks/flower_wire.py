"""Bytes of Flower's messages beside bytes at the socket: SuperNodes reach their SuperLink through a proxy that counts.

    python benchmarks/flower_wire.py [--rounds 3] [--save]

Runs examples/flower in deployment on loopback, without TLS (which would hide the requests), with raw arrays and with
gradwire, and puts what `Compressed.stats()` says beside the TCP payload of all requests that move messages and their
parts, with HTTP's headers. Polling, heartbeats and the transfer of the app itself are counted separately.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from counting_proxy import CountingProxy
from machine import processor
from support.flower_fleet import Fleet, commands

RESULTS = Path(__file__).parent / "results" / "flower_wire.md"
PUSH = ("/v1/fleet/push-messages", "/v1/fleet/push-object")
PULL = ("/v1/fleet/pull-object", "/v1/fleet/confirm-message-received")  # what is polled for is not counted
MOD = 'mods=[gradwire.flower.compress("co3")]'


def run(folder: Path, rounds: int, compressed: bool) -> tuple[dict[str, int], CountingProxy]:
    """The server's figures, and those of the proxy."""
    with Fleet(folder) as fleet:
        app = fleet.app / "digits" / "client_app.py"
        text = app.read_text()
        assert MOD in text
        app.write_text(text if compressed else text.replace(MOD, ""))
        (fleet.home / "config.toml").write_text(
            fleet.ours('[superlink.deployment]\naddress = "127.0.0.1:8000"\ninsecure = true\n')
        )
        fleet.start("superlink", "flower-superlink --insecure --port 8000 --disable-runtime-dependency-installation")
        fleet.wait_for("superlink", "Uvicorn running on", 60)
        proxy = CountingProxy(("127.0.0.1", int(fleet.ports["8000"])))
        for number in range(2):
            where = f"--superlink 127.0.0.1:{proxy.port} --port {fleet.ports[str(9094 + number)]}"
            fleet.start(
                f"node {number}",
                f"flower-supernode --insecure {where} --node-config 'partition-id={number} num-partitions=2'",
            )
        for number in range(2):
            fleet.wait_for(f"node {number}", "SuperNode ID", 60)
        settings = f"--run-config 'num-server-rounds={rounds} fraction-evaluate=0.0'"
        log = fleet.run("run", f"{commands('flwr run . deployment')[0]} {settings}", 300)
        proxy.close()
    (line,) = (line for line in log.splitlines() if line.startswith("gradwire: "))
    return ast.literal_eval(line.removeprefix("gradwire: ")), proxy


def report(rounds: int) -> str:
    lines = [
        "# Flower's messages at the socket",
        "",
        f"`python benchmarks/flower_wire.py --rounds {rounds} --save`, on {processor()}: bytes of a client in a round"
        " of training. Each object of a message is a request of its own; its headers go both ways.",
        "",
        "| updates | reply, by `stats()` | pushed at the socket | in requests | asked for the model | uplink"
        " | model, by `stats()` | downlink | in requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for compressed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            stats, proxy = run(Path(folder), rounds, compressed)
        count = stats["replies"]

        def each(counter: Counter[str], paths: tuple[str, ...], count: int = count) -> float:
            return sum(counter[path] for path in paths) / count

        pushed, asked = each(proxy.sent, PUSH), each(proxy.sent, PULL)
        figures = [
            stats["upload_bytes"] / count, pushed, each(proxy.requests, PUSH), asked, pushed + asked,
            stats["download_bytes"] / count, each(proxy.received, PUSH + PULL), each(proxy.requests, PULL),
        ]  # fmt: skip
        name = "`co3`" if compressed else "raw arrays"
        lines.append(" | ".join([f"| {name}", *(f"{figure:,.0f}" for figure in figures)]) + " |")
        polling = sum(n for path, n in proxy.sent.items() if path not in PUSH + PULL)
        print(f"{name}: beside that, polling, heartbeats and the app took {polling:,} bytes of all uplinks")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    text = report(options.rounds)
    print(text)
    if options.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
