"""Flower apps in which gradwire is not where it should be: each is told what to change."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)

from gradwire import GradwireError, SpecError, flower
from gradwire.flower.client import mod
from support import odd_defaults
from support.flower_apps import adding_client, run, start_model


def private(strategy: Any, kind: Any = DifferentialPrivacyServerSideFixedClipping) -> Any:
    return kind(strategy, noise_multiplier=0.01, clipping_norm=5.0, num_sampled_clients=3)


def app_of(inner: ClientApp, mods: list[Any], train_mods: list[Any]) -> ClientApp:
    """The functions of an app under other mods."""
    app = ClientApp(mods=mods)

    @app.train(mods=train_mods)
    def train(message: Message, context: Context) -> Message:
        return inner(message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return inner(message, context)

    return app


@pytest.mark.parametrize("strategy", ["co3", FedAvg])
def test_only_strategies_can_be_compressed(strategy: Any) -> None:
    with pytest.raises(SpecError, match=r"flwr\.serverapp\.strategy, such as FedAvg\(\)"):
        flower.Compressed(strategy)


def test_a_folder_is_a_path() -> None:
    """Not found out by every client in every round."""
    with pytest.raises(SpecError, match="folder is the path of a folder for the error memory, not 5"):
        flower.compress("co3", folder=5)  # type: ignore[arg-type]


def test_once_is_enough() -> None:
    with pytest.raises(SpecError, match="already"):
        flower.Compressed(flower.Compressed(FedAvg()))


def test_a_rate_that_is_none() -> None:
    with pytest.raises(SpecError, match="AdaQuantFL"):
        flower.Compressed(FedAvg(), rate=flower.compress("co3"))  # type: ignore[arg-type]


def test_another_strategy_around_it() -> None:
    with pytest.raises(GradwireError, match="outermost"):
        run(private(flower.Compressed(FedAvg())), adding_client([flower.compress("co3")]))


def test_clipping_by_clients_does_not_bound_what_arrives() -> None:
    with pytest.raises(SpecError, match="DifferentialPrivacyServerSide"):
        flower.Compressed(private(FedAvg(), DifferentialPrivacyClientSideFixedClipping))


def test_flowers_differential_privacy_inside() -> None:
    model = {name: tensor for name, tensor in start_model().items() if tensor.dtype == torch.float32 and tensor.dim()}

    def answer(message: Message, context: Context) -> Message:
        records = {"metrics": MetricRecord({"num-examples": 1})}
        if message.metadata.message_type == "train":
            received = message.content["arrays"].to_torch_state_dict()
            records |= {"arrays": ArrayRecord({name: tensor + 0.01 for name, tensor in received.items()})}
        return Message(RecordDict(records), reply_to=message)

    client = app_of(answer, [flower.compress("co3")], [LocalDpMod(5.0, 5.0, 1e6, 1e-5)])  # type: ignore[arg-type]
    strategy = flower.Compressed(private(FedAvg()), download="co3")
    run(strategy, client, rounds=2, model=model)
    stats = strategy.stats()
    assert stats["train"]["rejected"] == 0 and stats["train"]["upload_bytes"] < stats["train"]["dense_upload_bytes"] / 4
    assert stats["evaluate"]["replies"] == 6


def test_a_mod_of_the_training_function_alone(caplog: pytest.LogCaptureFixture) -> None:
    client = app_of(adding_client([]), [], [flower.compress("co3")])
    with caplog.at_level(logging.INFO, "flwr"):
        run(flower.Compressed(FedAvg(), download="co3"), client)
    assert "ClientApp(mods=[…]), not to its training function alone" in caplog.text


def test_no_client_with_the_mod(caplog: pytest.LogCaptureFixture) -> None:
    run(flower.Compressed(FedAvg()), adding_client([]))
    assert caplog.text.count("is gradwire.flower.compress a mod of the app?") == 1
    caplog.clear()
    run(flower.Compressed(FedAvg()), adding_client([flower.compress("co3")]))
    assert "a mod of the app?" not in caplog.text


def test_patterns_that_match_nothing_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mod, "_warnings_given", set())
    spec = {"layers.*": "co3", "*": "none"}
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), download={"layer?.*": "co3", "*": "bf16"})
    run(strategy, adding_client([flower.compress(spec)]), rounds=2)
    assert caplog.text.count("the pattern 'layers.*' matches no parameter") == 1
    assert caplog.text.count("download=: the pattern 'layer?.*' matches no parameter") == 1
    caplog.clear()
    run(flower.Compressed(FedAvg(fraction_evaluate=0.0)), adding_client([flower.compress({"bn*": "none", "*": "co3"})]))
    assert "matches no parameter" not in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: {name: t for name, t in model.items() if name != "mask"}, "'mask' is only in the model"),
        (lambda model: {**model, "more": torch.zeros(1)}, "'more' is only in the reply"),
        (lambda model: {**model, "scalar": torch.zeros(2)}, r"'scalar' has the shape (2,), not ()"),
        (lambda model: {**model, "mask": torch.zeros(3)}, "'mask' is float32, not bool"),
        (lambda model: {**model, "scalar": torch.tensor(1j)}, "'scalar' has a type that cannot be compressed"),
    ],
)
def test_replies_with_other_arrays_say_which(
    change: Any, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mod, "_warnings_given", set())
    app = ClientApp(mods=[flower.compress("co3")])

    @app.train()
    @odd_defaults.ordinary()
    def train(message: Message, context: Context) -> Message:
        model = change(message.content["arrays"].to_torch_state_dict())
        records = {"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(records), reply_to=message)

    run(flower.Compressed(FedAvg(fraction_evaluate=0.0)), app, rounds=1)
    assert said in caplog.text


def test_raw_uploads_have_the_dtypes_that_clients_began_with() -> None:
    model = {"weight": torch.zeros(100, 100)}
    app = ClientApp(mods=[flower.compress("co3")])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        changed = {name: t.float() + 0.01 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        records = {"arrays": ArrayRecord(changed), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(records), reply_to=message)

    strategy = flower.Compressed(FedAdam(eta=0.01, fraction_evaluate=0.0))
    result, _ = run(strategy, app, rounds=2, model=model)
    assert result.arrays["weight"].dtype == "float64"  # FedAdam's doing
    stats = strategy.stats()["train"]
    assert stats["dense_upload_bytes"] == 6 * (40_000 + 128)
    assert stats["dense_download_bytes"] == 3 * (40_000 + 128) + 3 * (80_000 + 128)
