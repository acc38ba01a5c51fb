"""What is learned from the steps of a training: which recipe is fastest here (`auto`), and which aggregation."""

from __future__ import annotations

import struct
import time

from gradwire.aggregate.exchanges.reducer import ALL_GATHER, ALL_REDUCE, SCATTER_REDUCE, Reducer
from gradwire.aggregate.messages.mean import Mean
from gradwire.aggregate.transport.link import Link
from gradwire.catalogue.spec_by_name import parse_spec
from gradwire.engine import auto
from gradwire.engine.auto import Auto
from gradwire.engine.cost_model import Load, Speed, all_reduce_s
from gradwire.engine.log import Error, nmse

STEPS_TO_LEARN = 3  # from which the cost model takes its figures
CLEARLY = 0.9  # scatter-reduce compresses twice, so it has to be that much faster


class Tuner:
    """`target`: the error that `auto` may make; None where the recipe is given. `open_aggregate`: that one is not."""

    def __init__(self, mean: Mean, link: Link, reducer: Reducer, target: float | None, open_aggregate: bool):
        self.mean, self.link, self.reducer = mean, link, reducer
        self.auto = None if target is None else Auto(self._largest, self._exact_seconds, target)
        self._aggregate = reducer.aggregate  # what every recipe begins with
        self._open_aggregate = open_aggregate and reducer.link.world > 2
        self._speed = Speed.measure(link) if self.auto is not None or self._open_aggregate else None
        self._ended = 0.0  # when the last step did
        self._since: dict[str, float] = {"steps": mean.steps}  # figures when the recipe was last changed

    @property
    def plain(self) -> bool:
        """Whether `auto` has found, or is trying, that nothing beats all-reduce."""
        return self.auto is not None and self.auto.spec == auto.EXACT

    def step_begins(self) -> bool:
        """Whether errors are to be measured in this step."""
        if self.auto is not None and self.auto.measuring and not self.mean.rivals:
            self.mean.rivals = {s: (parse_spec(s), Error()) for s in auto.CANDIDATES if s != auto.EXACT}
        return bool(self.mean.rivals)

    def step_done(self) -> None:
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        if self._open_aggregate and self.mean.steps - self._since["steps"] == STEPS_TO_LEARN:
            self._choose_aggregate()
        if self.auto is not None and seconds < now:  # not the first, before which there was none
            before = self.auto.spec
            self.auto.step_done(seconds, {spec: nmse([error]) for spec, (_, error) in self.mean.rivals.items()})
            self.mean.rivals = {}
            if self.auto.spec != before:
                self._use(self.auto.spec)

    def loaded(self) -> None:
        """The number of steps has changed."""
        self._since["steps"] = self.mean.steps

    def _use(self, spec: str) -> None:
        if spec != auto.EXACT:
            self.mean.use(spec)
        self.reducer.use(ALL_REDUCE if spec == auto.EXACT else self._aggregate)
        self._since = {"steps": self.mean.steps, **self.mean.stats()}

    def _choose_aggregate(self) -> None:
        """By the cost model, from what the first steps took on the slowest rank."""
        reducer, world = self.reducer, self.reducer.link.world
        if reducer.aggregate != ALL_GATHER:
            return
        assert self._speed is not None
        since = {key: value - self._since.get(key, 0) for key, value in self.mean.stats().items()}
        own = [since["frame_bytes"], reducer.messages, since["encode_s"], since["decode_s"] / world]
        load = Load(*self._largest([value / STEPS_TO_LEARN for value in own]))
        if load.scatter_reduce_s(self._speed, world) < CLEARLY * load.all_gather_s(self._speed, world):
            reducer.use(SCATTER_REDUCE)

    def _largest(self, values: list[float]) -> list[float]:
        """Of all ranks, one by one."""
        packed = struct.Struct(f"<{len(values)}d")
        everyone = [packed.unpack(other) for other in self.link.gather_short(packed.pack(*values))]
        return [max(column) for column in zip(*everyone, strict=True)]

    def _exact_seconds(self) -> float:
        assert self._speed is not None
        return all_reduce_s(self.mean.total, self._speed, self.reducer.world)
