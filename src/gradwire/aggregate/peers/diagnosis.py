"""Why a collective has failed, in words: which rank is lost, late, or had failed before.

1. A rank that is gone, stopped or cannot be reached is named, unless it had said before that it has failed itself.
2. Otherwise the cause is what another rank has said: it found a damaged message, say, and has left.
3. Otherwise a rank is named that had not been reached before, and accepts connections, but does not answer.
4. Otherwise the rank is named that answers but was not in this exchange: it is at another step, or still computing.

A rank that has failed and not said why, but still answers, looks for the cause as this one does: nobody names it.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Protocol

from gradwire.aggregate.peers import interpreter_exit
from gradwire.aggregate.peers.roll_call import ALIVE, FINDING, GONE, PATIENCE, SILENT, RollCall
from gradwire.aggregate.peers.status_server import ENDING
from gradwire.errors import AggregateError

WAITING, COMPUTING = "waits for the others", "computes"  # what a rank is doing

SLICE = 0.25  # seconds to wait for a collective at a time
GPU_POLL = 0.0002  # seconds between looks at a collective on a GPU
ASK_AGAIN = 0.1  # seconds between questions to a rank that seems to be ending
ASK_EVERY = 5.0  # seconds of waiting until the other ranks are asked whether they are still there


class Work(Protocol):
    """A collective under way: what `torch.distributed.Work` promises, as far as it is used here."""

    def is_completed(self) -> bool:
        """Tell whether it has ended, well or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> object:
        """Return when it is done; raise RuntimeError if it has failed, or is not done within the timeout."""
        ...


def wait(work: Work, roll_call: RollCall | None, gpu_timeout: float = 0.0) -> None:
    """Wait until the collective is done. RuntimeError if it fails, or as soon as another rank says that it has failed.
    AggregateError if the interpreter ends meanwhile.

    Gloo reports a closed connection to the neighbours of a lost rank only, and NCCL to nobody; the others would wait
    for the timeout, which is half an hour by default. On a GPU `gpu_timeout` is that of the group, in seconds.
    """
    start = asked = time.monotonic()
    if roll_call is not None:
        roll_call.set_activity(WAITING)
    while not _done(work, gpu_timeout > 0):
        now = time.monotonic()
        if interpreter_exit.has_begun():
            raise AggregateError("the interpreter ends, and waits for no exchange")
        if roll_call is not None and roll_call.somebody_failed():
            raise RuntimeError("another rank has failed")
        if roll_call is not None and now - asked > ASK_EVERY:
            asked = now
            if GONE in roll_call.ask().values():
                raise RuntimeError("a peer has gone")
        # At the timeout NCCL's watchdog ends the whole process, so that the error has to be raised before.
        if gpu_timeout and now - start > max(gpu_timeout - PATIENCE - 2, gpu_timeout / 2):
            raise RuntimeError(f"Timed out after {now - start:.0f} s")
    if roll_call is not None:
        roll_call.set_activity(COMPUTING)


def _done(work: Work, on_gpu: bool) -> bool:
    """Wait a little, and tell whether the collective is done."""
    if on_gpu:  # there `wait` would wait for nothing, or for ever
        if not work.is_completed():
            time.sleep(GPU_POLL)
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
    """Return the cause of an error that torch has raised in a collective with this timeout, in seconds.

    It takes PATIENCE seconds and a little at most, and raises nothing. The other ranks are told the cause.
    """
    deadline = time.monotonic() + PATIENCE
    status, numbers = roll_call.status, roll_call.ranks
    if not status.begin_failure():  # collectives that were under way fail in the wake of the first
        cause = status.wait_for_cause(2 * FINDING)  # until the thread that was first has found it, no longer
        return f"{cause or 'the exchange had failed already'} ({_first_line(error)})"
    timed_out = "imed out" in str(error) or "imeout" in str(error)
    waited = f"within {timeout:g} s" if timed_out else "any more"
    states = _ask(roll_call)
    late = _describe_late(roll_call, states, waited) if timed_out else ""  # now, since they may come any moment
    if not _is_known(roll_call, states):
        states = _ask_on(roll_call, states, timed_out, deadline)
    cause = "; ".join(_describe_missing(numbers[r], state, waited) for r, state in _missing(roll_call, states).items())
    cause = cause or status.wait_for_peer_cause(deadline=0.0) or late
    cause = cause or status.wait_for_peer_cause(deadline) or _describe_late(roll_call, states, waited)
    cause = cause or _describe_unknown(roll_call, states, timed_out, timeout)
    roll_call.announce_failure(cause, [rank for rank, state in states.items() if state in (ALIVE, SILENT, ENDING)])
    return f"{cause} ({_first_line(error)})"


