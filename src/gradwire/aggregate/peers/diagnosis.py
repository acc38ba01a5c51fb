"""Why a collective has failed, in words: which rank is lost, late, or had failed before.

1. A rank that is gone, stopped or cannot be reached is named, unless it had said before that it has failed itself.
2. Else it is the cause that another rank has told: it found a damaged message, say, and has left.
3. Else it is the rank that answers but was not in this exchange: it is at another step, or still computing.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Protocol

from gradwire.aggregate.peers.roll_call import ALIVE, GONE, PATIENCE, SILENT, RollCall
from gradwire.aggregate.peers.status_server import Board

WAITING, COMPUTING = "waits for the others", "computes"  # what a rank is doing


SLICE, POLL, LOOK = 0.25, 0.0002, 5.0  # seconds: to wait at a time, on a GPU, and until we look after the others


class Work(Protocol):
    """A collective under way: what `torch.distributed.Work` promises, as far as it is used here."""

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> object:
        """Return when it is done; raise RuntimeError if it has failed, or is not done within the timeout."""
        ...


def wait(work: Work, roll_call: RollCall | None, gpu_timeout: float = 0.0) -> None:
    """Until it is done. RuntimeError if it fails, or as soon as another rank says that it has failed.

    Gloo reports a closed connection to the neighbours of a lost rank only, and NCCL to nobody; the others would wait
    for the timeout, which is half an hour by default. On a GPU `gpu_timeout` is that of the group, in seconds.
    """
    start = looked = time.monotonic()
    if roll_call is not None:
        roll_call.at(WAITING)
    while not _done(work, gpu_timeout > 0):
        now = time.monotonic()
        if roll_call is not None and roll_call.somebody_failed():
            raise RuntimeError("another rank has failed")
        if roll_call is not None and now - looked > LOOK:
            looked = now
            if GONE in roll_call.ask().values():
                raise RuntimeError("a peer has gone")
        # At the timeout NCCL's watchdog ends the whole process: what is to be said must be said before.
        if gpu_timeout and now - start > max(gpu_timeout - PATIENCE - 2, gpu_timeout / 2):
            raise RuntimeError(f"Timed out after {now - start:.0f} s")
    if roll_call is not None:
        roll_call.at(COMPUTING)


def _done(work: Work, on_gpu: bool) -> bool:
    """Whether it is, after a while."""
    if on_gpu:  # there `wait` would wait for nothing, or for ever
        if not work.is_completed():
            time.sleep(POLL)
            return False
    else:
        try:
            work.wait(timedelta(seconds=SLICE))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
    work.wait()  # raises if it has failed
    return True


def explain(roll_call: RollCall, error: BaseException, timeout: float) -> str:
    """The cause of `error`, which torch has raised in a collective of this timeout.

    Takes PATIENCE seconds and a little at most, and raises nothing.
    """
    deadline = time.monotonic() + PATIENCE
    board, names = roll_call.board, roll_call.ranks
    with board.news:
        second, board.own.failed = board.own.failed, True  # whoever is asked from now on, says so
        if second:  # collectives that were under way fail in the wake of the first
            board.news.wait_for(lambda: board.own.cause, deadline - time.monotonic())
            return f"{board.own.cause or 'the exchange had failed already'} ({_short(error)})"
    found = roll_call.ask()
    timed_out = "imed out" in str(error) or "imeout" in str(error)
    waited = f"within {timeout:g} s" if timed_out else "any more"
    lost = [_lost(names[r], state, waited) for r, state in found.items() if state != ALIVE and not _excused(board, r)]
    cause = "; ".join(lost) or _told(board)
    if not cause and timed_out:
        cause = _late(board, names, waited)
    # A connection that was closed, though nobody is lost: another rank has failed just now, and will say why.
    cause = cause or _told(board, deadline) or _late(board, names, waited) or _unknown(roll_call, timed_out, timeout)
    roll_call.tell(cause, [r for r, state in found.items() if state in (ALIVE, SILENT)])
    return f"{cause} ({_short(error)})"


def _excused(board: Board, rank: int) -> bool:
    """It had told us that it has failed, and may have ended since."""
    with board.news:
        report = board.others.get(rank)
        return report is not None and report.failed


def _lost(rank: int, state: str, waited: str) -> str:
    if state == GONE:
        return f"rank {rank} is gone: its process was killed or has ended, or it has dropped the model"
    if state == SILENT:
        return f"rank {rank} does not answer {waited}: its process is stopped or hangs"
    return f"rank {rank} cannot be reached {waited}: its machine or the network to it is down"


def _told(board: Board, deadline: float = 0.0) -> str:
    """The first cause that another rank has found; those that have failed are given time to find it."""
    with board.news:
        while True:
            failed = [report for _, report in sorted(board.others.items()) if report.failed]
            causes = [report.cause for report in failed if report.cause]
            left = deadline - time.monotonic()
            if causes or not failed or left <= 0:
                return causes[0] if causes else ""
            board.news.wait(left)


def _late(board: Board, names: list[int], waited: str) -> str:
    """Those that are not where this rank is."""
    own = board.own
    with board.news:
        alive = [report for _, report in sorted(board.others.items()) if not report.failed]
    others = [r for r in alive if (r.step, r.doing) != (own.step, own.doing)]
    if not others:
        return ""
    here = f"rank {names[own.rank]} {own.doing} in step {own.step}"
    there = (f"rank {names[r.rank]} is alive and {r.doing} in step {r.step}, for {r.seconds:.0f} s" for r in others)
    return f"not all ranks have come to the exchange {waited}: {here}, {'; '.join(there)}"


def _unknown(roll_call: RollCall, timed_out: bool, timeout: float) -> str:
    failed = [roll_call.ranks[r] for r, report in sorted(roll_call.board.others.items()) if report.failed]
    if failed:
        return f"rank {failed[0]} has failed, and did not say why: see its own error"
    if not roll_call.reaches_all:
        return (
            "lost a peer, or it did not answer within the process group's timeout; nobody knows which one, since "
            "ranks cannot reach each other at the ports that gradwire asks at"
        )
    if timed_out:
        return f"all ranks are there, but the exchange took longer than the process group's timeout of {timeout:g} s"
    return "a connection was lost, though all ranks are there"


# Where in Gloo, or in a callback of it, an error was raised; and Gloo's advice.
NOISE = re.compile(
    r"^(Got the following error when running the callback: RuntimeError: )?(\[\S+:\d+\] )?|\.? This is typically.*$"
)


def _short(error: BaseException) -> str:
    """The first line, and of that what tells something."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return NOISE.sub("", line)[:300]
