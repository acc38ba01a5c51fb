"""One federated run on the server's side: its rounds and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from gradwire.catalogue.parse_recipe import recipe
from gradwire.checkpoints import run_file
from gradwire.flower import Compressed
from gradwire.tasks.base import evaluation_sums
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.federated.strategy import OnFailure, SeededFedAvg
from gradwire.tasks.training import own_device

OnRound = Callable[[dict[str, float]], None]  # gets the entry of the history for this round


class FederatedRun:
    """One run: a task trained by federated averaging with one codec, and the history of its rounds.

    The server app calls `serve` once, in its own thread, which also calls `on_round` and `on_failure`; `figures` is for
    afterwards.
    """

    def __init__(
        self, settings: FederatedSettings, codec: str, on_round: OnRound | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.codec = settings, codec
        self.on_round: OnRound = on_round or (lambda figures: None)
        self.on_failure: OnFailure = on_failure or (lambda server_round, client, reason: None)
        self.history: list[dict[str, float]] = []
        torch.manual_seed(settings.seed)
        self.model = settings.load().build_model()
        settings.examples_of(0)  # raises the error of a bad partition here rather than on every client

    def serve(self, grid: Grid, nodes: Sequence[int], message_type: str) -> None:
        """Run all rounds. `nodes` are the node ids of the clients, in the order of their numbers."""
        self._strategy = SeededFedAvg(self.settings, nodes, message_type, self.on_failure)
        self._compressed = Compressed(self._strategy, download=self.settings.download, rate=self.settings.rate)
        self._compressed.start(
            grid=grid,
            initial_arrays=ArrayRecord(self.model.state_dict()),
            num_rounds=self.settings.rounds,
            evaluate_fn=self._evaluate,
        )

    def figures(self) -> dict[str, Any]:
        """Return the results and their cost. Bytes are those of whole Flower messages, as they travelled."""
        traffic, strategy = self._traffic(), self._strategy
        mean_up, mean_down = (
            traffic["upload_bytes"] / traffic["replies"], traffic["download_bytes"] / traffic["messages"]
        )  # fmt: skip
        return {
            "codec": self.settings.rate or self.codec,
            "spec": self.settings.rate or str(recipe(self.codec)),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "digest": run_file.digest(self.model),
            "history": self.history,
            **{name: traffic[name] for name in ("messages", "replies", "upload_bytes", "download_bytes")},
            "upload_per_client": mean_up,
            "download_per_client": mean_down,
            "raw_upload_per_client": strategy.raw_upload,
            "raw_download_per_client": strategy.raw_download,
            "upload_ratio": strategy.raw_upload / mean_up,
            "download_ratio": strategy.raw_download / mean_down,
            "rejected": strategy.failed,
            "seconds_per_round": sum(strategy.seconds) / len(strategy.seconds),
        }

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % self.settings.evaluate_every and server_round < self.settings.rounds:
            return None
        task = self.settings.load()
        self.model.load_state_dict(arrays.to_torch_state_dict())
        model = self.model.to(own_device(self.settings.device))
        loss, right, decisions = evaluation_sums(task, model, rank=0, workers=1).tolist()
        self.model.cpu()
        metrics = task.metrics(loss / decisions, right / decisions)
        traffic = self._traffic()
        seconds = self._strategy.seconds[-1] if server_round else 0.0
        cumulative = {name: traffic.get(name, 0) for name in ("upload_bytes", "download_bytes")}
        self.history.append({"round": server_round, **metrics, **cumulative, "seconds": seconds})
        self.on_round(self.history[-1])
        return MetricRecord({**metrics})

    def _traffic(self) -> dict[str, int]:
        return self._compressed.stats().get("train", {})
