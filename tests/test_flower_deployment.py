"""examples/flower in deployment on loopback: SuperLink, two SuperNodes and TLS, as docs/flower-deployment.md says."""

from __future__ import annotations

import ast
import re
import shutil
import sys

import pytest

from flower_fleet import ROOT, Fleet, commands

pytest.importorskip("flwr")
EXAMPLE = ROOT / "examples" / "flower"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds its processes in /proc")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_the_app_trains_in_deployment_with_tls(tmp_path):
    with Fleet(tmp_path) as fleet:
        fleet.start_all()
        fleet.run("others", "sh certificates.sh others localhost 127.0.0.1", 20)
        stranger = commands("flower-supernode")[0].replace("certificates/", "others/").replace("9094", "9096")
        refused = fleet.start("stranger", f"{stranger} --max-retries 0")

        settings = "--run-config 'num-server-rounds=2 fraction-evaluate=0.0'"
        log = fleet.run("run", f"{commands('flwr run . deployment')[0]} {settings}", 240)

        assert log.count("Received 2 results and 0 failures") == 2, log
        accuracies = [float(a) for a in re.findall(r"'accuracy': (0\.\d+)", log)]
        assert len(accuracies) == 3
        assert accuracies[-1] > max(0.5, accuracies[0])
        stats = ast.literal_eval(re.findall(r"^gradwire: (\{.*\})", log, re.MULTILINE)[0])
        assert stats["replies"] == 4
        assert stats["rejected"] == 0
        assert stats["upload_bytes"] < stats["dense_upload_bytes"] / 10
        memories = sorted(path.parent.name for path in fleet.state.rglob("pending.pt"))
        assert memories == ["partition-0", "partition-1"]
        assert refused.wait(60) != 0
        assert "CERTIFICATE_VERIFY_FAILED" in fleet.log("stranger")
        assert "Received" not in fleet.log("stranger")
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
