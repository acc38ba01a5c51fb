"""Flower's strategies with compressed updates: the same results, fewer bytes. Messages go as bytes, in one process."""

from __future__ import annotations

import copy
import logging
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx, FedTrimmedAvg, Krum
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

import gradwire
from gradwire import SpecError, flower
from gradwire.flower.client import mod
from gradwire.flower.client.client_memory import ClientMemory
from gradwire.flower.client.context_store import RECORD, ContextStore
from gradwire.flower.shared import update
from gradwire.flower.shared.message import as_bytes_record
from support.cases import for_each
from support.flower_apps import (
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

RECIPES = [entry.name for entry in gradwire.recipes()]


def compressed(
    recipe: str | dict[str, str] = "none", strategy: object = FedAvg, **options: object
) -> tuple[object, object]:
    return flower.Compressed(strategy(**options)), adding_client([flower.compress(recipe)])


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.shape == b[name].shape and tensor.dtype == b[name].dtype
        torch.testing.assert_close(tensor, b[name], rtol=1e-5, atol=1e-6)


@for_each("strategy", [FedAvg, FedProx, FedMedian, FedTrimmedAvg, Krum, FedAdam])
def test_strategies_do_as_without(strategy: type) -> None:
    options = {"proximal_mu": 0.1} if strategy is FedProx else {}
    wrapped = flower.Compressed(strategy(**options))
    # bf16 is for statistics; here nothing may be lost at all.
    result, _ = run(wrapped, adding_client([flower.compress({"*running_*": "none", "*": "none"})]), clients=5)
    plain, _ = run(strategy(**options), adding_client([]), clients=5)
    assert_close(final(result), final(plain))
    assert dict(result.train_metrics_clientapp[3]) == dict(plain.train_metrics_clientapp[3])


def test_a_strategy_of_ones_own_with_its_own_start() -> None:
    class Sum(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            replies = [reply for reply in replies if not reply.has_error()]
            records = [reply.content["arrays"] for reply in replies]
            total = {name: sum(r[name].numpy() for r in records) for name in records[0]}
            again = {name: sum(r[name].numpy() for r in records) for name in records[0]}
            assert all((total[name] == again[name]).all() for name in total), "arrays can be read again"
            return ArrayRecord({k: Array(np.asarray(v)) for k, v in total.items()}), MetricRecord()

        def start(self, grid, initial_arrays, **options):  # type: ignore[no-untyped-def]
            self.started = True
            return super().start(grid, initial_arrays, **options)

    strategy = flower.Compressed(Sum())
    result, _ = run(strategy, adding_client([flower.compress("co3")]), rounds=2)
    assert strategy.started and "scalar" in final(result)


def test_a_strategy_that_takes_a_clients_model_as_it_is() -> None:
    """Such arrays go out again, as bytes, and through pickle in Flower's simulation."""

    class First(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            record = min(replies, key=lambda reply: reply.metadata.src_node_id).content["arrays"]
            again = pickle.loads(pickle.dumps(record))
            assert all((again[name].numpy() == record[name].numpy()).all() for name in record)
            return copy.deepcopy(record) if server_round == 1 else record, MetricRecord()

    strategy = flower.Compressed(First())
    result, _ = run(strategy, adding_client([flower.compress("co3")]))
    assert not strategy.stats()["train"]["rejected"] and len(result.arrays) == len(start_model())


def test_the_mean_is_that_of_the_decoded_updates_by_weight() -> None:
    sent: dict[int, dict[str, torch.Tensor]] = {}
    model = start_model()

    def look(reply):  # type: ignore[no-untyped-def]
        if "arrays" not in reply.content:
            return reply
        data = reply.content["arrays"]["gradwire"].data[24:]
        sent[reply.metadata.src_node_id] = update.decode(data, model)
        return reply

    strategy, client = compressed("co3")
    result, _ = run(strategy, client, clients=3, rounds=1, fault=look)
    weights = torch.tensor([1.0, 2, 3]) / 6
    for name in ("conv.weight", "bn.weight", "scalar"):
        mean = sum(w * sent[i + 1][name] for i, w in enumerate(weights))
        torch.testing.assert_close(final(result)[name], torch.atleast_1d(mean))


@pytest.mark.parametrize("recipe", ["stc", {"*.bias": "none", "*": "stc"}])
def test_integers_and_buffers_are_those_of_flower(recipe: str | dict[str, str]) -> None:
    strategy, client = compressed(recipe)
    result, _ = run(strategy, client)
    plain, _ = run(FedAvg(), adding_client([]))
    for name in ("bn.num_batches_tracked", "mask", "empty"):
        assert torch.equal(final(result)[name], final(plain)[name]), name
    for name in ("bn.running_mean", "bn.running_var"):  # as bf16 differences
        torch.testing.assert_close(final(result)[name], final(plain)[name], rtol=0, atol=3 * 0.05 / 256)


@for_each("recipe", RECIPES)
def test_every_recipe(recipe: str) -> None:
    strategy, client = compressed(recipe)
    result, _ = run(strategy, client, clients=2, rounds=2)
    assert not strategy.stats()["train"]["rejected"]
    assert all(torch.isfinite(t).all() for t in final(result).values() if t.is_floating_point())


def test_bytes_are_those_of_the_messages() -> None:
    strategy, client = compressed("co3")
    _, grid = run(strategy, client)
    stats = strategy.stats()
    assert sum(s["download_bytes"] for s in stats.values()) == grid.sent_bytes
    assert sum(s["upload_bytes"] for s in stats.values()) == grid.received_bytes
    assert stats["train"]["messages"] == stats["train"]["replies"] == 9
    assert 3 * stats["train"]["upload_bytes"] < stats["train"]["dense_upload_bytes"]


def test_what_is_left_out_is_sent_later() -> None:
    """Sum of what arrived + memory = sum of the updates, of a client whose replies all arrive (decay 1)."""
    strategy, client = compressed("stc:decay=1,small=same")
    result, grid = run(strategy, client, clients=2, rounds=6)
    store = ContextStore(grid.contexts[1], strategy.wire.training)
    left = [
        ClientMemory(ContextStore(c, strategy.wire.training)).settle([strategy.wire.accepted[node]])
        for node, c in grid.contexts.items()
    ]
    assert store.read("settled") is not None
    for name in ("conv.weight", "bn.weight"):
        updates = sum((1 + i) / 3 * drift(i, r, start_model())[name] for i in range(2) for r in range(1, 7))
        remembered = sum((1 + i) / 3 * left[i][name] for i in range(2))
        torch.testing.assert_close(final(result)[name] + remembered, start_model()[name] + updates, rtol=0, atol=1e-5)


def test_memory_in_the_context_does_not_grow() -> None:
    strategy, client = compressed("stc")
    _, grid = run(strategy, client, rounds=5)
    entries = [len(grid.contexts[1].state[RECORD])]
    assert entries == [2]  # settled and pending


# ── mixed fleets ──


def test_clients_without_the_mod_send_raw_arrays() -> None:
    result, _ = run(flower.Compressed(FedAvg()), adding_client([]))
    plain, _ = run(FedAvg(), adding_client([]))
    assert_close(final(result), final(plain))


def test_servers_without_the_wrapper_get_raw_arrays(caplog: pytest.LogCaptureFixture) -> None:
    mod._warnings_given.clear()
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        result, _ = run(FedAvg(), adding_client([flower.compress("co3")]))
    plain, _ = run(FedAvg(), adding_client([]))
    assert_close(final(result), final(plain))
    assert "gradwire.flower.Compressed" in caplog.text


def test_a_bad_recipe_is_told_at_once() -> None:
    with pytest.raises(SpecError, match="did you mean 'co3'"):
        flower.compress("co33")


# ── faults ──


def hidden_nan() -> bytes:
    """A frame of NaNs without the flag that honest senders set."""
    frame = bytearray(gradwire.codec("none").encode(torch.full((5200,), float("nan"))))
    frame[3] &= 0x0F
    frame[5:9] = struct.pack("<I", zlib.crc32(frame[9:], zlib.crc32(frame[:5])))
    return bytes(frame)


FAULTS = {
    "checksum mismatch": lambda d: d[:100] + bytes([d[100] ^ 1]) + d[101:],
    "cut short": lambda d: d[:10],
    "at most": lambda d: d + bytes(1 << 20),
    "version 2": lambda d: d[:3] + b"\2" + d[4:],
    "stale": resealed(lambda d: d[:16] + b"\7\0\0\0" + d[20:]),
    "other tensors": resealed(lambda d: d[:20] + b"\7\0\0\0" + d[24:]),
    "wrong magic": lambda d: b"xyz" + d[3:],
    "NaN": one_frame("conv.weight", hidden_nan()),
    "too large": resealed(lambda d: d[:24] + b"\xff\xff\xff\x7f" + d[25:]),
    "5200 elements for bn.weight": one_frame("bn.weight", gradwire.codec("co3").encode(torch.ones(5200))),
}


@for_each("reason", FAULTS)
def test_a_bad_update_is_rejected_and_the_round_goes_on(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    logging.getLogger("flwr").propagate = True
    strategy, client = compressed("co3")
    fault = one_client_is(lambda reply: changed_update(reply, FAULTS[reason]))
    result, _ = run(strategy, client, fault=fault)
    assert strategy.stats()["train"]["rejected"] == 3
    assert "node 2" in caplog.text and reason in caplog.text
    strategy, client = compressed("co3")
    without, _ = run(strategy, client, fault=one_client_is(lambda reply: None))
    assert_close(final(result), final(without))


def test_a_forged_stream_leaves_the_tensor_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """Its side information is sound, so that it is found out only when a strategy asks for the tensor."""
    logging.getLogger("flwr").propagate = True
    frame = bytearray(gradwire.codec("co3").encode(torch.randn(5200, generator=torch.Generator().manual_seed(0))))
    frame[-200:] = bytes(200)
    frame[5:9] = struct.pack("<I", zlib.crc32(frame[9:], zlib.crc32(frame[:5])))
    with pytest.raises(gradwire.FrameError):
        gradwire.decode(bytes(frame))
    strategy, client = compressed("co3")
    forged = one_frame("conv.weight", bytes(frame))
    result, _ = run(strategy, client, rounds=1, fault=one_client_is(lambda reply: changed_update(reply, forged)))
    assert "conv.weight in the update of node 2 is left out" in caplog.text
    strategy, client = compressed("co3")
    without, _ = run(strategy, client, rounds=1, fault=one_client_is(lambda reply: None))
    moved, moved_without = (final(r)["conv.weight"] - start_model()["conv.weight"] for r in (result, without))
    # The others' weights are 1 and 3, and the forger's, who moves nothing, is 2.
    torch.testing.assert_close(moved, moved_without * 4 / 6, atol=1e-6, rtol=0)


def test_a_weight_that_is_not_a_number_is_rejected() -> None:
    client = adding_client([flower.compress("co3")], weight=lambda i: float("nan") if i == 1 else 1.0)
    strategy = flower.Compressed(FedAvg())
    result, _ = run(strategy, client)
    assert strategy.stats()["train"]["rejected"] == 3
    assert all(torch.isfinite(t).all() for t in final(result).values() if t.is_floating_point())


def test_a_client_that_diverges_sends_nothing_and_keeps_its_memory() -> None:
    def sometimes_nan(client, round_, model):  # type: ignore[no-untyped-def]
        update_ = drift(client, round_, model)
        if client == 1 and round_ == 2:
            update_["conv.weight"][3, 3] = float("nan")
        return update_

    strategy = flower.Compressed(FedAvg())
    result, _ = run(strategy, adding_client([flower.compress("stc")], change=sometimes_nan))
    assert strategy.stats()["train"]["replies"] == 9
    assert all(torch.isfinite(t).all() for t in final(result).values() if t.is_floating_point())


@for_each("length", [0, 1, 9, 10, 5_242_879, 5_242_880, 5_242_881, 11_000_000])
def test_lengths_are_those_of_all_objects(length: int) -> None:
    """Of updates too, which are not hashed to be measured."""
    data = np.random.default_rng(0).bytes(length)
    records = {
        "arrays": as_bytes_record(data),
        "raw": ArrayRecord({"zeros": Array(np.zeros(3_000_000)), "again": Array(np.zeros(3))}),
        "metrics": MetricRecord({"loss": 1.0}),
    }
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    message = Message(RecordDict(records), 1, "train")
    assert flower.message_bytes(message) == sum(len(p.deflate()) for p in get_all_nested_objects(message).values())
