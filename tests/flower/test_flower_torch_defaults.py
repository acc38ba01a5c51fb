"""Models after some rounds do not depend on torch's default dtype, default device and modes, on either side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from gradwire import flower
from gradwire.flower import one_process
from support.cases import for_each
from support.flower_apps import final, serve
from support.helpers import bits, gradient
from support.torch_settings import SETTINGS, forget

MODEL = {
    "large": gradient(70_000, 1),
    "half": gradient(5000, 2).to(torch.float16),
    "double": gradient(100, 3).double(),
    "small": gradient(30, 4),
    "bn.running_var": gradient(30, 5).abs(),
    "count": torch.tensor(3),
}


def client(spec: str) -> ClientApp:
    app = ClientApp(mods=[flower.compress(spec)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content["arrays"].to_torch_state_dict()
        number, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
        for seed, (name, tensor) in enumerate(model.items()):
            if tensor.is_floating_point() and "var" not in name:
                change = gradient(tensor.numel(), 100 * seed + 10 * number + round_).view(tensor.shape)
                model[name] = tensor + change.to(tensor.dtype)
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 1 + number})
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)

    return app


def after_two_rounds(spec: str, download: str | None) -> dict[str, bytes]:
    strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0), download=download)
    server, results = serve(strategy, 2, MODEL)
    one_process.run(server, client(spec), 2)
    assert not strategy.stats()["train"]["rejected"]
    return {name: bits(tensor) for name, tensor in final(results[0]).items()}


@for_each("spec, download", [("co3", None), ("qsgd", "co3"), ("topk", None), ("ecq", "ecq")])
def test_rounds(spec: str, download: str | None) -> None:
    expected = after_two_rounds(spec, download)
    for name, setting in SETTINGS.items():
        if name == "numpy's errors":  # Flower's own mean may underflow
            continue
        forget()
        with setting():
            assert after_two_rounds(spec, download) == expected, name
