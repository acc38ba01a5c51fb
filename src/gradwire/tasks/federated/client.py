"""A client: some epochs over its own examples, from the model it receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from gradwire.errors import GradwireError
from gradwire.flower import compress
from gradwire.tasks.example_order import derived_seed
from gradwire.tasks.federated.gradients import Gradients, gradients_for
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.training import learning_rate_factor

Answer = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Answer], Message]


def client_app(runs: Sequence[tuple[FederatedSettings, str]]) -> ClientApp:
    """Of several runs, with a codec each; the server names the run. Light, since engines copy it with every message:
    data are loaded where it runs."""
    app = ClientApp()
    app.query()(number)
    for i, (settings, codec) in enumerate(runs):
        app.train(action(i), mods=mods(settings, codec))(LocalTraining(settings))
    return app


def action(run: int) -> str:
    """What Flower calls the different things that an app may do with messages of one type."""
    return f"run{run}"


def mods(settings: FederatedSettings, codec: str) -> list[Mod]:
    """Without compression of any kind, updates are left to Flower."""
    if codec == "none" and not (settings.download or settings.budget or settings.rate):
        return [failures_in_one_line]
    return [failures_in_one_line, compress(codec, budget=settings.budget)]


def failures_in_one_line(message: Message, context: Context, answer: Answer) -> Message:
    """Flower would send the page that Ray makes of it."""
    try:
        return answer(message, context)
    except Exception as error:
        reason = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def number(message: Message, context: Context) -> Message:
    """Which part of the data this client has: node ids are random."""
    own = MetricRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"metrics": own}), reply_to=message)


class LocalTraining:
    """Answers the server's message of a round with the model after this client's training."""

    def __init__(self, settings: FederatedSettings) -> None:
        self.settings = settings

    def __call__(self, message: Message, context: Context) -> Message:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        client = int(context.node_config["partition-id"])
        arrays, config = message.content.array_records["arrays"], message.content.config_records["config"]
        gradients = gradients_for(self.settings)
        gradients.load(arrays.to_torch_state_dict())
        loss = self.train(gradients, client, int(str(config["server-round"])))
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(self.settings.examples_of(client))})
        return Message(RecordDict({"arrays": ArrayRecord(gradients.state()), "metrics": metrics}), reply_to=message)

    def train(self, gradients: Gradients, client: int, server_round: int) -> float:
        """The mean loss over the last epoch. Momentum starts anew in every round: it is not sent."""
        settings = self.settings
        task, device = settings.load(), gradients.device
        examples = torch.from_numpy(settings.examples_of(client))
        lr = settings.lr * learning_rate_factor(server_round - 1, settings.rounds)
        optimizer = task.build_optimizer(gradients.model, lr)
        generator = torch.Generator().manual_seed(derived_seed(settings.seed, client, server_round))
        total = torch.zeros((), device=device)  # read once, at the end: a GPU would be waited for
        for _ in range(settings.local_epochs):
            order = examples[torch.randperm(len(examples), generator=generator)]
            inputs, targets = (part.to(device) for part in task.train_batch(order, generator))
            total.zero_()
            for x, y in zip(inputs.split(settings.batch_size), targets.split(settings.batch_size), strict=True):
                loss = gradients(x, y)
                optimizer.step()
                total += loss * len(y)
        return total.item() / len(examples)
