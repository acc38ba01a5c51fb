"""Replies, notes and states that nobody honest would send or keep: the round goes on, and the model is unharmed."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import gradwire
from gradwire import FrameError, flower
from gradwire.flower.client.client_memory import ClientMemory, usable
from gradwire.flower.client.context_store import ContextStore
from gradwire.flower.shared import update
from gradwire.flower.shared.message import Note, with_records
from gradwire.frame.byte_fields import varint
from support.cases import for_each
from support.flower_apps import (
    Faulty,
    adding_client,
    changed_update,
    drift,
    final,
    one_client_is,
    one_frame,
    resealed,
    run,
    start_model,
)

Fault = Callable[[Message], Message]


def records(**changes: object) -> Fault:
    return lambda reply: with_records(reply, {k: v for k, v in {**reply.content, **changes}.items() if v is not None})


def metrics(**changes: object) -> Fault:
    usual = {"train_loss": 1.0, "num-examples": 1.0}
    return records(metrics=MetricRecord({**usual, **{k.replace("_e", "-e"): v for k, v in changes.items()}}))


def raw(name: str, array: Array) -> Fault:
    return records(arrays=ArrayRecord({**dict(ArrayRecord(start_model())), name: array}))


def claims(shape: tuple[int, ...], data: bytes = b"") -> Array:
    """Bytes of NumPy's that say to be of this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return Array("float32", shape, "numpy.ndarray", file.getvalue() + data)


def zipped() -> Array:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return Array("float32", (40, 130), "numpy.ndarray", file.getvalue())


def full(value: float) -> torch.Tensor:
    return torch.full((5200,), value)


REPLIES: dict[str, Fault] = {
    "no metrics": records(metrics=None),
    "more metrics": records(more=MetricRecord({"x": 1.0})),
    "other metrics": records(metrics=MetricRecord({"num-examples": 1, "x": 2.0})),
    "no weight": records(metrics=MetricRecord({"train_loss": 1.0})),
    "a huge weight": metrics(num_examples=1e308),
    "a list": metrics(train_loss=[1.0, 2.0]),
    "no arrays": records(arrays=None),
    "fewer arrays": records(arrays=ArrayRecord({"scalar": Array(np.zeros((), "f4"))})),
    "another kind": records(arrays=ArrayRecord({"gradwire": Array("uint8", (3,), "numpy.ndarray", b"abc")})),
    "raw NaN": raw("conv.weight", Array(np.full((40, 130), np.nan, "f4"))),
    "raw shape": raw("conv.weight", Array(np.zeros((3, 40, 130), "f4"))),
    "raw text": raw("conv.weight", Array(np.array(["a"]))),
    "raw terabytes": raw("conv.weight", claims((10**7, 10**5))),
    "raw archive": raw("conv.weight", zipped()),
    "raw variance": raw("bn.running_var", Array(np.full(40, -5.0, "f4"))),
    "huge": lambda r: changed_update(r, one_frame("conv.weight", gradwire.codec("none").encode(full(1e30)))),
}


@for_each("download", [None, "stc"])
@for_each("what", REPLIES)
def test_a_hostile_reply_is_left_out(what: str, download: str | None) -> None:
    def trained(fault: Callable[[Message], Message | None]) -> dict[str, torch.Tensor]:
        nonlocal strategy
        strategy = flower.Compressed(FedAvg(), download=download, rate="adaquantfl")
        client = adding_client([flower.compress("co3")])
        return final(run(strategy, client, rounds=2, fault=one_client_is(fault))[0])

    strategy: flower.Compressed
    result = trained(REPLIES[what])
    assert strategy.stats()["train"]["rejected"] == 2
    without = trained(lambda reply: None)
    assert all(torch.equal(tensor, without[name]) for name, tensor in result.items())


def test_weights_that_are_all_zero_end_no_training() -> None:
    strategy = flower.Compressed(FedAvg())
    run(strategy, adding_client([flower.compress("co3")], weight=lambda i: 0))
    assert strategy.stats()["train"]["rejected"] == 9


