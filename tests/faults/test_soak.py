"""A few episodes of the soak (tests/soak.py), so that it can be relied on when it runs for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak.py"


def soak(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    report = tmp_path / "report.json"
    ended = subprocess.run(
        [sys.executable, str(SOAK), "--jobs", "3", "--json", str(report), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert report.exists(), ended.stderr
    return ended.returncode, json.loads(report.read_text())


@pytest.mark.thorough
def test_episodes_with_a_kill_and_without_end_well(tmp_path):
    code, report = soak(tmp_path, "--seed", "5", "--kind", "training", "--episode", "52", "--episode", "50")
    assert (code, report["problems"]) == (0, [])
    assert report["counts"]["episodes"] == 2
    assert report["counts"]["steps verified"] > 50


@pytest.mark.thorough
def test_a_wrong_result_is_found(tmp_path, monkeypatch):
    """Ranks whose steps differ from those of the undisturbed run: the soak counts them and fails."""
    monkeypatch.setenv("GRADWIRE_SOAK_SPOILED", "1")
    code, report = soak(tmp_path, "--seed", "5", "--kind", "training", "--episode", "50")
    assert code == 1
    assert report["counts"]["wrong"] > 0
    assert "differs from the undisturbed run" in report["problems"][0]["text"]
