"""Ranks that are lost, and ranks that disagree: every survivor is told which rank it is and why, and nobody hangs."""

from __future__ import annotations

import errno
import functools
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from fault_trials import KILL, STOP, Outcome, Trial, run, varied
from gradwire import AggregateError
from gradwire.aggregate.peers import diagnosis, handshake, interpreter_exit, meeting, roll_call, status_server
from gradwire.aggregate.peers.handshake import check_agreement, differences
from gradwire.aggregate.peers.roll_call import ALIVE, GONE, SILENT, RollCall
from gradwire.aggregate.transport import link
from support.cases import for_each

# ── killed and stopped in real processes ──────────────────────────────────────────────────────────

TRIALS = (
    Trial(KILL, 2, 0, "backward", store="tcp", ending="exit"),
    Trial(KILL, 4, 1, "backward", store="file", ending="linger"),  # a ring: rank 3 has no connection to rank 1
    Trial(KILL, 3, 2, "any moment", "DataParallel scatter", ending="destroy group"),
    Trial(STOP, 3, 0, "forward", store="tcp", ending="exit"),  # the host of the store
    Trial(STOP, 2, 1, "between steps", "LocalSGD", store="file", ending="destroy group"),
    Trial(KILL, 3, 1, "any moment", "LocalSGD streaming", store="tcp", ending="exit"),
    Trial(STOP, 3, 0, "between steps", "LocalSGD", store="file", ending="exit", unmet=True),
)


QUICK = (TRIALS[1], TRIALS[3])  # a kill and a stop


@functools.cache
def outcomes(trials: tuple[Trial, ...]) -> dict[Trial, list[Outcome]]:
    """Of these, all at the same time: they mostly wait."""
    with ThreadPoolExecutor(len(trials)) as pool:
        return dict(zip(trials, pool.map(run, trials), strict=True))


def check_survivors(trial: Trial, survivors: list[Outcome]) -> None:
    assert len(survivors) == trial.world - 1
    problems = [(o.problem(trial), o) for o in survivors if o.problem(trial)]
    assert not problems, problems


def name_of(trial: Trial) -> str:
    return f"{trial.fault} of rank {trial.victim} of {trial.world} in {trial.place}"


@pytest.mark.parametrize("trial", QUICK, ids=name_of)
def test_survivors_are_told(trial):
    check_survivors(trial, outcomes(QUICK)[trial])


@pytest.mark.thorough
@pytest.mark.parametrize("trial", [trial for trial in TRIALS if trial not in QUICK], ids=name_of)
def test_survivors_of_other_faults_are_told(trial):
    check_survivors(trial, outcomes(tuple(t for t in TRIALS if t not in QUICK))[trial])


def test_survivors_of_a_killed_rank_need_not_wait_for_the_timeout():
    """Those whose connections are intact hear of it from the others."""
    for outcome in outcomes(QUICK)[TRIALS[1]]:
        assert outcome.seconds < 2, outcome


@pytest.mark.slow
def test_many_trials():
    with ThreadPoolExecutor(2) as pool:
        trials = list(varied(20, seed=1))
        for trial, survivors in zip(trials, pool.map(run, trials), strict=True):
            assert not [o for o in survivors if o.problem(trial)], (trial, survivors)


# ── the handshake ─────────────────────────────────────────────────────────────────────────────────


class Room:
    """Ranks in threads, which gather over a list."""

    def __init__(self, world: int):
        self.messages: list[bytes] = [b""] * world
        self.sizes: list[int] = []  # of each round
        self.barrier = threading.Barrier(world, timeout=10)

    def link(self, rank: int) -> Room:
        link = Room.__new__(Room)
        link.__dict__.update(vars(self), rank=rank, world=len(self.messages))
        return link

    def gather_short(self, message: bytes) -> list[bytes]:
        self.messages[self.rank] = message
        self.barrier.wait()
        gathered = list(self.messages)
        if self.rank == 0:
            self.sizes.append(len(message))
        self.barrier.wait()
        assert len({len(m) for m in gathered}) == 1, "Gloo wants them equally long"
        return gathered


