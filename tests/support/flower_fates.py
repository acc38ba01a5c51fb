"""One Flower client to which things happen: its replies are lost, it is killed or started anew."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from gradwire import flower
from gradwire.flower import one_process
from gradwire.flower.client.client_memory import ClientMemory
from gradwire.flower.client.folder_store import FolderStore
from support.flower_apps import Faulty, adding_client, drift, final, serve, start_model

NAME = "conv.weight"
RECIPE = dict.fromkeys(("*running_*", "*"), "stc:decay=1,small=same")
FATES = ("arrives", "lost", "killed before", "killed after", "restarted")


class Fates(Faulty):
    """One client; in round r its fate is fates[r − 1]."""

    def __init__(self, client: ClientApp, fates: list[str]):
        super().__init__(client, 1, lambda reply: reply)
        self.fates = fates
        self.arrived: list[int] = []

    def reply_of_client(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return super().reply_of_client(message, context)
        round_ = message.content["config"]["server-round"]
        fate = self.fates[round_ - 1]
        if fate == "killed before":
            return Message(Error(8, "killed"), reply_to=message)  # in training: nothing was written
        reply = super().reply_of_client(message, context)
        if fate in ("lost", "killed after"):
            return Message(Error(5, "lost"), reply_to=message)
        if fate == "restarted":  # with another node id, and without its context
            (node,) = self.contexts
            new = Context(1, node + 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
            self.contexts = {node + 1: new}
        self.arrived.append(round_)
        return reply


def lost_in_rounds(fates: list[str], folder: Path) -> float:
    """The largest entry that is neither in the model at the end nor in the client's memory, though it arrived."""
    strategy = flower.Compressed(FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0))
    grid = Fates(adding_client([flower.compress(RECIPE, folder=folder)], weight=lambda i: 1.0), fates)
    server, results = serve(strategy, len(fates))
    one_process.run_on(grid, server)
    model = start_model()
    expected = model[NAME] + sum(drift(0, r, model)[NAME] for r in grid.arrived)
    store = FolderStore(folder, strategy.wire.training, "partition-0")
    left = ClientMemory(store).settle(list(strategy.wire.accepted.values()))
    got = final(results[0])[NAME] if grid.arrived else model[NAME]
    return float((got + left.get(NAME, 0) - expected).abs().max())
