"""The compiled XDP program in its cache folder: the kernel runs what is there, so nobody else may have written it."""

from __future__ import annotations

import os
import shutil

import pytest

from gradwire import GradwireError
from gradwire.aggregator.xdp import build

pytestmark = pytest.mark.skipif(not shutil.which("clang"), reason="there is no clang here")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda clang: b"right")


def test_a_cached_program_of_others_is_not_run(tmp_path):
    assert build.compiled_program() == build.compiled_program() == b"right"
    [stored] = (tmp_path / "gradwire/xdp").iterdir()
    stored.chmod(0o666)
    with pytest.raises(GradwireError, match="others can write there"):
        build.compiled_program()
    stored.unlink()
    stored.symlink_to("/etc/passwd")
    with pytest.raises(GradwireError, match="cannot keep the compiled XDP program"):
        build.compiled_program()


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(GradwireError, match="No space left; set XDG_CACHE_HOME"):
        build.compiled_program()
    assert list((tmp_path / "gradwire/xdp").iterdir()) == []
