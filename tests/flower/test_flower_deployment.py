"""examples/flower in deployment on loopback: SuperLink, two SuperNodes and TLS, as docs/flower-deployment.md says."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
import tomllib

import pytest
import torch

from support.flower_fleet import ROOT, Fleet, commands

pytest.importorskip("flwr")
from gradwire.flower import one_process

EXAMPLE = ROOT / "examples" / "flower"


in_processes = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("openssl") is None,
    reason="finds its processes in /proc, and makes certificates with openssl",
)
RUN = commands("flwr run . deployment")[0]
NODES = commands("flower-supernode --superlink")  # with the partitions 0 and 1


def figures(log: str) -> dict[str, int]:
    (line,) = re.findall(r"^gradwire: (\{.*\})", log, re.MULTILINE)
    return ast.literal_eval(line)


@pytest.mark.thorough
@in_processes
def test_the_app_trains_in_deployment_with_tls(tmp_path):
    with Fleet(tmp_path) as fleet:
        fleet.start_all([commands("flower-supernode --isolation process")[0], NODES[1]])  # both kinds of isolation
        fleet.start("executor", commands("flower-superexec")[0])
        fleet.run("others", "sh certificates.sh others localhost 127.0.0.1", 20)
        stranger = NODES[0].replace("certificates/", "others/").replace("9094", "9096")
        refused = fleet.start("stranger", f"{stranger} --max-retries 0")

        log = fleet.run("run", f"{RUN} --run-config 'num-server-rounds=2 fraction-evaluate=0.0'", 240)

        assert log.count("Received 2 results and 0 failures") == 2, log
        accuracies = [float(a) for a in re.findall(r"'accuracy': (0\.\d+)", log)]
        assert len(accuracies) == 3
        assert accuracies[-1] > max(0.5, accuracies[0])
        stats = figures(log)
        assert stats["replies"] == 4
        assert stats["rejected"] == 0
        assert stats["upload_bytes"] < stats["dense_upload_bytes"] / 10
        memories = sorted(path.parent.name for path in fleet.state.rglob("pending.pt"))
        assert memories == ["partition-0", "partition-1"]
        assert refused.wait(60) != 0
        assert "CERTIFICATE_VERIFY_FAILED" in fleet.log("stranger")
        assert "SuperNode ID" not in fleet.log("stranger")
    assert not list(fleet.processes())


@pytest.mark.slow  # Flower waits for two heartbeats, a minute, before it gives a client up
@in_processes
def test_a_supernode_killed_in_mid_round_comes_back_with_its_error_memory(tmp_path):
    with Fleet(tmp_path) as fleet:
        fleet.start_all(NODES)
        fleet.start("run", f"{RUN} --run-config 'num-server-rounds=3 fraction-evaluate=0.0'")
        fleet.wait_for("run", "[ROUND 2/3]", 120)
        (pending,) = fleet.state.rglob("partition-0/pending.pt")
        proposed = torch.load(pending, weights_only=True)
        settled = pending.with_name("settled.pt")
        fleet.wait_until(settled.exists, "the client has begun with round 2", 60)

        fleet.kill_with_children(fleet.children["node 0"])
        fleet.start("node 0 again", NODES[0])
        assert fleet.children["run"].wait(300) == 0, fleet.logs()

        log = fleet.log("run")
        results = re.findall(r"Received (\d) results and (\d) failures", log)
        assert results == [("2", "0"), ("1", "1"), ("2", "0")], log
        assert figures(log)["rejected"] == 0
        kept = torch.load(settled, weights_only=True)  # what the client went on from in round 3
        assert kept["token"] == proposed["token"]
        assert all(torch.equal(kept["memory"][name], tensor) for name, tensor in proposed["memory"].items())
        assert torch.load(pending, weights_only=True)["token"] != proposed["token"]


def test_the_app_trains_in_one_process(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLE)
    client_app, server_app = (importlib.import_module(f"digits.{side}_app").app for side in ("client", "server"))
    settings = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    one_process.run(server_app, client_app, 2, settings | {"num-server-rounds": 2})
    stats = figures(capsys.readouterr().out)
    assert (stats["replies"], stats["rejected"]) == (4, 0)
    assert stats["upload_bytes"] < stats["dense_upload_bytes"] / 10


@pytest.mark.slow  # Ray, twice
@in_processes
def test_the_app_trains_in_both_simulations(tmp_path):
    with Fleet(tmp_path) as fleet:
        log = fleet.run("flwr run", commands("flwr run . --stream --federation-config")[0], 240)
        assert log.count("Received 10 results and 0 failures") == 6, log
        assert "No additional application dependencies needed installation" in log  # nothing was fetched
        stats = figures(log)
        assert (stats["replies"], stats["rejected"]) == (30, 0)
        assert stats["upload_bytes"] < stats["dense_upload_bytes"] / 10

        log = fleet.run("simulate", commands("python simulate.py")[0], 240)
        assert log.count("Received 4 results and 0 failures") == 6, log
        stats = figures(log)
        assert (stats["replies"], stats["rejected"]) == (12, 0)
        assert not fleet.state.exists()  # in a simulation, error memories are not written to files
    assert not list(fleet.processes())


def test_the_lines_that_the_readme_adds_are_those_of_the_app():
    readme = (EXAMPLE / "README.md").read_text()
    diffs = re.findall(r"^```diff\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    for name, diff in zip(("client_app.py", "server_app.py"), diffs, strict=True):
        app = (EXAMPLE / "digits" / name).read_text()
        added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
        removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
        assert len(added) == 2
        assert all(app.count(f"{line}\n") == 1 for line in added)
        assert not any(f"\n{line}\n" in app for line in removed)
        others = [line for line in app.splitlines() if "gradwire" in line and line not in added]
        assert all("print(" in line for line in others)
