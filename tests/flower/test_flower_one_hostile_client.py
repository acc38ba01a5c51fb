"""One client that wants to end, replace or dominate a training: alone in its round, one of two, or one of many."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)

import gradwire
from gradwire import SpecError, flower
from gradwire.flower.server.layout_vote import Layout, LayoutVote
from gradwire.flower.server.limits import Limit
from gradwire.flower.server.round_limits import ReplySize, RoundLimits
from gradwire.flower.shared.message import with_records
from support import odd_defaults
from support.cases import for_each
from support.flower_apps import adding_client, changed_update, final, one_frame, run, start_model

Fault = Callable[[Message], Message]
HOSTILE = 2  # a node id
FLOATS = {name: t for name, t in start_model().items() if t.dtype == torch.float32 and t.dim() and t.numel()}


def floats_client(mods: list[Any]) -> ClientApp:
    """A client of models without integers, which some strategies cannot handle."""
    app = ClientApp(mods=mods)

    @app.train()
    @odd_defaults.ordinary()
    def train(message: Message, context: Context) -> Message:
        model = {name: t + 0.01 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1.0})}), reply_to=message)

    return app


def by_hostile(fault: Fault, kind: str = "train", node: int = HOSTILE) -> Fault:
    def change(reply: Message) -> Message:
        here = reply.metadata.src_node_id == node and reply.metadata.message_type == kind
        return fault(reply) if here and not reply.has_error() else reply

    return change


def records(**changes: object) -> Fault:
    return lambda reply: with_records(reply, {k: v for k, v in {**reply.content, **changes}.items() if v is not None})


def metrics(**changes: object) -> Fault:
    usual = {"train_loss": 1.0, "num-examples": 1.0}
    return records(metrics=MetricRecord({**usual, **{k.replace("_e", "-e"): v for k, v in changes.items()}}))


def raw(arrays: dict[str, Any]) -> Fault:
    return records(arrays=ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()}))


def model_with(**changes: Any) -> dict[str, Any]:
    names = {name.replace(".", "_"): name for name in start_model()}
    model = {name: tensor.numpy() for name, tensor in start_model().items()}
    return {**model, **{names.get(key, key): value for key, value in changes.items()}}


def with_metadata(**changes: object) -> Fault:
    def change(reply: Message) -> Message:
        reply.metadata.__dict__.update({f"_{name}": value for name, value in changes.items()})
        return reply

    return change


def update_of(value: float, name: str = "conv.weight", entries: int = 5200) -> Fault:
    frame = gradwire.codec("none").encode(torch.full((entries,), value))
    return lambda reply: changed_update(reply, one_frame(name, frame))


# Whatever the other replies of the round are, these are rejected.
UNUSABLE: dict[str, Fault] = {
    "another MetricRecord": records(more=MetricRecord({"x": 1.0})),
    "the same metrics twice": records(more=MetricRecord({"train_loss": 1.0, "num-examples": 1.0})),
    "no MetricRecord": records(metrics=None),
    "no weight": records(metrics=MetricRecord({"train_loss": 1.0})),
    "a negative weight": metrics(num_examples=-1.0),
    "a weight of NaN": metrics(num_examples=float("nan")),
    "an infinite weight": metrics(num_examples=float("inf")),
    "a weight of 2^62": metrics(num_examples=2**62),
    "a list of weights": metrics(num_examples=[1.0]),
    "another ArrayRecord": records(more=ArrayRecord({"x": Array(np.zeros(3, "f4"))})),
    "no arrays": records(arrays=None),
    "no record at all": lambda reply: with_records(reply, {}),
    "an empty model": raw({}),
    "another model": raw({"backdoor": np.ones(3, "f4")}),
    "one array more": raw(model_with(backdoor=np.ones(3, "f4"))),
    "one array less": raw({n: a for n, a in model_with().items() if n != "mask"}),
    "another shape": raw(model_with(scalar=np.zeros(5, "f4"))),
    "another shape of an integer": raw(model_with(bn_num_batches_tracked=np.zeros(5, "i8"))),
    "complex numbers": raw(model_with(scalar=np.zeros((), "c8"))),
    "text": raw(model_with(scalar=np.array("a"))),
    "raw NaN": raw(model_with(bn_weight=np.full(40, np.nan, "f4"))),
    "NaN of a type that torch does not know": raw(model_with(bn_weight=np.full(40, np.nan, np.longdouble))),
    "a type that torch does not know": raw(model_with(bn_weight=np.ones(40, np.longdouble))),
    "a type that no frame holds": raw(model_with(bn_weight=np.ones(40, "u8"))),
    "another byte order": raw(model_with(bn_weight=np.ones(40, ">f4"))),
    "another message type": with_metadata(message_type="evaluate"),
    "a type of its own": with_metadata(message_type="system"),
    "another client": with_metadata(src_node_id=1),
}


@for_each("what", UNUSABLE)
def test_alone_in_its_round_it_cannot_touch_the_model(what: str) -> None:
    strategy = flower.Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0))
    fault = UNUSABLE[what] if what != "another client" else with_metadata(src_node_id=7)
    result, _ = run(strategy, adding_client([flower.compress("co3")]), clients=1, rounds=2, fault=fault)
    assert not result.arrays or unchanged(result)
    assert sum(traffic["rejected"] for traffic in strategy.stats().values()) == 2


@for_each("what", UNUSABLE)
def test_one_of_two_is_left_out(what: str) -> None:
    def trained(fault: Fault) -> dict[str, torch.Tensor]:
        strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
        client = adding_client([flower.compress("co3")])
        return final(run(strategy, client, clients=2, rounds=2, fault=by_hostile(fault))[0])

    result, without = trained(UNUSABLE[what]), trained(lambda reply: Message(Error(5, "lost"), reply_to=reply))
    assert all(torch.equal(tensor, without[name]) for name, tensor in result.items())


def unchanged(result: Any) -> bool:
    model = final(result)
    return model.keys() == start_model().keys() and all(
        torch.equal(model[name], torch.atleast_1d(tensor)) for name, tensor in start_model().items()
    )


@pytest.mark.parametrize("key", ["other", "arrays"])
@pytest.mark.parametrize("metric", [{"x": 1.0}, {"train_loss": [1.0, 2.0]}])
def test_one_of_two_with_other_metrics_costs_nobody_his_update(metric: dict[str, Any], key: str) -> None:
    fault = by_hostile(lambda reply: with_records(reply, {
        "other arrays": reply.content["arrays"],
        key: MetricRecord({**reply.content["metrics"], **metric}),
    }))  # fmt: skip
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    result, _ = run(strategy, adding_client([flower.compress("co3")]), clients=2, rounds=2, fault=fault)
    honest, _ = run(flower.Compressed(FedAvg(fraction_evaluate=0.0)), adding_client([flower.compress("co3")]), 2, 2)
    assert all(torch.equal(tensor, final(honest)[name]) for name, tensor in final(result).items())
    assert strategy.stats()["train"]["rejected"] == 0
    assert ("train_loss" in result.train_metrics_clientapp[2]) == ("x" in metric)


def test_the_majority_of_all_clients_so_far_decides_about_metrics() -> None:
    usual, odd = Layout("arrays", "metrics", frozenset({("a", None)})), Layout("arrays", "metrics", frozenset())
    vote = LayoutVote()
    assert vote.outvoted([(1, usual), (2, odd)]) == []  # nobody can tell
    assert vote.outvoted([(3, usual)]) == []
    assert vote.outvoted([(2, odd), (4, usual)]) == [0]
    assert vote.outvoted([(2, usual), (4, usual)]) == []


# ── influence ──

LIMITED: dict[str, tuple[dict[str, Any], Fault]] = {
    "1e17 by default": ({}, update_of(1e17)),
    "1e17 raw, by default": ({}, raw(model_with(conv_weight=np.full((40, 130), 1e17, "f4")))),
    "running statistics of 1e17": ({}, update_of(1e17, "bn.running_mean", 40)),
    "running statistics beside a number": ({"max_norm": 30.0}, update_of(1e17, "bn.running_mean", 40)),
    "a weight of 2^52 by default": ({}, metrics(num_examples=2**52)),
    "five times the median": ({"max_norm": "5x"}, update_of(0.1)),
    "a number": ({"max_norm": 3.0}, update_of(0.1)),
    "as integers": ({"max_norm": "5x"}, raw(model_with(conv_weight=np.full((40, 130), 100)))),
    "a weight by number": ({"max_weight": 10}, metrics(num_examples=11)),
    "a weight by the median": ({"max_weight": "10x"}, metrics(num_examples=60)),
}


@for_each("what", LIMITED)
def test_too_much_influence(what: str) -> None:
    options, fault = LIMITED[what]

    def trained(fault: Fault) -> dict[str, torch.Tensor]:
        nonlocal strategy
        strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), **options)
        client = adding_client([flower.compress("co3")])
        return final(run(strategy, client, clients=5, rounds=2, fault=by_hostile(fault))[0])

    strategy: flower.Compressed
    result = trained(fault)
    assert strategy.stats()["train"]["rejected"] == 2
    without = trained(lambda reply: Message(Error(5, "lost"), reply_to=reply))
    assert all(torch.equal(tensor, without[name]) for name, tensor in result.items())


def test_after_full_rounds_a_lone_reply_is_compared_with_them() -> None:
    class FirstAllThenOne(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
            messages = list(super().configure_train(server_round, arrays, config, grid))
            return messages if server_round == 1 else [m for m in messages if m.metadata.dst_node_id == HOSTILE]

    strategy = flower.Compressed(FirstAllThenOne(fraction_evaluate=0.0))
    later = by_hostile(lambda r: r if strategy.stats()["train"]["replies"] < 4 else update_of(1e17)(r))
    result, _ = run(strategy, adding_client([flower.compress("co3")]), clients=4, rounds=3, fault=later)
    assert strategy.stats()["train"]["rejected"] == 2 and final(result)["conv.weight"].abs().max() < 10


def test_one_that_is_often_alone_cannot_make_others_look_too_large() -> None:
    limits = RoundLimits("auto", "auto")
    for _ in range(100):
        limits.accept([ReplySize(HOSTILE, 1e-9, None, {})], "train")
    for node in (5, 6, 7):
        assert limits.too_large([ReplySize(node, 10.0, None, {})], "train") == {}
        limits.accept([ReplySize(node, 10.0, None, {})], "train")


@pytest.mark.parametrize("clients", [1, 2, 3, 10])
def test_no_honest_client_is_rejected(clients: int) -> None:
    """A model of zeros, a client with ten thousand times the examples and changes, and one that changes nothing."""

    def change(client: int, round_: int, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        size = {0: 100.0, 1: 0.0}.get(client, 0.01) / round_**3
        return {name: torch.full_like(t, size) for name, t in model.items() if t.is_floating_point()}

    def weight(client: int) -> int:
        return {0: 100_000, 1: 0}.get(client, 10)

    model = {**{n: torch.zeros_like(t) for n, t in start_model().items()}, "bn.running_var": torch.ones(40)}
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1))
    client = adding_client([flower.compress("co3")], weight=weight, change=change)
    run(strategy, client, clients=clients, model=model)
    assert strategy.stats()["train"]["rejected"] == 0


def test_honest_updates_are_not_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.flower.server.update_norm.UpdateNorm.measured", lambda *_: pytest.fail("decoded"))
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    run(strategy, adding_client([flower.compress("co3")]))
    assert strategy.stats()["train"]["rejected"] == 0


def test_counters_are_no_part_of_the_norm() -> None:
    """Flower turns the counter of batches into a float; it rises by more than any weight."""
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), max_norm=3.0)
    run(strategy, adding_client([flower.compress("co3")]), rounds=3)
    assert strategy.stats()["train"]["rejected"] == 0


@pytest.mark.parametrize("value", ["10", "x", "0.5x", -1, 0, float("nan"), float("inf"), True, "ten", [1], 10**400])
def test_what_is_no_limit(value: Any) -> None:
    with pytest.raises(SpecError, match="'10x' for ten times the median"):
        flower.Compressed(FedAvg(), max_norm=value)
    with pytest.raises(SpecError, match="max_weight="):
        flower.Compressed(FedAvg(), max_weight=value)


def test_limits_are_read() -> None:
    read = [Limit.parse("max_norm", value) for value in (None, "auto", "2.5x", 5)]
    assert [(limit.most, limit.times) for limit in read] == [
        (np.inf, np.inf), (np.inf, 1e6), (np.inf, 2.5), (5.0, np.inf)
    ]  # fmt: skip


# ── models with arrays that no frame holds ──

ODD = {"complex": torch.full((40, 50), 1 + 1j), "mask": torch.tensor([0.0, -np.inf]), "weight": torch.ones(40, 50)}


def of_odd(**changes: Any) -> dict[str, Any]:
    return {**{name: tensor.numpy() for name, tensor in ODD.items()}, **changes}


ODD_REPLIES: dict[str, dict[str, Any]] = {
    "complex NaN": of_odd(complex=np.full((40, 50), complex(0, np.nan), "c8")),
    "complex infinity": of_odd(complex=np.full((40, 50), complex(np.inf, 0), "c8")),
    "far away": of_odd(complex=np.full((40, 50), 1e17j, "c8")),
    "a real one far away": of_odd(weight=np.full((40, 50), 1e17, "f4")),
    "another complex type": of_odd(complex=np.ones((40, 50), "c16")),
    "no complex one": of_odd(complex=np.ones((40, 50), "f4")),
    "another mask": of_odd(mask=np.array([np.inf, np.nan], "f4")),
}


@for_each("what", ODD_REPLIES)
def test_one_hostile_client_of_a_model_that_travels_raw(what: str) -> None:
    app = ClientApp(mods=[flower.compress("co3")])

    @app.train()
    @odd_defaults.ordinary()
    def train(message: Message, context: Context) -> Message:
        model = {name: t + 0.01 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        records = {"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 1.0})}
        return Message(RecordDict(records), reply_to=message)

    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    fault = by_hostile(raw(ODD_REPLIES[what]))
    result, _ = run(strategy, app, clients=5, rounds=2, fault=fault, model=ODD)
    assert strategy.stats()["train"]["rejected"] == 2
    model = final(result)
    assert model["complex"].dtype == torch.complex64
    for name, tensor in ODD.items():
        torch.testing.assert_close(model[name], tensor + 0.02)


# ── evaluation, duplicates, other strategies ──

EVALUATIONS: dict[str, Fault] = {
    "NaN": records(metrics=MetricRecord({"sum": float("nan"), "num-examples": 1})),
    "infinities": records(metrics=MetricRecord({"sum": [1.0, float("inf")], "num-examples": 1})),
    "no weight": records(metrics=MetricRecord({"sum": 1.0})),
    "two records": records(more=MetricRecord({"sum": 1.0})),
    "nothing": lambda reply: with_records(reply, {}),
    "a weight of 2^62": records(metrics=MetricRecord({"sum": 1.0, "num-examples": 2**62})),
}


@for_each("clients", [1, 2, 4])
@for_each("what", EVALUATIONS)
def test_an_evaluation_goes_on_without_it(what: str, clients: int) -> None:
    strategy = flower.Compressed(FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1))
    node = HOSTILE if clients > 1 else 1
    fault = by_hostile(EVALUATIONS[what], "evaluate", node)
    result, _ = run(strategy, adding_client([flower.compress("co3")]), clients=clients, rounds=1, fault=fault)
    if clients > 1:
        assert np.isfinite(result.evaluate_metrics_clientapp[1]["sum"])
    assert sum(traffic["rejected"] for traffic in strategy.stats().values()) == 1


def test_a_second_reply_counts_no_second_time() -> None:
    class Twice(FedAvg):
        def start(self, grid, initial_arrays, **options):  # type: ignore[no-untyped-def]
            inner, push = grid.grid, grid.grid.send_and_receive
            inner.send_and_receive = lambda messages, **o: [r for reply in push(messages, **o) for r in (reply, reply)]
            return super().start(grid, initial_arrays, **options)

    strategy = flower.Compressed(Twice(fraction_evaluate=0.0))
    run(strategy, adding_client([]), rounds=2)  # clients without the mod, whose replies are raw
    assert strategy.stats()["train"]["rejected"] == 6


def test_arrays_in_another_order() -> None:
    """QFedAvg goes by the order of arrays, not by their names."""
    backwards = by_hostile(lambda r: records(arrays=ArrayRecord(dict(reversed(r.content["arrays"].items()))))(r))
    strategy = flower.Compressed(QFedAvg(client_learning_rate=0.1, fraction_evaluate=0.0))
    model = {"a": torch.zeros(3), "b": torch.ones(2, 5)}
    result, _ = run(strategy, floats_client([]), rounds=2, model=model, fault=backwards)
    assert strategy.stats()["train"]["rejected"] == 0 and final(result)["a"].shape == (3,)


@pytest.mark.parametrize("loss", [None, float("nan"), -1.0, 1e300, [1.0]])
def test_the_loss_that_qfedavg_computes_models_from(loss: Any) -> None:
    usual = {"num-examples": 1.0}
    fault = by_hostile(records(metrics=MetricRecord(usual if loss is None else {**usual, "train_loss": loss})))
    strategy = flower.Compressed(QFedAvg(client_learning_rate=0.1, q=2.0, fraction_evaluate=0.0))
    client = floats_client([flower.compress("co3")])
    result, _ = run(strategy, client, rounds=1, model=FLOATS, fault=fault)
    assert strategy.stats()["train"]["rejected"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in final(result).values())


def test_other_metrics_may_be_nan() -> None:
    """A client with too few examples to validate on says so; its update is sound."""
    fault = by_hostile(metrics(train_loss=float("nan")))
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    run(strategy, adding_client([flower.compress("co3")]), fault=fault)
    assert strategy.stats()["train"]["rejected"] == 0


def test_config_records_pass() -> None:
    fault = records(more=ConfigRecord({"note": "x"}))
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
    run(strategy, adding_client([flower.compress("co3")]), fault=fault)
    assert strategy.stats()["train"]["rejected"] == 0


def saved_trees(count: int = 1, **changes: Any) -> bytes:
    """What XGBoost saves, as far as Flower reads it, of a model with so many trees."""
    model = {
        "gbtree_model_param": {"num_trees": str(count), "num_parallel_tree": "1"},
        "trees": [{"id": number} for number in range(count)],
        "tree_info": [0] * count,
        "iteration_indptr": list(range(count + 1)),
        **changes,
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def of_trees(saved: bytes, name: str = "0") -> Fault:
    return records(arrays=ArrayRecord({name: Array(np.frombuffer(saved, "u1"))}))


NO_TREES: dict[str, Fault] = {
    "garbage": of_trees(b"\xff{nope"),
    "nothing": of_trees(b""),
    "other JSON": of_trees(b'{"learner": 5}'),
    "deep JSON": of_trees(b"[" * 100_000),
    "an endless number": of_trees(saved_trees(gbtree_model_param={"num_trees": 1e999, "num_parallel_tree": "1"})),
    "a number of 5000 digits": of_trees(saved_trees(gbtree_model_param={"num_trees": "9" * 5000})),
    "more trees than it has": of_trees(saved_trees(gbtree_model_param={"num_trees": "1", "num_parallel_tree": "2"})),
    "fewer trees than none": of_trees(saved_trees(gbtree_model_param={"num_trees": "1", "num_parallel_tree": "-1"})),
    "trees that are none": of_trees(saved_trees(trees=[5])),
    "no list of trees": of_trees(saved_trees(trees={"0": {}})),
    "no iterations": of_trees(saved_trees(iteration_indptr=[])),
    "iterations without numbers": of_trees(saved_trees(iteration_indptr=[0, "1"])),
    "no groups": of_trees(saved_trees(tree_info=5)),
}


@for_each("what", NO_TREES)
@for_each("first", [True, False])
def test_trees_that_cannot_be_added_are_left_out(first: bool, what: str) -> None:
    """Flower reads them with json.loads alone: what it does not find ended the training, or the next round."""
    strategy = flower.Compressed(FedXgbBagging(fraction_evaluate=0.0))
    honest = of_trees(saved_trees())
    model = {"0": torch.tensor(list(b"" if first else saved_trees()), dtype=torch.uint8)}
    result, _ = run(strategy, floats_client([]), 3, 2, lambda r: by_hostile(NO_TREES[what])(honest(r)), model=model)
    assert strategy.stats()["train"]["rejected"] == 2
    grown = json.loads(result.arrays["0"].numpy().tobytes())["learner"]["gradient_booster"]["model"]
    assert len(grown["trees"]) == int(grown["gbtree_model_param"]["num_trees"]) == (4 if first else 5)


def test_trees_may_grow() -> None:
    strategy = flower.Compressed(FedXgbBagging(fraction_evaluate=0.0))
    trees = of_trees(saved_trees())
    shrunk = records(arrays=ArrayRecord({"0": Array(np.zeros((2, 2), "u1"))}))
    model = {"0": torch.zeros(0, dtype=torch.uint8)}
    faults = [trees, by_hostile(shrunk)]
    run(strategy, floats_client([]), 2, 1, lambda r: faults[1](faults[0](r)), model=model)
    assert strategy.stats()["train"]["rejected"] == 1


def private(wrapper: Any, **options: Any) -> Any:
    inner = FedAvg(fraction_evaluate=0.0, weighted_by_key="weight")
    return wrapper(inner, noise_multiplier=0.01, num_sampled_clients=3, **options)


def test_differential_privacy_averages_too(caplog: pytest.LogCaptureFixture) -> None:
    """Its wrapper skips a round with an error; the strategy inside says what the weight is called."""

    def renamed(reply: Message) -> Message:
        values = {"train_loss": 1.0, "weight": 1.0}
        return with_records(reply, {**reply.content, "metrics": MetricRecord(values)})

    def hostile(reply: Message) -> Message:
        return with_records(renamed(reply), {**renamed(reply).content, "more": MetricRecord({"x": 1.0})})

    options: list[Any] = [
        (DifferentialPrivacyServerSideFixedClipping, {"clipping_norm": 5.0}),
        (DifferentialPrivacyServerSideAdaptiveClipping, {}),
    ]
    for wrapper, given in options:
        strategy = flower.Compressed(private(wrapper, **given))
        client = floats_client([flower.compress("co3")])
        run(strategy, client, rounds=1, model=FLOATS, fault=renamed)
        assert strategy.stats()["train"]["rejected"] == 0
        with caplog.at_level(logging.INFO, "flwr"):
            run(strategy, client, rounds=1, model=FLOATS, fault=lambda r: by_hostile(hostile)(renamed(r)))
        assert strategy.stats()["train"]["rejected"] == 1


STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: FedAvgM(server_momentum=0.5),
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedMedian": FedMedian,
    "FedTrimmedAvg": FedTrimmedAvg,
    "FedAdam": FedAdam,
    "FedAdagrad": FedAdagrad,
    "FedYogi": FedYogi,
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
    "Bulyan": lambda: Bulyan(num_malicious_nodes=0),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.1),
}


@for_each("name", STRATEGIES)
def test_a_round_in_which_all_are_rejected_leaves_the_model_alone(name: str) -> None:
    strategy = flower.Compressed(STRATEGIES[name]())
    everyone = records(metrics=MetricRecord({"train_loss": 1.0}))
    result, _ = run(strategy, adding_client([flower.compress("co3")]), rounds=2, fault=everyone)
    assert strategy.stats()["train"]["rejected"] == 6 and (not result.arrays or unchanged(result))


@for_each("name", STRATEGIES)
def test_under_every_strategy_a_hostile_client_is_left_out(name: str) -> None:
    strategy = flower.Compressed(STRATEGIES[name]())
    client = floats_client([flower.compress("co3")])
    fault = by_hostile(records(more=MetricRecord({"x": 1.0})))
    run(strategy, client, clients=4, rounds=2, fault=fault, model=FLOATS)
    assert strategy.stats()["train"]["rejected"] == 2
