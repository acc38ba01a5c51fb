"""The shared key of workers and aggregator: what is one, and which files are taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradwire import SpecError
from gradwire.aggregator import keys

TEXT = "000102030405060708090a0b0c0d0e0f"


def test_what_is_a_key() -> None:
    assert keys.read_key(f" {TEXT.upper()}\n", "here") == bytes(range(16))
    for text in ("", TEXT[:-1], TEXT[:-2], TEXT + "00", "g" + TEXT[1:], TEXT[:15] + " " + TEXT[15:], "é" * 32):
        with pytest.raises(SpecError, match="here is not a key: a key is 32 hexadecimal digits"):
            keys.read_key(text, "here")
    assert keys.make_key() != keys.make_key()


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(SpecError, match=r"cannot read the key in .*No such file"):
        keys.key_from_file(file)
    with pytest.raises(SpecError, match="Is a directory"):
        keys.key_from_file(tmp_path)
    file.write_text(TEXT + "\n")
    file.chmod(0o600)
    assert keys.key_from_file(file) == bytes(range(16))
    file.write_text("0" * 10**6)
    with pytest.raises(SpecError, match="is not a key"):
        keys.key_from_file(file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602, 0o601])
def test_a_key_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(TEXT)
    file.chmod(mode)
    with pytest.raises(SpecError, match=rf"its mode is {mode:04o}\): chmod 600 "):
        keys.key_from_file(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_file_of_another_owner_may_be_there_for_a_group(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(TEXT)
    os.chown(file, 65534, 65534)
    file.chmod(0o640)
    assert keys.key_from_file(file) == bytes(range(16))
    file.chmod(0o644)
    with pytest.raises(SpecError, match="chmod 600"):
        keys.key_from_file(file)


def test_a_key_by_a_pipe(tmp_path: Path) -> None:
    """As a shell passes one: gradwire aggregator --key-file <(print-the-key)."""
    ends = os.pipe()
    os.write(ends[1], TEXT.encode())
    os.close(ends[1])
    assert keys.key_from_file(Path(f"/dev/fd/{ends[0]}")) == bytes(range(16))
    os.close(ends[0])
