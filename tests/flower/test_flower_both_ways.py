"""Download compression, byte budgets and adaptive rates, through Flower's messages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from gradwire import SpecError, flower
from gradwire.flower import message_bytes, one_process
from gradwire.flower.client.context_store import ContextStore
from gradwire.flower.shared import arrays
from gradwire.flower.shared.message import NOTE, with_records
from support.flower_apps import Faulty, adding_client, final, run, serve, start_model


def some_clients(**options: object) -> FedAvg:
    return FedAvg(fraction_train=0.5, fraction_evaluate=0.0, **options)


# ── downloads ──


@pytest.mark.parametrize("download", ["co3", "stc:p=0.1", "none"])
def test_clients_share_a_copy_of_the_model(download: str) -> None:
    strategy = flower.Compressed(some_clients(), download=download)
    result, grid = run(strategy, adding_client([flower.compress("none")]), clients=4, rounds=8)
    chain, numbers = strategy.wire.models.chain, []
    for context in grid.contexts.values():
        copy = ContextStore(context, strategy.wire.training).read("model")
        if copy["number"] == chain.number:
            assert all(torch.equal(copy["model"][name], t) for name, t in chain.shared_copy.items())
        numbers.append(copy["number"])
    assert max(numbers) == chain.number == 8, "each round has a model, and the last one is with those it was sent to"
    stats = strategy.stats()["train"]
    assert stats["replies"] == 16 and not stats["rejected"]
    assert stats["download_bytes"] + stats["upload_bytes"] == grid.sent_bytes + grid.received_bytes
    if download != "none":
        assert stats["download_bytes"] < 0.7 * stats["dense_download_bytes"]
    assert torch.isfinite(final(result)["conv.weight"]).all()


def test_nothing_is_lost_on_the_way_down() -> None:
    """Every client adds 0.01 in each round: so does the server's model, whatever the clients have seen of it."""

    def steady(client: int, round_: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.full(t.shape, 0.01, dtype=t.dtype) for name, t in model.items() if t.is_floating_point()}

    strategy = flower.Compressed(some_clients(), download="stc:p=0.05,small=same")
    client = adding_client([flower.compress({"*running_*": "none", "*": "none"})], change=steady)
    result, _ = run(strategy, client, clients=4, rounds=10)
    expected = start_model()["conv.weight"] + 0.1
    torch.testing.assert_close(final(result)["conv.weight"], expected, rtol=0, atol=1e-5)


def test_a_client_that_lost_its_copy_gets_the_whole_model_in_the_same_round() -> None:
    class Forgetful(Faulty):
        def reply_of_client(self, message: Message, context: Context) -> Message:
            if context.node_id == 2 and message.content["config"]["server-round"] == 3 and not self.forgot:
                self.forgot = True
                context.state = RecordDict()
            self.wholes += len(message.content["arrays"]) > 1
            return super().reply_of_client(message, context)

    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), download="co3")
    server, results = serve(strategy, 4)
    grid = Forgetful(adding_client([flower.compress("co3")]), 3, lambda reply: reply)
    grid.forgot, grid.wholes = False, 0
    one_process.run_on(grid, server)
    stats = strategy.stats()["train"]
    assert grid.forgot and grid.wholes == 4  # one for each at first, and one more
    assert stats["messages"] == stats["replies"] == 13 and not stats["rejected"]
    assert len(results[0].train_metrics_clientapp) == 4


def test_models_for_single_clients_go_out_whole() -> None:
    class Personal(FedAvg):
        def configure_train(self, server_round, model, config, grid):  # type: ignore[no-untyped-def]
            for message in super().configure_train(server_round, model, config, grid):
                personal = {name: arrays.array(t) for name, t in arrays.tensors(model).items()}
                content = {**message.content, "arrays": ArrayRecord(personal)}
                yield with_records(message, content)

    strategy = flower.Compressed(Personal(fraction_evaluate=0.0), download="co3")
    run(strategy, adding_client([flower.compress("co3")]))
    stats = strategy.stats()["train"]
    assert not stats["rejected"] and stats["download_bytes"] > stats["dense_download_bytes"]