def meet(facts: list[dict[str, str]], tensors: list[dict[str, str]], names: list[int] | None = None):
    """What each rank raised, and how many bytes each round had."""
    room, world = Room(len(facts)), len(facts)

    def attach(rank: int) -> str:
        try:
            check_agreement(room.link(rank), facts[rank], tensors[rank], RollCall(rank, names or range(world)))
        except AggregateError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(attach, range(world))), room.sizes


MODEL = {"first.weight": "float32 (70, 20)", "head.weight": "float32 (10, 64)", "head.bias": "float32 (10,)"}


def test_agreement_costs_one_short_round():
    errors, sizes = meet([{"spec": "co3"}] * 3, [MODEL] * 3)
    assert errors == ["", "", ""]
    assert sizes == [96]


@for_each(
    ("facts", "tensors", "expected"),
    [
        ([{"spec": "co3"}, {"spec": "co3:format=fp8"}], [MODEL] * 2, "rank 1 has spec co3:format=fp8, rank 0 co3:"),
        ([{"spec": "ecq"}, {"spec": "co3"}, {"spec": "co3"}], [MODEL] * 3, "rank 0 has spec ecq, rank 1 co3:"),
        ([{}] * 3, [MODEL, MODEL, {n: t for n, t in MODEL.items() if n != "head.bias"}],
         "rank 2 has no parameter 'head.bias':"),
        ([{}] * 3, [{**MODEL, "extra": "float32 (1,)"}, MODEL, MODEL],
         "rank 0 has a parameter 'extra', the others do not:"),
        ([{}] * 2, [MODEL, {**MODEL, "head.weight": "float32 (100, 64)"}],
         "rank 1 has head.weight as float32 (100, 64), rank 0 float32 (10, 64):"),
        ([{}] * 2, [MODEL, dict(reversed(MODEL.items()))], "rank 1 has the same parameters in another order:"),
    ],
)  # fmt: skip
def test_all_ranks_are_told_who_differs_in_what(facts, tensors, expected):
    errors, _ = meet(facts, tensors)
    assert len(set(errors)) == 1, "the same on all ranks"
    assert errors[0].startswith(expected), errors[0]
    assert "the same model, the same spec" in errors[0]


def test_ranks_of_a_subgroup_have_their_own_numbers():
    errors, _ = meet([{"spec": "co3"}, {"spec": "ecq"}], [MODEL] * 2, names=[4, 6])
    assert errors[0].startswith("rank 6 has spec ecq, rank 4 co3")


def test_many_differences_are_counted():
    other = {f"layer{i}": "float32 (2,)" for i in range(50)}
    found = differences([{}] * 2, [other, dict.fromkeys(other, "float32 (3,)")], [0, 1])
    assert len(found) == 50
    errors, _ = meet([{}] * 2, [other, dict.fromkeys(other, "float32 (3,)")])
    assert errors[0].count("rank 1 has") == handshake.MOST_LISTED
    assert "and 44 more differences" in errors[0]


def hello_of(version: bytes, layout: int = 1, magic: bytes = b"GWHS") -> bytes:
    """As docs/wire-format.md has it."""
    return magic + bytes([layout, 0]) + bytes(18) + bytes(16) + bytes(4) + version.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        (hello_of(b"0.2.0"), "rank 1 runs gradwire 0.2.0, rank 0 "),
        (hello_of(b"7.0.0", layout=9), "rank 1 runs gradwire 7.0.0, rank 0 "),
        (b"\x01" * 96, "rank 1 sent something else than gradwire's handshake"),
    ],
)
def test_other_versions_are_recognized(hello, expected):
    class Link:
        rank, world = 0, 2

        def gather_short(self, message: bytes) -> list[bytes]:
            assert len(message) == len(hello)
            return [message, hello]

    with pytest.raises(AggregateError, match=expected):
        check_agreement(Link(), {}, MODEL, RollCall(0, [0, 1]))


