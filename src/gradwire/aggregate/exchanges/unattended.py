"""All-gather of frames between GPUs that nobody waits for: not the training, and not the thread that exchanges.

Kernels, collective and kernels again are queued on the GPU, and the training goes on to queue its optimizer and its
next step. What the host has to know, it learns later (`settle`): whether everything was finite, so that error memories
are committed or rolled back, and how long messages were.

Since nobody knows how long a message will be, its room is agreed on ahead: more than the longest one of the last step
needed, of any rank, by twice as much as lengths have grown from step to step of late. So the first step of a key is
waited for. A message that does not fit, or is in any way unusual, waits in the error memories of all ranks
(gpu/unattended.py), and the next one sends them whole, those of tensors without a gradient, too; if its length is not
the reason, the next steps of its key are waited for again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregate.messages.frame_plan import FramePlan
from gradwire.aggregate.messages.partial_messages import PartialMessages
from gradwire.aggregate.peers.diagnosis import Work
from gradwire.aggregate.transport.exchange_thread import Exchange, Pause
from gradwire.aggregate.transport.link import Link
from gradwire.aggregate.transport.message_prefix import PREFIX, Subject, length_of
from gradwire.errors import AggregateError
from gradwire.gpu import Outcome

ROUND = 512  # room is a multiple of so many bytes
GROWTH = 1 / 8  # of messages from one step to the next, as long as nothing is known
LEAST_GROWTH, FADING = 1 / 64, 0.9  # what is always expected; and how fast growth is forgotten, by step
MOST_GROWTH = 1.0  # that is expected again: after a step without gradients, a message is any number of times as long
MOST_PATIENCE = 64  # steps that are waited for, at most, after a message that had to wait


@dataclass
class _Agreement:
    """What is agreed on about the messages of one key."""

    fingerprint: int  # of what they carry
    longest: int  # bytes of the longest one in the last step, of any rank
    growth: float = GROWTH  # the most by which that has grown from one step to the next, of late
    patience: int = 1  # steps to wait for after the next message that has to wait
    attended: int = 0  # steps that are still to be waited for
    owes: bool = False  # whether the last message waits in the error memories

    @property
    def room(self) -> int:
        """Bytes of a block."""
        return -(-int(self.longest * (1 + 2 * self.growth)) // ROUND) * ROUND

    def is_next_attended(self) -> bool:
        """Tell whether the next step is to be waited for; it counts as over then."""
        self.attended, before = max(self.attended - 1, 0), self.attended
        return before > 0

    def attend(self) -> None:
        """Wait for the next steps, since a message was unusual: twice as many as the last time."""
        self.attended, self.patience = self.patience, min(2 * self.patience, MOST_PATIENCE)

    def note_waited(self, waited: bool) -> None:
        """Take note of whether the last message waits in the error memories, which count from now on."""
        self.owes = waited

    def next_is(self, longest: int) -> None:
        """Learn from another step."""
        self.growth = min(max(FADING * self.growth, longest / self.longest - 1, LEAST_GROWTH), MOST_GROWTH)
        self.longest = longest


@dataclass
class _UnderWay:
    """An exchange of which the host knows nothing yet."""

    key: Hashable
    subject: Subject
    work: Work | None  # the collective, if there are other ranks
    outcome: Outcome


class UnattendedExchange:
    """Averages tensors on GPUs without waiting, for messages that were exchanged before by somebody who waits.

    `learn` and `takes` decide alike on all ranks: by what all messages of the last step say. `settle` has to be called
    before error memories, ledger or tensors of the last step are used, and before the next one begins.
    """

    def __init__(self, messages: PartialMessages, link: Link):
        self.messages, self.link = messages, link
        self._agreed: dict[Hashable, _Agreement] = {}
        self._blocks: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}  # this rank's, and those of all ranks
        self._under_way: list[_UnderWay] = []
        self._waited: dict[Hashable, bool] = {}  # whether the messages of this step did, as far as that is known

    def takes(self, key: Hashable, plans: Sequence[FramePlan], subject: Subject) -> bool:
        """Tell whether the next message of this key need not be waited for."""
        agreed = self._agreed.get(key)
        if agreed is None or agreed.fingerprint != subject.fingerprint:
            return False
        if agreed.is_next_attended():
            return False
        return self.messages.coder.can_go_unattended(plans)

    def owes(self, key: Hashable, subject: Subject) -> bool:
        """Tell whether the last message of this key waits, so that the next one has to send all memories."""
        agreed = self._agreed.get(key)
        return agreed is not None and agreed.fingerprint == subject.fingerprint and agreed.owes

    def learn(self, key: Hashable, subject: Subject, lengths: Sequence[int]) -> None:
        """Agree on the room for the next message, given the lengths of this one of all ranks, without their prefix."""
        before = self._agreed.get(key)
        longest = PREFIX + max(lengths)
        if before is None or before.fingerprint != subject.fingerprint:
            self._agreed[key] = _Agreement(subject.fingerprint, longest)
        else:
            before.next_is(longest)
            self._waited[key] = False

    def run(self, key: Hashable, plans: Sequence[FramePlan], subject: Subject) -> Exchange:
        """Begin to replace the parts of the plans by their means; they are there when the current stream is."""
        coder, world = self.messages.coder, self.link.world
        room = self._agreed[key].room
        block, gathered = self._room_for(key, room, plans[0].parts[0].tensor.device)
        message = coder.encode_unattended(key, plans, block, subject.stamp, self._agreed[key].owes)
        work = self.link.all_gather_into(gathered, block) if world > 1 else None
        if work is not None:
            yield Pause(work.is_completed)
            try:
                work.wait()  # of NCCL: the stream waits, not the host
            except RuntimeError as error:
                raise self.link.diagnose(error) from error
        blocks = [gathered[rank * room : (rank + 1) * room] for rank in range(world)]
        outcome = coder.average_unattended(message, blocks)
        self._under_way.append(_UnderWay(key, subject, work, outcome))
        self.messages.tensors.note_sent(part.name for plan in plans for part in plan.parts)

    def _room_for(self, key: Hashable, room: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        block, gathered = self._blocks.get(key, (None, None))
        if block is None or gathered is None or len(block) < room or len(gathered) < self.link.world * room:
            block = gathered = torch.zeros(room + room // 8, dtype=torch.uint8, device=device)
            if self.link.world > 1:
                gathered = torch.empty(self.link.world * len(block), dtype=torch.uint8, device=device)
            self._blocks[key] = block, gathered
        return block[:room], gathered[: self.link.world * room]

    @property
    def all_settled(self) -> bool:
        """Whether the host knows all there is to know."""
        return not self._under_way

    def settle(self) -> None:
        """Learn how the exchanges of the last step went, and wait for that if need be; the ledger is told.

        AggregateError if a message was about something else: nothing of it has reached the means.
        """
        coder = self.messages.coder
        under_way, self._under_way = self._under_way, []
        for exchange in under_way:
            if exchange.work is not None:
                self._wait_for(exchange.work)
            exchange.outcome.wait()
            prefixes = exchange.outcome.prefixes
            for rank, prefix in enumerate(prefixes):
                exchange.subject.check(rank, prefix)
            coder.ledger.note_finite(exchange.outcome.finite)
            lengths = [length_of(prefix) - PREFIX for prefix in prefixes]
            coder.ledger.count_frame_bytes(lengths[self.link.rank])
            agreed, needed = self._agreed[exchange.key], max(exchange.outcome.needed)
            self._waited[exchange.key] = exchange.outcome.waited
            if not exchange.outcome.waited:
                agreed.next_is(PREFIX + max(lengths))
            elif needed:
                agreed.next_is(PREFIX + 1 + needed)
            elif exchange.outcome.finite:
                agreed.attend()

    def _wait_for(self, work: Work) -> None:
        try:
            self.link.wait(work)
        except AggregateError:  # the training may be waiting for the GPU, and the GPU for a rank that is lost
            self.link.abort()
            raise

    def end_step(self, finite: bool) -> None:
        """Take note that memories are committed, or rolled back: then they owe what they did before."""
        for key, waited in self._waited.items() if finite else ():
            self._agreed[key].note_waited(waited)
        self._waited.clear()

    def forget(self) -> None:
        """Give up what is under way, after an error."""
        self._under_way, self._waited = [], {}
