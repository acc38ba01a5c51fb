"""`gradwire aggregator`: the program that adds up the words that workers send."""

from __future__ import annotations

import json as json_module
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from typer import Option

from gradwire.aggregator import addresses, keys
from gradwire.aggregator.addresses import Address
from gradwire.aggregator.engine import Engine
from gradwire.aggregator.jobs import Limits
from gradwire.aggregator.server import Server
from gradwire.cli.options import writable
from gradwire.cli.written_file import write_file
from gradwire.errors import GradwireError, SpecError

COUNTERS_SHOWN = {
    "packets": "packets received",
    "results": "sums complete",
    "resent": "results sent again",
    "duplicates": "packets received again",
    "old": "of an old round",
    "forged": "with a wrong code",
    "malformed": "malformed",
    "unknown": "of no session",
    "dropped": "dropped for want of room",
    "refused": "workers refused",
}
LINE_EVERY = 10.0  # seconds between lines where there is no terminal
SMALL_BUFFER = 8 << 20  # bytes of a socket's buffer


def aggregator(
    *,
    bind: Annotated[
        str, Option(metavar="IP:PORT", help="Where to listen, UDP; [::]:9999 is IPv4 and IPv6.")
    ] = "0.0.0.0:9999",
    key_file: Annotated[
        Path | None, Option(help="32 hexadecimal digits. Default: GRADWIRE_KEY, or a new one, which is printed.")
    ] = None,
    engine: Annotated[str, Option(help="userspace; or xdp, in the kernel (root, clang).")] = "userspace",
    interface: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="xdp: the network interface workers are behind; may be given again."),
    ] = None,
    max_jobs: Annotated[int, Option(min=1, help="Jobs at a time.")] = Limits.jobs,
    max_slots: Annotated[int, Option(min=1, max=65536, help="Packets of a job under way.")] = Limits.slots,
    max_memory: Annotated[int, Option(min=1, metavar="MB", help="Of the sums of all jobs.")] = Limits.memory >> 20,
    idle: Annotated[float, Option(min=1, metavar="SECONDS", help="Forget jobs silent for so long.")] = Limits.idle,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to this file at the end.")] = None,
) -> None:
    """Add up the gradients of several workers, for `gradwire train --aggregator HOST:PORT`.

    Ends with Ctrl-C or SIGTERM. Workers that lose it join the next one started at its address, and go on.

    **Examples**

    With a key of its own, to be exported on the workers: `gradwire aggregator`

    `(umask 077; openssl rand -hex 16 > key); gradwire aggregator --bind 10.0.0.1:9999 --key-file key`
    """
    console = Console()
    writable(json, "--json")  # rather now than after a day
    key, fresh = _key(key_file)
    listen_at = addresses.resolve(addresses.split(bind, "--bind"), "--bind")
    data_engine = _make_engine(engine, listen_at, interface or [])
    server = Server(data_engine, key, Limits(jobs=max_jobs, slots=max_slots, memory=max_memory << 20, idle=idle))
    ended = _note_signals()  # who reads the next line may send one at once
    console.print(f"aggregator ({engine}) at {addresses.in_text(data_engine.address)}", highlight=False)
    if fresh:
        console.print(f"on every worker: export {keys.VARIABLE}={key.hex()}", highlight=False, soft_wrap=True)
    if getattr(data_engine, "receive_buffer", SMALL_BUFFER) < SMALL_BUFFER:
        console.print(
            "its socket's buffer is small, so packets may be lost; for speed: sysctl -w net.core.rmem_max=33554432",
            highlight=False,
        )
    try:
        _serve(server, console, ended)
        figures = _figures(server, engine)
    finally:
        server.shut()
    console.print(_closing_table(figures))
    if json is not None:
        text = json_module.dumps(figures, indent=1) + "\n"
        write_file(json, lambda file: file.write(text.encode()))


def _key(file: Path | None) -> tuple[bytes, bool]:
    """Return the key, and whether it is a new one."""
    if file is not None:
        return keys.key_from_file(file), False
    try:
        return keys.key_from_environment(), False
    except SpecError:
        if keys.is_set():
            raise
        return bytes.fromhex(keys.make_key()), True


def _make_engine(name: str, bind: Address, interfaces: list[str]) -> Engine:
    if name == "userspace":
        if interfaces:
            raise SpecError("--interface is for --engine xdp")
        from gradwire.aggregator.userspace_engine import UserspaceEngine

        return UserspaceEngine(bind)
    if name != "xdp":
        raise SpecError(f"--engine {name}: there are userspace and xdp")
    try:
        from gradwire.aggregator.xdp.engine import XdpEngine
    except ImportError as error:
        raise GradwireError(f"this build has no XDP engine ({error}): use --engine userspace") from None
    return XdpEngine(bind, interfaces=interfaces)


def _note_signals() -> list[int]:
    """Return a list that the signals which end the aggregator are added to from now on."""
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: ended.append(received))
    return ended


def _serve(server: Server, console: Console, ended: list[int]) -> None:
    """Serve until a signal comes, with a live table on a terminal, and a line now and then elsewhere."""
    if console.is_terminal:
        with Live(_live_table(server, 0.0), console=console, refresh_per_second=2, transient=True) as live:
            before, at = server.counters()["bytes_in"], time.monotonic()
            while not ended:
                server.serve_once(0.05)
                if (now := time.monotonic()) - at > 0.5:
                    received = server.counters()["bytes_in"]
                    live.update(_live_table(server, (received - before) / (now - at)))
                    before, at = received, now
        return
    last_line, packets_before = time.monotonic(), server.counters()["packets"]
    jobs_before: set[str] = set()
    while not ended:
        server.serve_once(0.05)
        jobs = {job.name for job in server.jobs()}
        if jobs == jobs_before and time.monotonic() - last_line < LINE_EVERY:
            continue
        counters, last_line = server.counters(), time.monotonic()
        if jobs != jobs_before or counters["packets"] != packets_before:  # a service that nobody uses fills no log
            console.print(
                f"{last_line - server.started:.0f} s: {len(jobs)} {'job' if len(jobs) == 1 else 'jobs'},"
                f" {counters['packets']:,} packets, {counters['results']:,} sums, {counters['resent']:,} sent again",
                highlight=False,
            )
        jobs_before, packets_before = jobs, counters["packets"]


def _live_table(server: Server, rate: float) -> Table:
    counters = server.counters()
    table = Table(
        title=f"{rate / 1e6:,.0f} MB/s, {counters['results']:,} sums",
        caption=", ".join(f"{counters[name]:,} {text}" for name, text in COUNTERS_SHOWN.items() if counters.get(name)),
    )
    for heading in ("job", "workers", "slots", "longest silence"):
        table.add_column(heading, justify="right")
    for job in server.jobs():
        silence = f"{max(job.silences):.1f} s" if job.silences else "…"
        table.add_row(job.name, f"{job.joined}/{job.world}", str(job.slots or "joining"), silence)
    return table


def _figures(server: Server, engine: str) -> dict[str, Any]:
    return {"engine": engine, "seconds": time.monotonic() - server.started, **server.counters()}


def _closing_table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"aggregator: {figures['seconds']:.0f} s", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, text in COUNTERS_SHOWN.items():
        table.add_row(text, f"{figures.get(name, 0):,}")
    table.add_row("MB received", f"{figures['bytes_in'] / 1e6:,.1f}")
    table.add_row("MB sent", f"{figures['bytes_out'] / 1e6:,.1f}")
    return table