# ── the roll call ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[RollCall]:
    """Three that have met, each in step 7 and waiting."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = [RollCall(rank, range(3)) for rank in range(3)]
    for rank in found:
        rank.set_activity(diagnosis.WAITING, step=7)
        rank.start([r.address for r in found], found[0].status.token)
    deadline = time.monotonic() + 5
    while not all(rank.reaches_all for rank in found) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(rank.reaches_all for rank in found)
    return found


def explain(rank: RollCall, error: str = "Connection closed by peer") -> str:
    start = time.monotonic()
    cause = diagnosis.explain(rank, RuntimeError(error), timeout=30)
    assert time.monotonic() - start < roll_call.PATIENCE + 1
    return cause


def vanish(rank: RollCall) -> None:
    """Its process is killed: nobody listens any more."""
    status_server.close_listener(rank._listener)


def test_who_is_gone_is_named_at_once(ranks):
    vanish(ranks[1])
    assert ranks[0].ask() == {1: GONE, 2: ALIVE}
    assert explain(ranks[0]).startswith(
        "rank 1 is gone: its process was killed or has ended, or it has dropped the model (Connection"
    )
    assert ranks[2].somebody_failed()


def test_who_is_ending_is_asked_again_until_it_is_gone(ranks):
    """Gloo's connections of a rank that raised an error are closed before it stops answering."""
    threading.Timer(0.3, vanish, [ranks[1]]).start()
    assert explain(ranks[0]).startswith("rank 1 is gone")


def test_survivors_that_fail_at_the_same_time_both_ask_on(ranks):
    """Each knows that the other has failed, and would wait in vain for the cause that it finds."""
    threading.Timer(0.5, vanish, [ranks[2]]).start()
    with ThreadPoolExecutor() as pool:
        for cause in pool.map(explain, ranks[:2]):
            assert cause.startswith("rank 2 is gone"), cause


def test_who_says_that_its_program_ends_is_named(ranks):
    ranks[1].set_activity(status_server.ENDING)
    assert explain(ranks[0]).startswith("rank 1 ends: its program is over, or has raised an error (Connection")


def test_a_rank_says_that_its_program_ends(ranks, monkeypatch):
    assert ranks[0].status.report.doing == diagnosis.WAITING
    monkeypatch.setattr(interpreter_exit, "has_begun", lambda: True)
    assert ranks[0].status.report.doing == status_server.ENDING


def test_a_rank_that_is_lost_on_its_way_to_a_meeting_is_named_by_all(ranks):
    """Rank 2 waits for rank 0 alone, which finds out that rank 1 is gone, says so, and leaves."""

    def come(rank: RollCall) -> str:
        with pytest.raises(AggregateError) as caught:
            meeting.meet(rank, "a call", timeout=30)
        rank.announce_failure(str(caught.value))
        return str(caught.value)

    vanish(ranks[1])
    with ThreadPoolExecutor() as pool:
        for cause in pool.map(come, [ranks[2], ranks[0]]):
            assert cause.startswith("rank 1 is gone: its process was killed or has ended before it came to a call")


def test_a_rank_that_gave_up_a_meeting_and_ended_is_not_taken_for_the_lost_one(ranks, monkeypatch):
    """Rank 0 has found out that rank 1 is gone, says so, and ends; rank 2 is on a machine that is busy."""
    monkeypatch.setattr(link.dist, "get_rank", lambda: 0)
    record = ranks[2].status.record

    def record_late(report):
        time.sleep(0.3)
        record(report)

    monkeypatch.setattr(ranks[2].status, "record", record_late)
    link.Link.give_up(SimpleNamespace(roll_call=ranks[0]), AggregateError("rank 1 is gone: killed"))
    vanish(ranks[1])
    vanish(ranks[0])
    with pytest.raises(AggregateError, match="rank 1 is gone: killed"):
        meeting.meet(ranks[2], "a call", timeout=30)


def test_a_rank_in_a_meeting_quotes_one_that_looks_for_the_lost_one(ranks, monkeypatch):
    """It has to ask for as long as anybody, and a little more."""
    monkeypatch.setattr(meeting, "PATIENCE", 0.1)
    status = ranks[1].status
    status.record(status_server.Report(2, failed=True))
    found = status_server.Report(2, failed=True, cause="rank 0 does not answer")
    threading.Timer(0.3, status.record, [found]).start()
    with pytest.raises(AggregateError, match="rank 0 does not answer"):
        meeting.meet(ranks[1], "a call", timeout=30)


def test_a_rank_that_is_stopped_on_its_way_to_a_meeting_is_named(ranks, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.2)
    ranks[1].set_activity("waits in a call")
    ranks[0].ask()  # so that it knows what rank 1 did before it was stopped
    silent = socket.create_server(("127.0.0.1", 0))
    ranks[0]._addresses[1] = silent.getsockname()
    with pytest.raises(AggregateError, match=r"a call within 0.1 s: rank 1 does not answer: its process is stopped"):
        meeting.meet(ranks[0], "a call", timeout=0.1)


