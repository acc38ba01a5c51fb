"""The client app: a client trains some epochs over its own examples, starting from the model that it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from gradwire.errors import GradwireError
from gradwire.flower import compress
from gradwire.tasks.example_order import derived_seed
from gradwire.tasks.federated.gradients import BatchGradients, gradients_for
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.training import learning_rate_factor

Answer = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Answer], Message]


def client_app(runs: Sequence[tuple[FederatedSettings, str]]) -> ClientApp:
    """Return the client app of several runs, each with its settings and codec; the server's messages name the run.

    It holds no data, since engines copy it with every message: the process that trains loads them.
    """
    app = ClientApp()
    app.query()(number)
    for i, (settings, codec) in enumerate(runs):
        app.train(action(i), mods=mods(settings, codec))(LocalTraining(settings))
    return app


def action(run: int) -> str:
    """Return the name of a run behind the message type, by which Flower chooses the training function."""
    return f"run{run}"


def mods(settings: FederatedSettings, codec: str) -> list[Mod]:
    """Return the mods of a run. Without compression of any kind, gradwire's is not among them."""
    if codec == "none" and not (settings.download or settings.budget or settings.rate):
        return [failures_in_one_line]
    return [failures_in_one_line, compress(codec, budget=settings.budget)]


def failures_in_one_line(message: Message, context: Context, answer: Answer) -> Message:
    """Answer with a short error if the client raises one: Flower would send the page that Ray makes of it."""
    try:
        return answer(message, context)
    except Exception as error:
        reason = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def number(message: Message, context: Context) -> Message:
    """Answer with the number of this client, which says which part of the data it has: node ids are random."""
    metrics = MetricRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


class LocalTraining:
    """The training function: it answers the server's message with the model after this client's training."""

    def __init__(self, settings: FederatedSettings) -> None:
        self.settings = settings

    def __call__(self, message: Message, context: Context) -> Message:
        """Train from the model in the message, and reply with the model and the metrics."""
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        client = int(context.node_config["partition-id"])
        arrays, config = message.content.array_records["arrays"], message.content.config_records["config"]
        gradients = gradients_for(self.settings)
        gradients.load(arrays.to_torch_state_dict())
        loss = self.train(gradients, client, int(str(config["server-round"])))
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(self.settings.examples_of(client))})
        return Message(RecordDict({"arrays": ArrayRecord(gradients.state()), "metrics": metrics}), reply_to=message)

    def train(self, gradients: BatchGradients, client: int, server_round: int) -> float:
        """Train, and return the mean loss over the last epoch.

        Momentum starts at zero in every round, since it is not sent.
        """
        settings = self.settings
        task, device = settings.load(), gradients.device
        examples = torch.from_numpy(settings.examples_of(client))
        lr = settings.lr * learning_rate_factor(server_round - 1, settings.rounds)
        optimizer = task.build_optimizer(gradients.model, lr)
        generator = torch.Generator("cpu").manual_seed(derived_seed(settings.seed, client, server_round))
        # The sum stays on the device until the end: reading it would wait for the GPU.
        total = torch.zeros((), dtype=torch.float32, device=device)
        for _ in range(settings.local_epochs):
            order = examples[torch.randperm(len(examples), generator=generator, device="cpu")]
            inputs, targets = (part.to(device) for part in task.train_batch(order, generator))
            total.zero_()
            for x, y in zip(*(torch.split(part, settings.batch_size) for part in (inputs, targets)), strict=True):
                loss = gradients(x, y)
                optimizer.step()
                total += loss * len(y)
        return total.item() / len(examples)
