"""Damaged states, replayed from the corpus and made anew: refused as a whole or loaded as a whole."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import fuzz_checkpoints
from fuzz_checkpoints import CORPUS, parse, replay
from support.torch_versions import HAS_FSDP2


@pytest.fixture(scope="module")
def subjects() -> Iterator[dict[str, Any]]:
    yield fuzz_checkpoints.start()
    gc.collect()  # DDP models keep the group
    dist.destroy_process_group()


FILES = sorted(path.name for path in CORPUS.glob("*.pt"))


def test_there_is_a_corpus() -> None:
    assert len(FILES) >= 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_corpus(subjects: dict[str, Any], name: str) -> None:
    """The name of a file says what it is loaded into, and what comes of it: KIND-loaded-… or KIND-refused-…"""
    kind, expected = name.split("-")[:2]
    if kind == "fsdp" and not HAS_FSDP2:
        pytest.skip("gradwire.fsdp needs a newer torch")
    assert replay(subjects[kind], CORPUS / name).startswith(expected)


@pytest.mark.filterwarnings("ignore")
def test_some_states(subjects: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(fuzz_checkpoints, "start", lambda: subjects)
    assert fuzz_checkpoints.run(parse(["--files", "60", "--save", str(tmp_path)])) == 0