def test_a_rank_that_waits_for_rank_0_leaves_it_the_time_to_find_who_is_stopped(ranks, monkeypatch):
    """Rank 0 asks rank 1 in vain for longer than the timeout; rank 2 must not say that rank 0 waits."""
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    silent = socket.create_server(("127.0.0.1", 0))
    ranks[0]._addresses[1] = silent.getsockname()

    def come(rank: RollCall) -> str:
        with pytest.raises(AggregateError) as caught:
            meeting.meet(rank, "a call", timeout=0.1)
        rank.announce_failure(str(caught.value))
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        for cause in pool.map(come, [ranks[2], ranks[0]]):
            assert "rank 1 does not answer: its process is stopped" in cause and "rank 0" not in cause, cause


def test_a_rank_that_waits_for_a_stopped_one_is_not_named_beside_it(ranks, monkeypatch):
    """Rank 1 was stopped in an exchange that rank 0 has finished and rank 2 has not; nobody has forgotten a call."""
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    silent = socket.create_server(("127.0.0.1", 0))
    ranks[0]._addresses[1] = silent.getsockname()
    with pytest.raises(AggregateError, match=r"rank 1 does not answer: its process is stopped or hangs$"):
        meeting.meet(ranks[0], "a call", timeout=0.1)


def test_a_rank_that_was_stopped_in_a_meeting_itself_blames_nobody(ranks, monkeypatch):
    """What it knows of the others when it goes on is old: they have come, or have given up and said why."""
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    monkeypatch.setattr(meeting, "OWN_PAUSE", 0.1)
    ask, stopped = ranks[0].ask, []

    def ask_and_be_stopped(*arguments):
        states = ask(*arguments)
        if not stopped:
            stopped.append(True)
            time.sleep(1.3)
            for other in ranks[1:]:
                other.status.count_meeting()
        return states

    monkeypatch.setattr(ranks[0], "ask", ask_and_be_stopped)
    meeting.meet(ranks[0], "a call", timeout=0.1)


def test_a_rank_that_was_stopped_while_it_asked_takes_nobody_for_lost(ranks, monkeypatch):
    """Its questions had not come for so long that the others closed the connections."""
    monkeypatch.setattr(roll_call, "OWN_PAUSE", 0.1)
    contact_once, contacted = ranks[0]._contact_once, []

    def contact_once_and_be_stopped(rank, *arguments):
        contacted.append(rank)
        if contacted.count(rank) == 1:
            time.sleep(1.3)
            raise ConnectionResetError
        return contact_once(rank, *arguments)

    monkeypatch.setattr(ranks[0], "_contact_once", contact_once_and_be_stopped)
    assert ranks[0].ask(1.0) == {1: ALIVE, 2: ALIVE}


def test_a_survivor_that_has_ended_is_not_named(ranks):
    vanish(ranks[1])
    assert "rank 1 is gone" in explain(ranks[0])
    vanish(ranks[0])
    cause = explain(ranks[2])
    assert "rank 1 is gone" in cause
    assert "rank 0" not in cause


def test_who_accepts_and_does_not_answer_is_stopped(ranks):
    silent = socket.create_server(("127.0.0.1", 0))
    ranks[0]._addresses[1] = silent.getsockname()
    assert ranks[0].ask(0.5) == {1: SILENT, 2: ALIVE}
    cause = explain(ranks[0], "Timed out waiting 30000ms for recv operation to complete")
    assert cause.startswith("rank 1 does not answer within 30 s: its process is stopped or hangs (Timed out")


def test_the_cause_that_another_rank_found_is_handed_on(ranks):
    """Only the owner of a shard sees that a message is damaged; the others see that it leaves."""
    ranks[2].announce_failure("rank 1 sent what this rank cannot use (checksum mismatch)")
    until = time.monotonic() + 10  # nobody waits for an answer, so that it may still be on its way
    while not ranks[0].somebody_failed() and time.monotonic() < until:
        time.sleep(0.01)
    vanish(ranks[2])
    assert explain(ranks[0]).startswith("rank 1 sent what this rank cannot use (checksum mismatch)")


