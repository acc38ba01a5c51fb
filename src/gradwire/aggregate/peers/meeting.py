"""Whether all ranks have come to a call that all must make, such as `all_ranks.state_dict()`, before it begins.

A collective would not do: where one rank makes the call and the others go on training, its collective would meet other
ones of theirs, or wait for them until the process group's timeout, and nothing would say which call is at fault. So
ranks ask each other over the sockets of the roll call, and begin only when everyone is there:

1. every rank counts its meetings in what it answers; rank 0 counts those that all have come to;
2. rank 0 asks all others until each has counted this meeting, then counts it itself;
3. the others ask rank 0 until it has. As long as it waits, too, it is left some seconds more to say for whom.

Ranks that cannot be reached (a firewall) are not waited for here, but in the collective that follows.
"""

from __future__ import annotations

import time

from gradwire.aggregate.peers.diagnosis import COMPUTING
from gradwire.aggregate.peers.roll_call import ALIVE, FINDING, GONE, OWN_PAUSE, PATIENCE, RollCall
from gradwire.aggregate.peers.status_server import Report
from gradwire.errors import AggregateError

ADVICE = "Call it on all ranks, not under `if rank == 0`, and save what it returns on rank 0"
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.25  # seconds between questions


def meet(roll_call: RollCall, call: str, timeout: float) -> None:
    """Return when all ranks are in this call. AggregateError if some are not within `timeout` seconds, or never.

    Ranks that wait for rank 0, which waits for another one, raise when rank 0 has found out which: some seconds later.
    """
    status, rank = roll_call.status, roll_call.rank
    number = status.report.meetings + 1
    waiting = f"waits in {call} (which all ranks must call, not one alone)"
    status.set_activity(waiting)
    if rank:
        status.count_meeting()
    awaited = range(1, len(roll_call.ranks)) if rank == 0 else [0]
    deadline, pause, has_come = time.monotonic() + timeout, FIRST_PAUSE, 0.0
    while True:
        asked = time.monotonic()
        states = roll_call.ask(PATIENCE, awaited)
        reports = {report.rank: report for failed in (False, True) for report in status.peer_reports(failed)}
        absent = [r for r in states if r not in reports or reports[r].meetings < number]
        if not absent:
            break
        had_failed = {report.rank for report in status.peer_reports(failed=True)}  # they may have ended since
        gone = [roll_call.ranks[r] for r in absent if states[r] == GONE and r not in had_failed]
        if gone:
            raise AggregateError(
                f"rank {gone[0]} is gone: its process was killed or has ended before it came to {call}, or has dropped "
                f"the model"
            )
        if had_failed:
            cause = status.wait_for_peer_cause(time.monotonic() + FINDING)
            if f"waits in {call}" in cause:  # it went on without this call, and has waited for this rank to do so
                cause += f". {ADVICE}"
            raise AggregateError(cause or f"another rank has failed before it came to {call}: see its own error")
        now = time.monotonic()
        if rank and states.get(0) == ALIVE and 0 in reports and reports[0].doing == waiting:
            # It knows who is absent, and may need some seconds more to find out: it is to say so.
            has_come = has_come or now
            last = has_come + timeout + FINDING
        else:
            last = deadline
        if now > last and now - asked < PATIENCE + OWN_PAUSE:
            raise AggregateError(
                f"not all ranks have come to {call} within {timeout:g} s: "
                + _describe_absent({roll_call.ranks[r]: (states[r], reports.get(r)) for r in absent})
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    if rank == 0:
        status.count_meeting()
    status.set_activity(COMPUTING)


def _describe_absent(absent: dict[int, tuple[str, Report | None]]) -> str:
    """Name the ranks that do not answer: others may be absent because they wait for these. Without any, all."""
    silent = [rank for rank, (state, report) in absent.items() if state != ALIVE or report is None]
    if silent:
        return "; ".join(f"rank {rank} does not answer: its process is stopped or hangs" for rank in silent)
    doing = [f"rank {rank} {report.doing} in step {report.step}" for rank, (_, report) in absent.items() if report]
    return f"{'; '.join(doing)}. {ADVICE}"