def _ask(roll_call: RollCall) -> dict[int, str]:
    """Return how the other ranks are; those that have never answered are left out."""
    states = roll_call.ask()
    return states | {report.rank: ENDING for report in roll_call.status.peer_reports(failed=False)
                     if report.doing == ENDING and states.get(report.rank) == ALIVE}  # fmt: skip


def _missing(roll_call: RollCall, states: dict[int, str]) -> dict[int, str]:
    """Return those of them that are lost or ending though they had not said that they have failed."""
    had_failed = {report.rank for report in roll_call.status.peer_reports(failed=True)}  # they may have ended since
    return {rank: state for rank, state in states.items() if state != ALIVE and rank not in had_failed}


def _is_known(roll_call: RollCall, states: dict[int, str]) -> bool:
    """Tell whether a rank is missing, or another one has said the cause."""
    return bool(_missing(roll_call, states) or roll_call.status.wait_for_peer_cause(deadline=0.0))


def _ask_on(roll_call: RollCall, states: dict[int, str], timed_out: bool, deadline: float) -> dict[int, str]:
    """Ask until it is known, or until the deadline; also those that have never answered, which may be stopped.

    Return how the ranks are then. Those that have answered need not be asked again after a timeout. But where a
    connection was closed, its rank is about to end, and still answers. Or another rank has failed just now, and will
    say why; but it may be looking for the same lost rank, so that it is not enough to wait for its word.
    """
    again = bool(states) and not timed_out
    seconds = max(deadline - time.monotonic(), PATIENCE / 3)  # if others have been slow to answer, these may be, too
    unreached = roll_call.ask_unreached(seconds) if again or timed_out else None
    while again or (unreached is not None and not unreached.done()):
        time.sleep(ASK_AGAIN)
        if again:
            states = _ask(roll_call)
            again = time.monotonic() <= deadline
        if _is_known(roll_call, states):
            return states
    if unreached is not None:
        states = states | {rank: state for rank, state in unreached.result().items() if state in (ALIVE, SILENT)}
    return states


def _describe_missing(rank: int, state: str, waited: str) -> str:
    if state == GONE:
        return f"rank {rank} is gone: its process was killed or has ended, or it has dropped the model"
    if state == ENDING:
        return f"rank {rank} {ENDING}"
    if state == SILENT:
        return f"rank {rank} does not answer {waited}: its process is stopped or hangs"
    return f"rank {rank} cannot be reached {waited}: its machine or the network to it is down"


def _describe_late(roll_call: RollCall, states: dict[int, str], waited: str) -> str:
    """Name the ranks that are at another step or do something else than this one; empty if there are none.

    Only those that have just answered: what another said when it attached is old by now, and it may be lost.
    """
    here, numbers = roll_call.status.report, roll_call.ranks
    # It is in an exchange, even if another of its exchanges has ended meanwhile and said that it computes.
    doing = WAITING if here.doing == COMPUTING else here.doing
    answers = [r for r in roll_call.status.peer_reports(failed=False) if states.get(r.rank) == ALIVE]
    elsewhere = [r for r in answers if (r.step, r.doing) != (here.step, doing)]
    if not elsewhere:
        return ""
    this_rank = f"rank {numbers[here.rank]} {doing} in step {here.step}"
    others = (
        f"rank {numbers[r.rank]} is alive and {r.doing} in step {r.step}, for {r.seconds:.0f} s" for r in elsewhere
    )
    return f"not all ranks have come to the exchange {waited}: {this_rank}, {'; '.join(others)}"


def _describe_unknown(roll_call: RollCall, states: dict[int, str], timed_out: bool, timeout: float) -> str:
    numbers = roll_call.ranks
    failed = [report.rank for report in roll_call.status.peer_reports(failed=True)]
    unheard = [rank for rank in range(len(numbers)) if rank not in (roll_call.rank, *states, *failed)]
    if unheard:
        lost, unknown = "lost a peer", "nobody knows which one, since ranks cannot reach each other at the ports"
        if len(unheard) == 1:  # of two ranks it can be nobody else
            lost = f"{'' if len(numbers) == 2 else 'probably '}lost rank {numbers[unheard[0]]}"
            unknown = "whether it is gone nobody knows, since it has never answered this rank at the port"
        return f"{lost}, or it did not answer within the process group's timeout; {unknown} that gradwire asks at"
    ended = [rank for rank in failed if states.get(rank, ALIVE) != ALIVE]
    if ended:
        return f"rank {numbers[ended[0]]} has failed, and did not say why: see its own error"
    if timed_out:
        return f"all ranks are there, but the exchange took longer than the process group's timeout of {timeout:g} s"
    return "a connection was lost, though all ranks are there"


# Where in Gloo, or in a callback of it, an error was raised; and Gloo's advice.
NOISE = re.compile(
    r"^(Got the following error when running the callback: RuntimeError: )?(\[\S+:\d+\] )?|\.? This is typically.*$"
)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without what only Gloo's authors understand."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return NOISE.sub("", line)[:300]
