"""Downloads through rounds of Flower: clients of all kinds, damage on the way, and what each message costs."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from gradwire import flower
from gradwire.flower import one_process
from gradwire.flower.shared import arrays
from gradwire.flower.shared.message import NEEDS_WHOLE, with_records
from support.flower_apps import Faulty, Model, adding_client, final, run, serve, start_model

SPARSE = "stc:p=0.05,small=same"


def steady(client: int, round_: int, model: Model) -> Model:
    return {name: torch.full(t.shape, 0.01, dtype=t.dtype) for name, t in model.items() if t.is_floating_point()}


class Between(Faulty):
    """A grid that changes messages before clients see them, and replies after."""

    def __init__(
        self, client: ClientApp, clients: int, change: Callable[[Message, Context], Message],
        reply: Callable[[Message], Message] = lambda reply: reply,
    ):  # fmt: skip
        super().__init__(client, clients, reply)
        self.change = change

    def reply_of_client(self, message: Message, context: Context) -> Message:
        return super().reply_of_client(self.change(message, context), context)


class OwnModels(FedAvg):
    """From the third round on every client has a record of its own."""

    def configure_train(self, server_round: int, arrays_: ArrayRecord, config: ConfigRecord, grid: Grid):  # type: ignore[no-untyped-def]
        for message in super().configure_train(server_round, arrays_, config, grid):
            own = ArrayRecord({name: arrays.array(t) for name, t in arrays.tensors(arrays_).items()})
            yield with_records(message, {**message.content, "arrays": own}) if server_round > 2 else message


@pytest.mark.parametrize("strategy", [FedAvg, OwnModels])
@pytest.mark.parametrize("mods", [[], [flower.compress({"*running_*": "none", "*": "none"})]])
def test_the_true_model_gets_all_of_every_update(strategy: type[FedAvg], mods: list[object]) -> None:
    """Also of clients without the mod, which train from the copy that they were sent whole."""
    compressed = flower.Compressed(strategy(fraction_train=0.5, fraction_evaluate=0.0), download=SPARSE)
    result, _ = run(compressed, adding_client(mods, change=steady), clients=4, rounds=6)
    expected = start_model()["conv.weight"] + 0.06
    torch.testing.assert_close(final(result)["conv.weight"], expected, rtol=0, atol=1e-5)


def test_a_step_is_sent_once_for_evaluation_and_training() -> None:
    """The model that a client has evaluated is the one that it trains next."""
    steps: list[tuple[str, int, int]] = []

    def look(message: Message, context: Context) -> Message:
        record = message.content["arrays"]
        if context.node_id == 1 and list(record) == ["gradwire"]:
            steps.append((message.metadata.message_type, *struct.unpack("<II", record["gradwire"].data[8:16])))
        return message

    strategy = flower.Compressed(FedAvg(), download="co3")
    one_process.run_on(Between(adding_client([flower.compress("co3")]), 3, look), serve(strategy, 3)[0])
    assert steps == [
        ("evaluate", 1, 2), ("train", 2, 2), ("evaluate", 2, 3), ("train", 3, 3), ("evaluate", 3, 4)
    ]  # fmt: skip


def test_a_damaged_step_brings_the_whole_model_in_the_same_round() -> None:
    damaged = 0

    def damage(message: Message, context: Context) -> Message:
        nonlocal damaged
        record = message.content["arrays"]
        if list(record) != ["gradwire"] or context.node_id != 2:
            return message
        damaged += 1
        data = bytearray(record["gradwire"].data)
        data[len(data) // 2] ^= 1
        bad = ArrayRecord({"gradwire": Array("uint8", (len(data),), "gradwire", bytes(data))})
        return with_records(message, {**message.content, "arrays": bad})

    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), download="co3")
    server, results = serve(strategy, 4)
    one_process.run_on(
        Between(adding_client([flower.compress({"*running_*": "none", "*": "none"})], change=steady), 3, damage), server
    )
    stats = strategy.stats()["train"]
    assert damaged == 3 and stats["messages"] == stats["replies"] == 12 + damaged and not stats["rejected"]
    expected = start_model()["conv.weight"] + 0.04
    torch.testing.assert_close(final(results[0])["conv.weight"], expected, rtol=0, atol=1e-5)


def test_who_pulls_replies_is_told_that_a_client_needs_the_whole_model() -> None:
    """And the next message to it has the whole."""
    grid = flower.Wire(one_process.OneProcess(adding_client([flower.compress("none")]), 1), download="co3")
    model, codes = start_model(), []
    for round_ in range(1, 5):
        model["conv.weight"] = model["conv.weight"] + 0.01 * torch.randn(40, 130)
        content = {"arrays": ArrayRecord(model), "config": ConfigRecord({"server-round": round_})}
        message = Message(RecordDict(content), 1, "train")
        if round_ == 3:
            grid.grid.contexts[1].state.clear()
        (reply,) = grid.pull_messages(grid.push_messages([message]))
        codes.append(reply.error.code if reply.has_error() else 0)
    assert codes == [0, 0, NEEDS_WHOLE, 0]


@pytest.mark.parametrize("bad", ["shape", "data"])
def test_raw_arrays_that_do_not_fit_stop_nobody(bad: str) -> None:
    """They are the strategy's to judge, or rejected; the server goes on."""

    def spoil(reply: Message) -> Message:
        if reply.metadata.src_node_id != 2:
            return reply
        whole = dict(reply.content["arrays"])
        array = whole["conv.weight"]
        whole["conv.weight"] = (
            Array(torch.zeros(7).numpy()) if bad == "shape" else Array("float32", array.shape, array.stype, b"no")
        )
        return with_records(reply, {**reply.content, "arrays": ArrayRecord(whole)})

    class Judging(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            good = [r for r in replies if not r.has_error() and r.content["arrays"]["conv.weight"].shape == (40, 130)]
            assert len(good) == 2
            return super().aggregate_train(server_round, good)

    strategy = flower.Compressed(Judging(fraction_evaluate=0.0), download=SPARSE)
    server, results = serve(strategy, 3)
    client = adding_client([], change=steady)
    one_process.run_on(Between(client, 3, lambda message, _: message, spoil), server)
    assert final(results[0])["conv.weight"].shape == (40, 130)
