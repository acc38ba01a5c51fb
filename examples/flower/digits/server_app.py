"""The server: it averages the models of the clients, and evaluates the mean after each round."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import gradwire.flower
from digits.task import Net, load_centralized_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the training, and print what was sent."""
    config = context.run_config
    strategy = gradwire.flower.Compressed(FedAvg(fraction_evaluate=config["fraction-evaluate"]))
    for_clients = {name: config[name] for name in ("local-epochs", "batch-size", "lr")}
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord(for_clients),
        evaluate_config=ConfigRecord(for_clients),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    print("gradwire:", strategy.stats()["train"])  # bytes of Flower's messages


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the mean model on images of the server."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loss, accuracy = test(model, load_centralized_data(), device)
    return MetricRecord({"accuracy": accuracy, "loss": loss})
