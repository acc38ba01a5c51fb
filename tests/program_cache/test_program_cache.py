"""Programs that are kept to be run again come from nobody but their user."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gradwire import program_cache
from gradwire.program_cache import ProgramCache

KIND = "anything"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gradwire" / KIND


def test_what_was_kept_is_read(folder: Path) -> None:
    assert ProgramCache(KIND).read("a") is None
    ProgramCache(KIND).keep("a", b"first")
    ProgramCache(KIND).keep("a", b"second")
    assert ProgramCache(KIND).read("a") == b"second"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "a").stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == ["a"]


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_folders_that_others_can_write_to_are_refused(folder: Path, mode: int) -> None:
    ProgramCache(KIND).keep("a", b"mine")
    folder.chmod(mode)
    for use in (lambda: ProgramCache(KIND).read("a"), lambda: ProgramCache(KIND).keep("b", b"")):
        with pytest.raises(PermissionError, match="others can write there"):
            use()


def test_files_that_others_can_write_to_are_refused(folder: Path) -> None:
    ProgramCache(KIND).keep("a", b"mine")
    (folder / "a").chmod(0o622)
    with pytest.raises(PermissionError, match="others can write there"):
        ProgramCache(KIND).read("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_others_is_refused(folder: Path, what: str) -> None:
    ProgramCache(KIND).keep("a", b"mine")
    os.chown(folder if what == "folder" else folder / "a", 1234, 1234)
    with pytest.raises(PermissionError, match="others can write there"):
        ProgramCache(KIND).read("a")


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    ProgramCache(KIND).keep("b", b"mine")
    (folder / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        ProgramCache(KIND).read("a")
    ProgramCache(KIND).keep("a", b"mine")  # in place of the link
    assert ProgramCache(KIND).read("a") == b"mine" and (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    ProgramCache(KIND).keep("a", b"first")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        ProgramCache(KIND).keep("a", b"second")
    assert os.listdir(folder) == ["a"] and ProgramCache(KIND).read("a") == b"first"


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    ProgramCache(KIND).keep("a", b"")
    old, new = (folder / f"{program_cache.UNFINISHED}{name}" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half")
    long_ago = old.stat().st_mtime - 2 * program_cache.FORGOTTEN
    os.utime(old, (long_ago, long_ago))
    ProgramCache(KIND).keep("b", b"")
    assert sorted(os.listdir(folder)) == sorted(["a", "b", new.name])


def test_threads_keep_the_same_program_at_once(folder: Path) -> None:
    threads = [threading.Thread(target=ProgramCache(KIND).keep, args=("a", b"x" * 10_000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ProgramCache(KIND).read("a") == b"x" * 10_000 and os.listdir(folder) == ["a"]


def test_what_is_read_is_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who owns a folder on the way puts another one in its place between the check and the reading."""
    for who in ("mine", "theirs"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / who))
        ProgramCache(KIND).keep("a", who.encode())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    check = program_cache._check_private

    def check_and_swap(status: os.stat_result) -> None:
        check(status)
        if not (tmp_path / "kept").exists():
            (tmp_path / "mine").rename(tmp_path / "kept")
            (tmp_path / "theirs").rename(tmp_path / "mine")

    monkeypatch.setattr(program_cache, "_check_private", check_and_swap)
    assert ProgramCache(KIND).read("a") == b"mine"
    assert (tmp_path / "mine" / "gradwire" / KIND / "a").read_bytes() == b"theirs"
