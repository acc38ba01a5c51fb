"""Inputs that tests/fuzz_flower.py found to be interesting, the shortest of each outcome, and a few new ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import fuzz_flower
from support.cases import for_each

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))


def test_there_is_a_corpus() -> None:
    assert len(CORPUS) > 20 and any("good" in path.name for path in CORPUS)


@for_each("path", CORPUS)
def test_every_input_ends_as_before(path: Path) -> None:
    kind, _, ending = path.stem.split("-")
    _, decode = fuzz_flower.BYTES[kind]
    assert (decode(path.read_bytes()) == "decoded") == (ending == "good")


def test_some_new_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("flwr").level
    try:
        assert fuzz_flower.run(fuzz_flower.parse(["--updates", "150", "--seed", "5", "--save", str(tmp_path)])) == 0
    finally:
        logging.getLogger("flwr").setLevel(level)
    assert "150 updates, 0 failures" in capsys.readouterr().out