def test_who_is_late_is_named_with_its_step(ranks):
    ranks[1].set_activity("computes", step=6)
    cause = explain(ranks[0], "Timed out waiting 30000ms for recv operation to complete")
    assert "not all ranks have come to the exchange within 30 s: rank 0 waits for the others in step 7" in cause
    assert "rank 1 is alive and computes in step 6" in cause
    assert "rank 2" not in cause
    assert "rank 1 is alive and computes in step 6" in explain(ranks[2])
    ranks[1].set_activity(diagnosis.WAITING, step=7)  # it comes when the others have left
    vanish(ranks[0])
    vanish(ranks[2])
    assert "rank 1 is alive and computes in step 6" in explain(ranks[1])


def test_who_is_late_is_named_where_another_exchange_has_just_ended(ranks):
    """One of several exchanges of rank 0 has ended and said that it computes, which is what the late rank does, too."""
    ranks[0].set_activity(diagnosis.COMPUTING)
    ranks[1].set_activity(diagnosis.COMPUTING)
    cause = explain(ranks[0], "Timed out waiting 30000ms for send operation to complete")
    assert "rank 0 waits for the others in step 7, rank 1 is alive and computes in step 7" in cause
    assert "rank 2" not in cause


def test_who_closes_a_connection_is_asked_again(ranks, monkeypatch):
    """On a lossy network a question comes so late that nobody reads it any more: its rank is there all the same."""
    closed = []

    def read_report(*arguments):
        if len(closed) < 2:
            closed.append(arguments)
            raise ConnectionResetError("closed")
        return status_server.read_report(*arguments)

    monkeypatch.setattr(roll_call, "read_report", read_report)
    assert ranks[0].ask(peers=[1]) == {1: ALIVE}
    assert len(closed) == 2


def test_who_answers_late_after_the_handshake_is_reached_later(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(roll_call, "PATIENCE", 0.1)
    monkeypatch.setattr(roll_call, "PROBE_AGAIN", (0.05,) * 100)
    first, second = (RollCall(rank, range(2)) for rank in range(2))
    addresses = [first.address, second.address]
    first.start(addresses, first.status.token)
    assert first._probed.wait(5)
    assert not first.reaches_all
    second.start(addresses, first.status.token)
    deadline = time.monotonic() + 5
    while not first.reaches_all and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.reaches_all


def test_what_a_rank_has_said_long_ago_does_not_make_it_late(ranks):
    """Rank 1 asked this one when they attached, could not be reached itself, and has been killed since."""
    ranks[0].status.record(ranks[1].status.report)
    ranks[0].set_activity(diagnosis.WAITING, 8)
    ranks[0]._reached.clear()
    vanish(ranks[1])
    assert "is alive" not in explain(ranks[0])


# ── who was lost before this rank had reached it ──

TIMED_OUT = "Timed out waiting 30000ms for recv operation to complete"


@pytest.fixture
def unmet(ranks: list[RollCall]) -> list[RollCall]:
    """Rank 0 was lost when it had just attached, and had answered rank 2, but not rank 1."""
    ranks[1]._reached.remove(0)
    return ranks


@pytest.mark.parametrize(
    ("doing", "error"),
    [
        (diagnosis.WAITING, TIMED_OUT),
        (diagnosis.COMPUTING, TIMED_OUT),
        ("looks for the lost one", TIMED_OUT),
        ("looks for the lost one", "another rank has failed"),
    ],
)
def test_who_is_stopped_is_named_where_it_had_never_answered(unmet, monkeypatch, doing, error):
    """Whatever rank 2 does: it may have failed just now, and will name rank 0 after rank 1 has to."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 1.0)
    unmet[2].set_activity(doing)
    if doing not in (diagnosis.WAITING, diagnosis.COMPUTING):
        unmet[2].status.begin_failure()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        unmet[1]._addresses[0] = silent.getsockname()
        assert re.match(r"rank 0 does not answer .*: its process is stopped or hangs \(", explain(unmet[1], error))


@pytest.mark.parametrize("error", [TIMED_OUT, "Connection closed by peer"])
def test_who_looks_for_the_lost_one_is_not_named(unmet, monkeypatch, error):
    """Rank 0 was killed, or is behind a firewall; rank 2 answers, so that it is not the one that is lost."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.5)
    vanish(unmet[0])
    unmet[2].status.begin_failure()
    cause = explain(unmet[1], error)
    assert cause.startswith("probably lost rank 0, or it did not answer within the process group's timeout; whether")
    assert "rank 2" not in cause


def test_who_answers_for_the_first_time_may_be_late(unmet):
    """It was slow when it attached, and was not reached then."""
    unmet[0].set_activity(diagnosis.COMPUTING, step=6)
    assert "rank 0 is alive and computes in step 6" in explain(unmet[1], TIMED_OUT)


def test_of_two_ranks_the_other_one_is_lost():
    alone = RollCall(1, [4, 6])
    assert explain(alone).startswith("lost rank 4, or it did not answer within the process group's timeout; whether it")


def test_nobody_is_blamed_who_could_never_be_reached(ranks):
    ranks[0]._reached.clear()
    vanish(ranks[1])
    assert "nobody knows which one" in explain(ranks[0])


def test_a_failure_is_looked_into_once(ranks):
    vanish(ranks[1])
    first = explain(ranks[0])
    vanish(ranks[2])
    assert explain(ranks[0], "another bucket").split(" (")[0] == first.split(" (")[0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(TIMED_OUT, "all ranks are there, but the exchange took"), ("Connection closed", "a connection was lost, though")],
)
def test_ranks_that_look_for_a_cause_in_vain_do_not_name_each_other(ranks, monkeypatch, error, expected):
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.5)
    ranks[1].status.begin_failure()
    assert explain(ranks[0], error).startswith(expected)


