"""Flower apps for tests: clients that add known updates, and a server over a grid whose faults are ours."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Result, Strategy

from gradwire.flower import one_process
from support import odd_defaults

Model = dict[str, torch.Tensor]


@odd_defaults.ordinary()
def start_model() -> Model:
    """All kinds of tensors that a state_dict may hold."""
    generator = torch.Generator().manual_seed(0)
    return {
        "conv.weight": torch.randn(40, 130, generator=generator),
        "bn.weight": torch.ones(40),
        "bn.running_mean": torch.zeros(40),
        "bn.running_var": torch.ones(40),
        "bn.num_batches_tracked": torch.tensor(0),
        "double": torch.randn(7, 3, generator=generator, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(0.5),
    }


def drift(client: int, round_: int, model: Model) -> Model:
    """The update of a client in a round: a function of the two."""
    generator = torch.Generator().manual_seed(1000 * client + round_)
    update = {}
    for name, tensor in model.items():
        if tensor.is_floating_point():
            update[name] = 0.01 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    update["bn.running_var"].abs_()
    return update


def adding_client(
    mods: list[object], weight: Callable[[int], float] = lambda i: 1 + i, change: Callable[..., Model] = drift
) -> ClientApp:
    """A ClientApp that adds `drift` to what it gets, counts batches as batch normalization does, and reports."""
    app = ClientApp(mods=mods)  # type: ignore[arg-type]

    @app.train()
    @odd_defaults.ordinary()
    def train(message: Message, context: Context) -> Message:
        assert not mods or set(message.content) == {"arrays", "config"}, "what an app sees without gradwire"
        model = message.content["arrays"].to_torch_state_dict()
        client, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
        for name, update in change(client, round_, model).items():
            if name in start_model() and start_model()[name].is_floating_point():
                model[name] = model[name] + update
        model["bn.num_batches_tracked"] = torch.tensor(10 * round_ + client)
        metrics = MetricRecord({"train_loss": 1.0 / round_, "num-examples": weight(client)})
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        assert not mods or set(message.content) == {"arrays", "config"}
        norm = float(sum(a.numpy().astype(np.float64).sum() for a in message.content["arrays"].values()))
        metrics = MetricRecord({"sum": norm, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


class Faulty(one_process.OneProcess):
    """A grid on whose way replies are lost or changed."""

    def __init__(self, client: ClientApp, clients: int, fault: Callable[[Message], Message | None]):
        super().__init__(client, clients)
        self.fault = fault

    def reply_of_client(self, message: Message, context: Context) -> Message:
        reply = super().reply_of_client(message, context)
        with odd_defaults.ordinary():
            reply = self.fault(reply)
        return Message(Error(5, "lost"), reply_to=message) if reply is None else reply


def serve(strategy: Strategy, rounds: int = 3, model: Model | None = None, **options: object) -> tuple[ServerApp, list]:
    """A ServerApp, and the list that its result will be in."""
    app, results = ServerApp(), []

    @app.main()
    def main(grid: one_process.Grid, context: Context) -> None:
        initial = ArrayRecord(model or start_model())
        results.append(strategy.start(grid, initial, num_rounds=rounds, train_config=ConfigRecord(), **options))

    return app, results


def run(
    strategy: Strategy, client: ClientApp, clients: int = 3, rounds: int = 3,
    fault: Callable[[Message], Message | None] = lambda reply: reply, **options: object,
) -> tuple[Result, Faulty]:  # fmt: skip
    random.seed(0)  # by which Flower orders the clients
    server, results = serve(strategy, rounds, **options)
    grid = Faulty(client, clients, fault)
    one_process.run_on(grid, server)
    return results[0], grid


def final(result: Result) -> Model:
    return {name: torch.from_numpy(np.atleast_1d(a.numpy())) for name, a in result.arrays.items()}


def changed_update(reply: Message, change: Callable[[bytes], bytes]) -> Message:
    """The reply with other bytes in its update."""
    (key,) = (k for k, r in reply.content.items() if isinstance(r, ArrayRecord))
    data = change(reply.content[key]["gradwire"].data)
    content = {**reply.content, key: ArrayRecord({"gradwire": Array("uint8", (len(data),), "gradwire", data)})}
    return Message(content=RecordDict(content), metadata=reply.metadata)  # type: ignore[call-overload]


def one_client_is(fault):  # type: ignore[no-untyped-def]
    """The reply of node 2 is changed on its way."""

    def change(reply):  # type: ignore[no-untyped-def]
        bad = reply.metadata.src_node_id == 2 and reply.metadata.message_type == "train"
        return fault(reply) if bad else reply

    return change


def resealed(body):  # type: ignore[no-untyped-def]
    """Change what is behind the checksum, and repair it."""

    def change(data: bytes) -> bytes:
        data = body(data)
        return data[:4] + struct.pack("<I", zlib.crc32(data[8:])) + data[8:]

    return change


def one_frame(name: str, frame: bytes):  # type: ignore[no-untyped-def]
    """The update is this frame, said to be the difference of this tensor."""
    return resealed(lambda data: data[:24] + bytes([1, 2, list(start_model()).index(name)]) + frame)
