"""In which order exchanges go on: collectives in one that all ranks have, everything else as soon as it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gradwire.aggregate.transport.exchange_thread import Exchange, ExchangeThread, Pause


@pytest.fixture
def thread() -> Iterator[ExchangeThread]:
    thread = ExchangeThread()
    thread.inline = True  # so that a test knows when what happens
    yield thread
    thread.close()


class Rounds:
    """Exchanges of two rounds, which note what they do; a collective has come through once its name is in `there`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.there: set[str] = set()

    def exchange(self, name: str) -> Callable[[], Exchange]:
        def run() -> Exchange:
            self.done.append(f"{name} starts")
            yield Pause(None, lambda: f"{name}1" in self.there)
            self.done.append(f"{name} starts again")
            yield Pause(lambda: f"{name}2" in self.there)
            self.done.append(f"{name} ends")

        return run


def test_what_has_arrived_is_finished_before_another_is_waited_for(thread: ExchangeThread) -> None:
    rounds = Rounds()
    thread.submit(rounds.exchange("a"))
    thread.submit(rounds.exchange("b"))
    assert rounds.done == ["a starts", "b starts", "a starts again"]
    rounds.there |= {"a1", "a2"}
    thread.drain()
    assert rounds.done[3:] == ["a ends", "b starts again", "b ends"]


def test_collectives_come_first_once_they_can_go_on(thread: ExchangeThread) -> None:
    rounds = Rounds()
    thread.submit(rounds.exchange("a"))
    thread.submit(rounds.exchange("b"))
    rounds.there |= {"a1", "a2", "b1"}
    thread.drain()
    assert rounds.done[3:] == ["b starts again", "a ends", "b ends"]


def test_collectives_start_in_one_order_whatever_arrives(thread: ExchangeThread) -> None:
    orders = set()
    for there in (set(), {"a2"}, {"a1", "a2", "b1"}, {"a2", "b2", "c1"}, {"a1", "a2", "b1", "b2", "c1", "c2"}):
        rounds = Rounds()
        rounds.there = there
        for name in "abc":
            thread.submit(rounds.exchange(name))
        thread.drain()
        assert sorted(line for line in rounds.done if "ends" in line) == ["a ends", "b ends", "c ends"]
        orders.add(tuple(line for line in rounds.done if "starts" in line))
    assert len(orders) == 1


def test_an_error_while_another_would_wait_is_raised(thread: ExchangeThread) -> None:
    rounds = Rounds()

    def fails() -> Exchange:
        yield Pause(lambda: "now" in rounds.there)
        raise ValueError("damaged")

    thread.submit(fails)
    thread.submit(rounds.exchange("b"))
    rounds.there.add("now")
    with pytest.raises(ValueError, match="damaged"):
        thread.drain()
    assert rounds.done == ["b starts"]