def test_who_had_failed_and_is_gone_before_it_said_why_is_named(ranks, monkeypatch):
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.5)
    ranks[1].status.begin_failure()
    ranks[0].ask()
    vanish(ranks[1])
    assert explain(ranks[0]).startswith("rank 1 has failed, and did not say why: see its own error")


def test_what_fails_in_the_wake_of_another_exchange_has_its_cause(ranks, monkeypatch):
    """The thread whose exchange failed first has to ask for as long as others may wait, and a little more."""
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.1)
    status = ranks[0].status
    status.begin_failure()
    threading.Timer(0.3, status.set_cause, ["rank 1 does not answer"]).start()
    assert explain(ranks[0], "another bucket") == "rank 1 does not answer (another bucket)"


def test_strangers_learn_nothing(ranks):
    """Without the token there is no answer, and nothing is believed."""
    host, port = ranks[0]._addresses[1]
    liar = status_server.SharedStatus(2, token=bytes(16))
    liar.set_cause("lies")
    for message in (liar.message(), b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 4096):
        with socket.create_connection((host, port), timeout=2) as stranger:
            stranger.sendall(message)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert ranks[0].ask() == {1: ALIVE, 2: ALIVE}
    assert not ranks[1].somebody_failed()


def test_strangers_who_say_nothing_keep_nobody_waiting(ranks):
    host, port = ranks[0]._addresses[1]
    idle = [socket.create_connection((host, port), timeout=2) for _ in range(40)]
    start = time.monotonic()
    assert ranks[0].ask() == {1: ALIVE, 2: ALIVE}
    assert time.monotonic() - start < status_server.QUESTION_SECONDS * 2
    for stranger in idle:
        stranger.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED, errno.EPERM, errno.ENETDOWN, errno.ETIMEDOUT])
def test_a_passing_failure_is_not_the_end(number):
    """accept() fails while the process has too many files open, or the network is down: then it answers as before."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures = [OSError(number, os.strerror(number))]

    class Short:
        def accept(self):
            if failures:
                raise failures.pop()
            return listener.accept()

    status = status_server.SharedStatus(1, token=bytes(16))
    thread = threading.Thread(target=status_server.answer_questions, args=(Short(), status), daemon=True)
    thread.start()
    with socket.create_connection(listener.getsockname(), timeout=5) as peer:
        peer.sendall(status_server.SharedStatus(0, token=bytes(16)).message())
        assert status_server.read_report(peer, bytes(16), time.monotonic() + 5).rank == 1
    status_server.close_listener(listener)
    thread.join(5)
    assert not thread.is_alive() and not failures


def test_the_socket_is_closed_with_its_owner(ranks):
    listener = ranks[2]._listener
    ranks.clear()
    deadline = time.monotonic() + 5
    while listener.fileno() != -1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.fileno() == -1
