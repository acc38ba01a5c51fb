"""Several messages to one client at once, statistics without loss, files of old trainings, and secure aggregation."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from gradwire import GradwireError, SpecError, flower
from gradwire.cli import launch_workers
from gradwire.flower.client.folder_store import FolderStore
from gradwire.flower.one_process import RUN
from gradwire.flower.shared import update
from gradwire.flower.shared.message import NO_MEMORY, SECURE_AGGREGATION
from support.flower_apps import Faulty, adding_client, changed_update, resealed, run, start_model


@pytest.fixture(autouse=True)
def identity() -> None:
    """What Flower needs to make messages outside of an app."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SUPERLINK_NODE_ID, RUN


def test_two_messages_at_once_send_the_memory_once() -> None:
    """The sum of all that arrives, with what is left in the memory, is the sum of all changes."""
    same = torch.linspace(-0.01, 0.01, 5200).view(40, 130)
    tokens: list[bytes] = []

    def note(reply: Message) -> Message:
        tokens.append(bytes(reply.content["arrays"]["gradwire"].data[8:16]))
        return reply

    client = adding_client([flower.compress("topk:p=0.1,decay=1")], change=lambda *_: {"conv.weight": same})
    grid = flower.Wire(Faulty(client, 1, note))
    record, arrived = ArrayRecord(start_model()), torch.zeros(40, 130)

    def send(count: int) -> None:
        content = RecordDict({"arrays": record, "config": ConfigRecord({"server-round": 1})})
        for reply in grid.send_and_receive([Message(content, 1, "train") for _ in range(count)]):
            arrived.add_(reply.content["arrays"].to_torch_state_dict()["conv.weight"] - start_model()["conv.weight"])

    send(1)
    first = arrived.clone()
    left_out = same - first
    arrived.zero_()
    send(2)  # one with what the first left out, and one without
    assert [token == NO_MEMORY for token in tokens] == [False, False, True]
    memory = same + left_out
    threshold = memory.abs().flatten().kthvalue(5200 - 520).values
    torch.testing.assert_close(arrived - first, torch.where(memory.abs() > threshold, memory, 0.0), rtol=0.1, atol=2e-3)
    send(1)
    assert tokens[-1] != NO_MEMORY


def test_a_client_that_sends_its_memory_unasked_is_rejected() -> None:
    def old_client(reply: Message) -> Message:
        return changed_update(reply, resealed(lambda data: data[:8] + b"12345678" + data[16:]))

    grid = flower.Wire(Faulty(adding_client([flower.compress("co3")]), 1, old_client))
    content = RecordDict({"arrays": ArrayRecord(start_model()), "config": ConfigRecord({"server-round": 1})})
    replies = list(grid.send_and_receive([Message(content, 1, "train"), Message(content, 1, "train")]))
    assert [reply.has_error() for reply in replies] == [False, True]
    assert "at the same time" in replies[1].error.reason


@pytest.mark.parametrize(
    ("spec", "exact"),
    [
        ("none", True),
        ({"*": "none"}, True),
        ({"fc*": "co3", "*": "none"}, True),
        ("co3", False),
        ({"bn*": "co3", "*": "none"}, False),
    ],
)
def test_running_statistics_lose_nothing_under_none(spec: Any, exact: bool) -> None:
    model = {"bn.running_mean": torch.zeros(40), "fc.weight": torch.zeros(5, 5)}
    differences = {name: torch.linspace(0.1, 0.9, t.numel()).view(t.shape) for name, t in model.items()}
    decoded = update.decode(update.encode(differences, {}, list(model), spec).data, model)
    assert torch.equal(decoded["bn.running_mean"], differences["bn.running_mean"]) == exact


def test_a_new_training_removes_what_is_left_of_old_ones(tmp_path: Path) -> None:
    def store(number: int, client: str, days: float) -> Path:
        kept = FolderStore(tmp_path, bytes([number]) * 8, client)
        kept.write("settled", {"a": 1})
        os.utime(kept.folder / "settled.pt", (time.time() - days * 86400,) * 2)
        return kept.folder

    mine, recent, others, old = store(1, "me", 2), store(2, "me", 0.5), store(3, "you", 2), store(4, "they", 8)
    FolderStore(tmp_path, bytes(8), "me")
    assert [folder.exists() for folder in (mine, recent, others, old)] == [False, True, True, False]


def test_secure_aggregation_is_refused_with_the_reason() -> None:
    with pytest.raises(SpecError, match="masked integers"):
        flower.Compressed(SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))  # type: ignore[arg-type]
    content = RecordDict({SECURE_AGGREGATION: ConfigRecord({"stage": "setup"})})
    message = Message(content, 1, "train")
    with pytest.raises(GradwireError, match="masked integers"):
        flower.compress("co3")(message, Context(1, 1, {}, RecordDict(), {}), lambda *_: pytest.fail("called"))


@pytest.mark.parametrize("first", [True, False])
def test_the_mod_of_secure_aggregation_under_compressed(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    mods = [flower.compress("co3"), secaggplus_mod]
    with caplog.at_level("INFO", "flwr"):
        strategy = flower.Compressed(FedAvg(fraction_evaluate=0.0))
        run(strategy, adding_client(mods if first else mods[::-1]), rounds=1)
    assert "masked integers" in caplog.text


def test_many_workers_are_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Started(Exception):
        pass

    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(launch_workers, "_start", start)
    from gradwire.tasks.settings import Settings

    fields: dict[str, Any] = dict.fromkeys(Settings.__dataclass_fields__)
    with pytest.raises(Started):
        launch_workers.launch(Settings(**fields), 10_000)
    assert "starting 10000 workers on" in capsys.readouterr().err
