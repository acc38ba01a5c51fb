"""One attempt at a training, as the process sees it that started the ranks: it strikes, waits and judges."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from soaking import rank as ranks
from soaking.faults import SOON, Fault
from soaking.processes import Child, end_all, start
from soaking.rank import ENDED, RAISED, Attempt, Board
from soaking.training import DDP, FSDP

QUIET_SECONDS = 120.0  # for an attempt to which nothing happens


@dataclass
class Verdict:
    """What came of an attempt."""

    done: bool = False  # all ranks came to the end
    struck: bool = False  # the fault found its victim still training
    problems: list[str] = field(default_factory=list)
    hung: int = 0
    outcomes: list[dict[str, Any]] = field(default_factory=list)


def run(attempt: Attempt, strike: Callable[[Attempt, Board, list[Child]], float | None]) -> Verdict:
    """Start all ranks, let the fault strike, wait for all of them. `strike` returns when it did, or None."""
    board = Board()
    children = [
        start(partial(ranks.live, attempt, rank, board), attempt.folder / f"{attempt.number}.{rank}.output")
        for rank in range(attempt.training.world)
    ]
    began = strike(attempt, board, children)
    late = end_all(children, QUIET_SECONDS if began is None else 2 * attempt.timeout + 3 * SOON)
    verdict = Verdict(hung=len(late))
    verdict.problems += [f"rank {children.index(child)} hung\n{child.said()}" for child in late]
    for rank in range(attempt.training.world):
        path = attempt.outcome(rank)
        verdict.outcomes.append(json.loads(path.read_text()) if path.exists() else {"kind": "nothing", "text": ""})
    codes = [child.code for child in children]
    verdict.done = codes == [0] * len(codes) and all(o["kind"] == "done" for o in verdict.outcomes)
    verdict.struck = began is not None
    for rank, child in enumerate(children):
        if child not in late:
            missed = attempt.fault is not None and children[attempt.fault.victim].code == 0
            problem = _problem(attempt, rank, child, verdict.outcomes[rank], board, None if missed else began)
            if problem:
                text = verdict.outcomes[rank].get("trace", "")
                verdict.problems.append(f"rank {rank} {problem}\n{text}{child.said()}")
    return verdict


def _problem(
    attempt: Attempt, rank: int, child: Child, outcome: dict[str, Any], board: Board, began: float | None
) -> str:
    """What is wrong with the end of one rank, or nothing."""
    fault, kind, problem = attempt.fault, outcome["kind"], ""
    struck = fault is not None and rank == fault.victim
    if struck and child.code == -signal.SIGKILL and fault.kind in ("kill", "kill while saving"):
        pass
    elif child.code != (0 if kind == "done" else RAISED):
        problem = f"ended with {child.code}"
    elif fault is None or not fault.is_fatal:
        problem = "" if kind == "done" else f"raised {kind}"
    elif kind == "done":  # possible in the last step alone, when the victim had sent all that the others wait for
        last = attempt.training.steps - attempt.training.sync_every
        near_end = board.step(fault.victim) >= last or board.activity(fault.victim) == ENDED
        problem = "" if near_end or began is None else "came to the end without the others"
    elif board.activity(rank) == ENDED or (
        attempt.training.wrapper == DDP and board.step(rank) < attempt.resume_at + 2
    ):
        pass  # it is in collectives of torch's, which name nobody
    else:
        problem = _problem_of_error(attempt, fault, rank, outcome, began)
    return problem and f"{problem} after {fault or 'nothing'}: {outcome['text']}"


def _makes_buckets(attempt: Attempt, step: int) -> bool:
    return attempt.training.wrapper == DDP and step < attempt.resume_at + 2


def _problem_of_error(attempt: Attempt, fault: Fault, rank: int, outcome: dict[str, Any], began: float | None) -> str:
    kind, of_fsdp = outcome["kind"], attempt.training.wrapper == FSDP
    if rank == fault.victim and fault.kind in ("stop", "late", "exception"):
        expected = "KeyError" if fault.kind == "exception" else "AggregateError"
        return "" if kind == expected or of_fsdp else f"raised {kind}"
    if of_fsdp and kind in ("RuntimeError", "DistBackendError"):
        return ""  # of FSDP2's own collectives
    allowed = SOON + fault.seconds + (attempt.timeout if fault.kind != "kill" or attempt.aggregator else 0)
    if began is not None and outcome["at"] - began > allowed:
        return f"raised after {outcome['at'] - began:.1f} s"
    return fault.problem(kind, outcome["text"], attempt.training.world, bool(attempt.aggregator))


# ── strikes ──


def nothing(attempt: Attempt, board: Board, children: list[Child]) -> float | None:
    return None


def by_signal(attempt: Attempt, board: Board, children: list[Child]) -> float | None:
    """Kill or stop the victim in the step, at the moment of the fault."""
    fault = attempt.fault
    assert fault is not None
    if not wait_for_step(fault, board, children):
        return None
    time.sleep(fault.moment)
    victim = children[fault.victim]
    if victim.poll() is not None or board.activity(fault.victim) == ENDED:
        return None
    began = time.monotonic()
    victim.signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    if fault.kind == "stop":  # until the others have given up
        others = [child for child in children if child is not victim]
        until = began + attempt.timeout + SOON
        while any(child.poll() is None for child in others) and time.monotonic() < until:
            time.sleep(0.01)
        victim.signal(signal.SIGCONT)
    elif fault.kind == "pause":
        time.sleep(fault.seconds)
        victim.signal(signal.SIGCONT)
    return began


def wait_for_step(fault: Fault, board: Board, children: list[Child]) -> bool:
    """Wait until the victim is in that step; False if it never came there."""
    victim = children[fault.victim]
    until = time.monotonic() + QUIET_SECONDS
    while board.step(fault.victim) < fault.step and time.monotonic() < until:
        if victim.poll() is not None or board.activity(fault.victim) == ENDED:
            return False
        time.sleep(0.0005)
    return board.step(fault.victim) >= fault.step and board.activity(fault.victim) != ENDED