def test_raw_replies_are_like_compressed_ones() -> None:
    compress = flower.compress({"*": "none"})

    def some(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if context.node_config["partition-id"] != 1:
            return compress(message, context, call_next)
        return call_next(with_records(message, {k: r for k, r in message.content.items() if k != "gradwire"}), context)

    strategy = flower.Compressed(FedAvg())
    run(strategy, adding_client([some]))
    assert not strategy.stats()["train"]["rejected"]


def test_an_integer_update_keeps_the_dtype() -> None:
    integers = gradwire.codec("none").encode(torch.full((5200,), 3))
    fault = one_client_is(lambda r: changed_update(r, resealed(lambda d: d[:24] + bytes([1, 3, 0]) + integers)))
    result, _ = run(flower.Compressed(FedAvg()), adding_client([flower.compress("co3")]), rounds=1, fault=fault)
    assert final(result)["conv.weight"].dtype == torch.float32


def test_a_table_or_frames_without_end_are_not_read() -> None:
    names = [f"w{i}" for i in range(2000)]
    model = {name: torch.zeros(1) for name in names}
    table = varint(2000) + (varint(4000) + bytes(2000)) * 2000
    empty = gradwire.codec("none").encode(torch.zeros(0))
    start = time.process_time()
    for data in (table, b"\1\2\0" + empty * 300_000):
        with pytest.raises(FrameError):
            update.decode(data, model)
    assert time.process_time() - start < 0.5


def test_an_update_nobody_waits_for_is_rejected() -> None:
    class Again(FedAvg):
        def start(self, grid, initial_arrays, **options):  # type: ignore[no-untyped-def]
            inner, push = grid.grid, grid.grid.send_and_receive
            inner.send_and_receive = lambda messages, **o: [r for reply in push(messages, **o) for r in (reply, reply)]
            return super().start(grid, initial_arrays, **options)

    strategy = flower.Compressed(Again(fraction_evaluate=0.0))
    result, _ = run(strategy, adding_client([flower.compress("co3")]), rounds=2)
    assert strategy.stats()["train"]["rejected"] == 6 and "scalar" in final(result)


def test_a_collapsing_variance_stays_one() -> None:
    def collapse(client: int, round_: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        target = torch.linspace(1.3, 1.7, 40) if round_ == 1 else torch.full((40,), 1e-4)
        return {"bn.running_var": target - model["bn.running_var"]}

    strategy = flower.Compressed(FedAvg())
    result, _ = run(strategy, adding_client([flower.compress("co3")], change=collapse), rounds=2)
    torch.testing.assert_close(final(result)["bn.running_var"], torch.full((40,), 1e-4), rtol=0.01, atol=0)


def test_no_update_makes_a_variance_negative() -> None:
    frame = gradwire.codec("none").encode(torch.full((40,), -5.0))
    fault = one_client_is(lambda reply: changed_update(reply, one_frame("bn.running_var", frame)))
    result, _ = run(flower.Compressed(FedAvg()), adding_client([flower.compress("co3")]), fault=fault)
    assert (final(result)["bn.running_var"] >= 0).all()


def test_a_mask_of_infinities_that_nobody_changes() -> None:
    def change(client: int, round_: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: u for name, u in drift(client, round_, start_model()).items() if name != "bn.weight"}

    model = {**start_model(), "bn.weight": torch.full((40,), -torch.inf)}
    strategy = flower.Compressed(FedAvg())
    result, _ = run(strategy, adding_client([flower.compress("co3")], change=change), model=model)
    assert (final(result)["bn.weight"] == -torch.inf).all()
    assert not torch.equal(final(result)["conv.weight"], model["conv.weight"])


def test_a_memory_that_fits_no_longer_is_dropped() -> None:
    memory = {"a": torch.ones(3), "b": torch.full((2,), torch.nan), "c": torch.ones(2), "absent": torch.ones(9)}
    assert set(usable(memory, {name: torch.zeros(2) for name in "abc"})) == {"c", "absent"}


@pytest.mark.parametrize("content", [b"junk", {"a": 1}, [1]])
def test_a_context_of_another_version_is_as_good_as_none(content: object) -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    store = ContextStore(context, bytes(8))
    store.write("settled", content)  # type: ignore[arg-type]
    if isinstance(content, bytes):
        (name,) = context.state["gradwire"]
        context.state["gradwire"] = ArrayRecord({name: Array("uint8", (4,), "torch", content)})
    assert ClientMemory(store).settle([b"x" * 8]) == {}


@pytest.mark.parametrize("bad", [{"model": 1.5}, {"training": "12345678"}, {"accepted": b"123"}, {"have": -1}])
def test_a_damaged_note_is_told_before_the_training(bad: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="damaged"):
        Note.read({**Note(bytes(8), 1).record(), **bad})


def test_a_rate_starts_anew_with_each_training() -> None:
    rate = flower.AdaQuantFL()
    strategy = flower.Compressed(FedAvg(), rate=rate)
    for _ in range(2):
        run(strategy, adding_client([flower.compress("co3")]), rounds=2)
        assert strategy.wire.rate.intervals == 3 and not rate.informed


@pytest.mark.parametrize(("require_same_layout", "rejected"), [(True, [2]), (False, [])])
def test_only_strategies_that_average_need_replies_of_one_layout(
    require_same_layout: bool, rejected: list[int]
) -> None:
    def more_metrics(reply: Message) -> Message:
        if reply.metadata.src_node_id == 2:
            reply.content["more"] = MetricRecord({"seconds": 1.0})
        return reply

    clients = Faulty(adding_client([flower.compress("co3")]), 3, more_metrics)
    grid = flower.Wire(clients, require_same_layout=require_same_layout)
    content = RecordDict({"arrays": ArrayRecord(start_model()), "config": ConfigRecord({"server-round": 1})})
    replies = list(grid.send_and_receive([Message(content, node, "train") for node in (1, 2, 3)]))
    assert [reply.metadata.src_node_id for reply in replies if reply.has_error()] == rejected
    assert sorted(grid.accepted) == [node for node in (1, 2, 3) if node not in rejected]