def test_recipes_that_do_not_go_down() -> None:
    with pytest.raises(SpecError, match="qsgd is not for downloads"):
        flower.Compressed(FedAvg(), download="qsgd")


# ── budgets ──


@pytest.mark.parametrize("budget", [5000, 3000, 2600])
def test_no_reply_is_above_its_budget(budget: int) -> None:
    lengths: list[int] = []

    def measure(reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            assert not reply.has_error(), reply.error
            lengths.append(message_bytes(reply))
        return reply

    strategy = flower.Compressed(FedAvg())
    client = adding_client([flower.compress("co3", budget=budget)])
    run(strategy, client, rounds=5, fault=measure)
    assert len(lengths) == 15 and max(lengths) <= budget
    assert budget > 4000 or max(lengths) > 0.8 * budget


def test_a_node_may_have_a_budget_of_its_own() -> None:
    lengths: dict[int, list[int]] = {1: [], 2: []}

    class Nodes(Faulty):
        def reply_of_client(self, message: Message, context: Context) -> Message:
            if context.node_id == 2:
                context.node_config["upload-budget"] = "3kB"
            reply = super().reply_of_client(message, context)
            lengths[context.node_id].append(message_bytes(reply))
            return reply

    server, _ = serve(flower.Compressed(FedAvg(fraction_evaluate=0.0)), 3)
    one_process.run_on(Nodes(adding_client([flower.compress("co3")]), 2, lambda reply: reply), server)
    assert max(lengths[2]) <= 3000 < min(lengths[1])


def test_a_budget_that_cannot_be_kept_sends_an_error() -> None:
    reasons: list[str] = []

    def look(reply: Message) -> Message:
        if reply.has_error():
            reasons.append(reply.error.reason)
        return reply

    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    run(strategy, adding_client([flower.compress("co3", budget="1kB")]), rounds=1, fault=look)
    assert len(reasons) == 3 and all("budget" in reason for reason in reasons)
    reasons.clear()  # a server that does not understand frames would get the whole model
    run(FedAvg(fraction_evaluate=0.0), adding_client([flower.compress("co3", budget="5kB")]), rounds=1, fault=look)
    assert len(reasons) == 3 and all("its budget" in reason for reason in reasons)


def test_a_bad_budget_is_told_at_once() -> None:
    with pytest.raises(SpecError, match="200kB"):
        flower.compress("co3", budget="a lot")


# ── rates ──


def instructions(rate: object, rounds: int = 4) -> list[str]:
    seen: list[str] = []

    class Listening(Faulty):
        def reply_of_client(self, message: Message, context: Context) -> Message:
            if context.node_id == 1 and message.metadata.message_type == "train":
                seen.append(message.content[NOTE]["rate"])
            return super().reply_of_client(message, context)

    strategy = flower.Compressed(FedAvg(), rate=rate)
    server, _ = serve(strategy, rounds)
    one_process.run_on(Listening(adding_client([flower.compress("co3")]), 3, lambda reply: reply), server)
    assert not strategy.stats()["train"]["rejected"]
    return seen


def test_adaquantfl_follows_the_loss_that_clients_report() -> None:
    # The clients' loss in round r is 1/r: s = ⌈2·√r⌉ for the next.
    assert instructions(flower.AdaQuantFL()) == [f"qsgd:levels={2 * s + 1}" for s in (2, 2, 3, 4)]


def test_feddq_by_name() -> None:
    assert instructions("feddq:resolution=0.01", rounds=1) == ["feddq:resolution=0.01"]


def test_a_loss_that_nobody_reports_is_told(caplog: pytest.LogCaptureFixture) -> None:
    instructions(flower.AdaQuantFL(loss="valid_loss"))  # it ends no training: the first client may be a hostile one
    assert caplog.text.count("Name one that they do, of num-examples, train_loss") == 1
