"""examples/flower in deployment on loopback: SuperLink, two SuperNodes and TLS, as docs/flower-deployment.md says."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from flower_fleet import Fleet, commands

pytest.importorskip("flwr")
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds its processes in /proc"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl"),
]


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
        assert refused.wait(60) != 0
        assert "CERTIFICATE_VERIFY_FAILED" in fleet.log("stranger")
        assert "Received" not in fleet.log("stranger")
    assert not list(fleet.processes())
