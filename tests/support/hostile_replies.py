"""Whole replies that no honest client sends, made at random, on their way through a server to Flower's FedAvg."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp.strategy import FedAvg, FedMedian
from flwr.supercore.task_identity import TaskIdentity

from gradwire.flower.one_process import RUN, OneProcess
from gradwire.flower.server.wire_grid import Wire
from gradwire.flower.shared.message import as_bytes_record, seal, with_records
from support.flower_apps import start_model

HOSTILE = 2  # a node id
Damage = Callable[[list[bytes], random.Random], bytes]
NUMBERS = (0, 1, -1, 0.5, 2**31, 2**53, 2**62, 2**63, -(2**62), 1e-300, 1e18, 1e300, float("nan"), float("inf"))
NAMES = ("num-examples", "train_loss", "x", "", "gradwire", "arrays", "ä" * 50)
SHAPES = ((), (1,), (0,), (3,), (40,), (40, 130), (130, 40), (5200,), (1, 40), (0, 4), (7, 3))
DTYPES = ("f4", "f8", "f2", "g", "i8", "u1", "u8", "?", "c8", "U3", "S4", "O", ">f4")


@functools.cache
def sent_record() -> ArrayRecord:
    """The model that clients are sent."""
    return ArrayRecord(start_model())


class Answers(OneProcess):
    """A grid on which `answer` says what comes back."""

    def __init__(self) -> None:
        super().__init__(None, 0)  # type: ignore[arg-type]
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SUPERLINK_NODE_ID, RUN
        self.answer: Callable[[list[Message]], list[Message]] = list
        self.count = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = str(self.count)
        return self.answer(messages)


def outcome(rng: random.Random, updates: list[bytes], damage: Damage) -> str:
    """Run some rounds with a hostile client on a new server, and return what came of the last."""
    grid = Answers()
    wire = Wire(grid, download=rng.choice((None, None, "stc")), require_same_layout=True)
    for _ in range(rng.choice((1, 1, 1, 3))):
        result = one_round(wire, grid, rng, updates, damage)
    return result


def one_round(wire: Wire, grid: Answers, rng: random.Random, updates: list[bytes], damage: Damage) -> str:
    """Run a round with one hostile reply, alone or beside one or two honest ones, and check what comes of it."""
    kind = rng.choice(("train", "train", "train", "evaluate"))
    nodes = rng.choice(([HOSTILE], [1, HOSTILE], [1, HOSTILE, 3]))

    def answer(messages: list[Message]) -> list[Message]:
        replies = [honest(message, rng, updates) for message in messages]
        return hostile(replies, rng, updates, damage)

    grid.answer = answer
    content = RecordDict({"arrays": sent_record(), "config": ConfigRecord({"server-round": 1})})
    replies = list(wire.send_and_receive([Message(content, node, kind) for node in nodes], timeout=0.0))
    seen = {}
    for reply in replies:
        if not reply.has_error():
            assert reply.metadata.src_node_id not in seen, "two replies of one client"
            seen[reply.metadata.src_node_id] = reply
    for node in nodes:
        assert node == HOSTILE or node in seen, f"the honest reply of node {node} was rejected: {_reasons(replies)}"
    strategy: Any = rng.choice((_averages, _medians))()
    if kind == "evaluate":
        means = strategy.aggregate_evaluate(1, replies)
        assert means is None or all(np.isfinite(v).all() for v in means.values()), "a mean that is not finite"
        return f"evaluated, the hostile one {'used' if HOSTILE in seen else 'rejected'}"
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None or not seen
    for name, sent in sent_record().items() if arrays is not None else ():
        assert tuple(arrays[name].shape) == tuple(sent.shape), f"{name} has another shape"
        assert np.isfinite(arrays[name].numpy()).all(), f"{name} is not finite"
        assert str(arrays[name].dtype) in ("float16", "float32", "float64"), f"{name} cannot be read by clients"
    assert arrays is None or arrays.keys() == sent_record().keys(), "another model"
    return f"averaged, the hostile one {'used' if HOSTILE in seen else 'rejected'}"


def _reasons(replies: list[Message]) -> str:
    return "; ".join(str(reply.error.reason) for reply in replies if reply.has_error())


@functools.cache
def _averages() -> FedAvg:
    return FedAvg()


@functools.cache
def _medians() -> FedMedian:
    return FedMedian()


def honest(message: Message, rng: random.Random, updates: list[bytes]) -> Message:
    """The reply of an honest client, compressed or not."""
    metrics = MetricRecord({"train_loss": 1.0, "num-examples": rng.randrange(1, 1000)})
    if message.metadata.message_type == "evaluate":
        return Message(RecordDict({"metrics": metrics}), reply_to=message)
    record = sent_record()
    if rng.random() < 0.7:
        number = message.content["gradwire"]["model"]
        record = seal(rng.randbytes(8), number, sent_record(), rng.choice(updates[:6]))
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def hostile(replies: list[Message], rng: random.Random, updates: list[bytes], damage: Damage) -> list[Message]:
    """The replies with some changes of the one of node HOSTILE, which may also come twice, or not at all."""
    (at,) = (i for i, reply in enumerate(replies) if reply.metadata.src_node_id == HOSTILE)
    for _ in range(rng.choice((1, 1, 2, 3))):
        change = rng.choice(CHANGES)
        replies[at] = change(replies[at], rng)
    if rng.random() < 0.2 and "arrays" in replies[at].content:
        number = rng.choice((1, 1, 2, 2**32 - 1))
        data = seal(rng.randbytes(8), number, sent_record(), damage(updates, rng))
        replies[at] = with_records(replies[at], {**replies[at].content, "arrays": data})
    twice = [replies[at]] * rng.choice((0, 0, 0, 0, 1))
    return replies + twice if rng.random() < 0.97 else replies[:at] + replies[at + 1 :]


# ── changes of one reply ──


def other_metrics(reply: Message, rng: random.Random) -> Message:
    key = rng.choice(("metrics", "metrics", "more", "arrays"))
    record = reply.content.get(key)
    values = dict(record) if isinstance(record, MetricRecord) else {}
    for _ in range(rng.choice((1, 1, 2))):
        number: Any = rng.choice(NUMBERS)
        values[rng.choice(NAMES)] = rng.choice((number, number, [float(number)] * rng.randrange(4)))
    if rng.random() < 0.3 and values:
        del values[rng.choice(list(values))]
    return with_records(reply, {**reply.content, key: MetricRecord(values)})


def fewer_records(reply: Message, rng: random.Random) -> Message:
    keys = [key for key in reply.content if rng.random() < 0.5]
    return with_records(reply, {key: reply.content[key] for key in keys})


def renamed_record(reply: Message, rng: random.Random) -> Message:
    return with_records(reply, {rng.choice((key, *NAMES)): record for key, record in reply.content.items()})


def config_record(reply: Message, rng: random.Random) -> Message:
    return with_records(reply, {**reply.content, rng.choice(("config", "arrays")): ConfigRecord({"a": b"x"})})


def other_arrays(reply: Message, rng: random.Random) -> Message:
    """The whole model with some arrays changed, left out, added or in another order."""
    arrays = dict(sent_record())
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice((*arrays, "backdoor"))
        arrays[name] = any_array(rng)
    if rng.random() < 0.3:
        del arrays[rng.choice(list(arrays))]
    names = list(arrays)
    rng.shuffle(names)
    return with_records(reply, {**reply.content, "arrays": ArrayRecord({name: arrays[name] for name in names})})


def any_array(rng: random.Random) -> Array:
    dtype, shape = rng.choice(DTYPES), rng.choice(SHAPES)
    if dtype == "O" or rng.random() < 0.2:  # bytes that are no array, or another one than is stated
        data = rng.choice((b"", b"\x93NUMPY", rng.randbytes(80), Array(np.zeros(3, "f4")).data))
        stype = rng.choice(("numpy.ndarray", "numpy.ndarray", "gradwire", "torch", ""))
        return Array(rng.choice(("float32", "int64", "object", "")), rng.choice((shape, (2**40,), (-1,))), stype, data)
    with np.errstate(all="ignore"):
        value = rng.choice(NUMBERS) if dtype in ("f4", "f8", "f2", "g") else rng.randrange(2)
        return Array(np.full(shape, value, dtype))


def other_bytes(reply: Message, rng: random.Random) -> Message:
    return with_records(reply, {**reply.content, "arrays": as_bytes_record(rng.randbytes(rng.randrange(60)))})


def other_metadata(reply: Message, rng: random.Random) -> Message:
    field, value = rng.choice((
        ("message_type", rng.choice(("train", "evaluate", "query", "train.x", "system", ""))),
        ("src_node_id", rng.choice((1, 3, 7, 0))),
        ("reply_to_message_id", rng.choice(("", "1", "x"))),
    ))  # fmt: skip
    changed = with_records(reply, reply.content)
    metadata = type(reply.metadata).__new__(type(reply.metadata))
    metadata.__dict__.update({**reply.metadata.__dict__, f"_{field}": value})
    changed.__dict__["_metadata"] = metadata
    return changed


CHANGES = (
    other_metrics, other_metrics, fewer_records, renamed_record, config_record, other_arrays, other_arrays, other_bytes,
    other_metadata,
)  # fmt: skip


def note(rng: random.Random) -> dict[str, Any]:
    """The server's record of a message, with some of its values changed."""
    values: dict[str, Any] = {
        "wire": 1, "training": bytes(8), "model": 1, "accepted": bytes(16), "rate": "co3", "have": 0
    }  # fmt: skip
    for _ in range(rng.choice((1, 1, 2))):
        others = (None, 0, 1, -1, 2**32, 2**63, 1.5, True, b"", b"12345678", "text", [1, 2], [b"12345678"])
        values[rng.choice(list(values))] = rng.choice(others)
    if rng.random() < 0.3:
        del values[rng.choice(list(values))]
    return values
