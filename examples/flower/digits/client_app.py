"""The client: it trains the model that it is sent on its own images, and evaluates it on others of them."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

import gradwire.flower
from digits.task import Net, load_data
from digits.task import test as test_fn
from digits.task import train as train_fn

app = ClientApp(mods=[gradwire.flower.compress("co3")])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on this client's images."""
    model, device = received_model(msg)
    config = msg.content["config"]
    loader, _ = client_data(context, config["batch-size"])
    loss = train_fn(model, loader, config["local-epochs"], config["lr"], device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on this client's images."""
    model, device = received_model(msg)
    _, loader = client_data(context, msg.content["config"]["batch-size"])
    loss, accuracy = test_fn(model, loader, device)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


def received_model(msg: Message) -> tuple[Net, torch.device]:
    """Return the model that the server sent, and the device to use."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return model, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def client_data(context: Context, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return this client's images. Flower numbers clients in a simulation; otherwise their `--node-config` does."""
    return load_data(context.node_config["partition-id"], context.node_config["num-partitions"], batch_size)
