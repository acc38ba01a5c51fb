"""An episode of the main kind: a training, its faults one after the other, compared with an undisturbed one."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from soaking import attempts, isolation, plans, saving
from soaking.attempts import Verdict
from soaking.episode import Episode
from soaking.faults import Fault
from soaking.helpers import Aggregator, flood_of, relay_to, stranger_at
from soaking.processes import Child, end_all
from soaking.rank import Attempt, Board
from soaking.references import digests_in, take, undisturbed
from support.helpers import free_ports


class TrainingEpisode:
    """Attempts at one training until it has come to its end."""

    def __init__(self, episode: Episode, by_aggregator: bool) -> None:
        self.episode, self.chance = episode, episode.chance
        self.training = plans.training(self.chance, by_aggregator)
        self.faults = plans.faults(self.chance, self.training, by_aggregator, episode.alone)
        self.mode = self.chance.choice(saving.modes_for(self.training.wrapper))
        self.save_every = max(self.training.sync_every, self.chance.choice((2, 3, 4)))
        self.checkpoints = episode.folder / "checkpoints"
        self.checkpoints.mkdir()
        self.by_aggregator = by_aggregator
        self.attempts = 0
        episode.about = f"{self.training}; {self.mode}; " + ", ".join(map(str, self.faults))
        episode.about += " (aggregator)" * by_aggregator

    def run(self) -> None:
        reference = undisturbed(self.episode, self.training)
        if self.episode.failed:
            return
        self.aggregator = Aggregator(self.episode.folder) if self.by_aggregator else None
        if any(fault.kind == "full disk" for fault in self.faults):
            assert isolation.mount_small_disk(self.checkpoints)
        faults: list[Fault | None] = list(self.faults)
        while faults and not self.episode.failed:
            verdict = self._attempt(faults.pop(0))
            self._compare(reference)
            if verdict.done:
                self._judge_end(verdict, reference)
            elif not faults:
                faults.append(None)  # to the end
        if self.episode.failed:
            return
        if self.aggregator is not None:
            self.aggregator.child.signal(signal.SIGTERM)
            end_all([self.aggregator.child], 20)
            if self.aggregator.child.code != 0:
                self.episode.wrong(
                    f"the aggregator ended with {self.aggregator.child.code}: {self.aggregator.child.said()}"
                )

    # ── attempts ──

    def _plan(self, fault: Fault | None) -> Attempt:
        store = self.episode.folder / f"store.{self.attempts}"
        where = f"tcp://127.0.0.1:{free_ports(1)[0]}" if self.chance.random() < 0.3 else f"file://{store}"
        return Attempt(
            self.training, self.episode.folder, self.attempts, 0, self.mode, self.save_every,
            plans.timeout_under(fault, self.by_aggregator), fault, self.chance.choice(("exit", "destroy group")), where,
        )  # fmt: skip

    def _attempt(self, fault: Fault | None) -> Verdict:
        self.attempts += 1
        try:
            resume_at = saving.last_common_step(self.checkpoints, self.mode, self.training.world)
        except Exception as error:  # whatever a damaged file raises
            self.episode.wrong(f"a checkpoint cannot be loaded: {error!r}")
            return Verdict()
        if self.attempts > 1:
            self.episode.tally["restarts"] += self.training.world
        attempt = replace(self._plan(fault), resume_at=resume_at)
        if fault is not None and resume_at:  # DDP makes its buckets anew in the second step, by collectives of torch's
            fault = replace(fault, step=min(max(fault.step, resume_at + 3), self.training.steps - 1))
            attempt = replace(attempt, fault=fault)
        beside: list[Child] = []
        for old in self.episode.folder.glob("*.port"):  # of an attempt before: somebody else may listen there now
            old.unlink()
        if self.aggregator is not None:
            address = self.aggregator.address
            if fault is not None and fault.kind == "lossy relay":
                relay, address = relay_to(address, self.episode.folder, self.chance.randrange(1 << 30))
                beside.append(relay)
            attempt = replace(attempt, aggregator=address, fallback=fault is not None and fault.kind == "fallback")
        verdict = attempts.run(attempt, lambda *ranks: self._strike(beside, *ranks))
        for child in beside:
            child.signal(signal.SIGTERM)
        if late := end_all(beside, 20):
            self.episode.wrong(f"a process beside the ranks did not end: {late[0].said()}")
        if fault is not None and fault.kind == "packet loss":
            isolation.restore_packets()
        if self.aggregator is not None and self.aggregator.child.poll() is not None:
            self.aggregator.start()
        take(self.episode, verdict)
        if fault is not None and verdict.struck:
            self.episode.tally[fault.kind] += 1
        return verdict

    def _strike(self, beside: list[Child], attempt: Attempt, board: Board, children: list[Child]) -> float | None:
        """Let the fault of the attempt happen; returns when it began, or None."""
        fault, folder = attempt.fault, self.episode.folder
        if fault is None:
            return None
        if fault.kind in ("kill", "stop", "pause"):
            return attempts.by_signal(attempt, board, children)
        if not attempts.wait_for_step(fault, board, children):
            return None
        began = time.monotonic()
        time.sleep(fault.moment)
        if fault.kind in ("aggregator killed", "aggregator restarted", "fallback"):
            assert self.aggregator is not None
            self.aggregator.kill()
            if fault.kind == "aggregator restarted":
                time.sleep(self.chance.uniform(0, 1))
                self.aggregator.start()
        elif fault.kind == "flood":
            assert self.aggregator is not None
            beside.append(flood_of(self.aggregator.address, folder, 1.0))
        elif fault.kind == "garbage":
            beside.append(stranger_at(folder, folder, self.chance.randrange(1 << 30)))
        elif fault.kind == "packet loss":
            how = isolation.lose_packets(self.chance.choice((1, 3, 10)), folder)
            self.episode.note(f"packet loss by {how}" if how else "no packet loss: needs netem, or clang and XDP")
        elif fault.kind == "full disk":
            self._fill_disk(children)
        return began

    def _fill_disk(self, children: list[Child]) -> None:
        """For half a second, or until the training has ended, not a byte is free."""
        filler, until = self.checkpoints / "filler", time.monotonic() + 0.5
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        while time.monotonic() < until and any(child.poll() is None for child in children):
            time.sleep(0.005)
        filler.unlink()

    # ── verdicts ──

    def _compare(self, reference: dict[str, list[str]]) -> None:
        """Every step of every rank, also of ranks that were killed, with the same step of the undisturbed run."""
        for rank in range(self.training.world):
            for step, digest in digests_in(self.episode.folder / f"{self.attempts}.{rank}.digests"):
                self.episode.tally["steps verified"] += 1
                if reference[str(rank)][step - 1] != digest:
                    self.episode.wrong(f"rank {rank} differs from the undisturbed run after step {step}")
                    break

    def _judge_end(self, verdict: Verdict, reference: dict[str, list[str]]) -> None:
        """The training has come to its end; the next fault, if there is one more, happens to a new one."""
        self.episode.tally["trainings verified"] += 1
        if {outcome["digest"] for outcome in verdict.outcomes} != set(reference["end"]):
            self.episode.wrong("the end differs from that of the undisturbed run")
        for outcome in verdict.outcomes:
            if "lost" in outcome:
                self.episode.tally["conservations verified"] += 1
                if not outcome["lost"] <= 1:
                    self.episode.wrong(f"gradients were lost: {outcome['lost']:.3g} times the bound of rounding")
        if files := saving.foreign_files(self.checkpoints):
            self.episode.leak(f"files left beside the checkpoints: {files}")
        for path in self.checkpoints.iterdir():
            path.unlink()
