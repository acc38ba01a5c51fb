"""Checkpoints: whole or not at all, damage is noticed, error memories survive another number of workers."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.checkpoints import run_file, whole_file
from gradwire.checkpoints.run_file import Checkpoint, CheckpointError


def a_checkpoint(workers: int = 2) -> Checkpoint:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(50, 20, generator=generator)
    return Checkpoint(
        settings={"task": "digits", "codecs": ("co3",), "seed": 3},
        step=12,
        epoch=1,
        step_in_epoch=2,
        model={"weight": weights},
        optimizer={"state": {0: {"momentum_buffer": weights * 2}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        rng=[torch.get_rng_state()] * workers,
        error_memory=[{"steps": 12, "memory": {"weight": weights + rank}} for rank in range(workers)],
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path, saved = tmp_path / "run.pt", a_checkpoint()
    run_file.save(path, saved)
    loaded = run_file.load(path)
    assert (loaded.settings, loaded.step, loaded.epoch, loaded.step_in_epoch) == (saved.settings, 12, 1, 2)
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    assert torch.equal(loaded.optimizer["state"][0]["momentum_buffer"], saved.model["weight"] * 2)
    assert loaded.workers == 2
    for rank in range(2):
        expected = saved.error_memory[rank]["memory"]["weight"]
        assert torch.equal(loaded.error_memory_for(rank, 2)["memory"]["weight"], expected)
        assert torch.equal(loaded.rng[rank], saved.rng[rank])


def test_other_tools_can_read_the_model(tmp_path: Path) -> None:
    run_file.save(tmp_path / "run.pt", a_checkpoint())
    assert torch.load(tmp_path / "run.pt", weights_only=True)["model"]["weight"].shape == (50, 20)


@pytest.mark.parametrize("call", ["save", "fsync", "replace"])
def test_a_failed_save_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "run.pt"
    run_file.save(path, a_checkpoint())
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        if call == "save":
            arguments[1].write(b"half of a checkpo")  # type: ignore[attr-defined]
        raise OSError("disk full")

    monkeypatch.setattr(torch if call == "save" else os, call, fail)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*run\.pt: disk full"):
        run_file.save(path, a_checkpoint(workers=3))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"


def test_the_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment the new file takes its name, it is complete and on the disk."""
    path, synced, replaced = tmp_path / "run.pt", [], []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))

    def check(source: str, target: Path) -> None:
        assert Path(source).parent == path.parent
        assert os.stat(source).st_ino in synced
        assert run_file.load(Path(source)).step == 12
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", check)
    run_file.save(path, a_checkpoint())
    assert replaced == [path]


def test_any_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """torch.load alone would load changed tensors without a word."""
    path = tmp_path / "run.pt"
    run_file.save(path, a_checkpoint())
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries = [info for info in archive.infolist() if info.file_size]
        starts = [whole.index(archive.read(info), info.header_offset) for info in entries]
    assert len(starts) > 5
    for info, start in zip(entries, starts, strict=True):
        damaged = bytearray(whole)
        damaged[start + info.file_size // 2] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            run_file.load(path)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "run.pt"
    run_file.save(path, a_checkpoint())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError, match="damaged"):
        run_file.load(path)


def test_a_packed_archive_is_refused(tmp_path: Path) -> None:
    """80 MB of zeros are 80 kB of it, and torch.load would unpack them."""
    plain, packed = tmp_path / "run.pt", tmp_path / "packed.pt"
    run_file.save(plain, a_checkpoint())
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    assert torch.load(packed, weights_only=True)["step"] == 12  # it would have worked
    with pytest.raises(CheckpointError, match="is packed"):
        run_file.load(packed)


def test_an_archive_whose_entries_lie_in_each_other_is_refused(tmp_path: Path) -> None:
    """Many names of the same bytes are many tensors, each with memory of its own."""
    path = tmp_path / "run.pt"
    run_file.save(path, a_checkpoint())
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        archive.filelist += [largest] * 50
        archive.comment = b"written anew"
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) > 50
    with pytest.raises(CheckpointError, match="damaged"):
        run_file.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    with pytest.raises(CheckpointError, match="No such file"):
        run_file.load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        run_file.load(path)
    torch.save({"format": run_file.FORMAT, "step": 1}, path)
    with pytest.raises(CheckpointError, match="incomplete"):
        run_file.load(path)


class _Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


def test_nothing_in_the_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "made by the pickle"))
    path = tmp_path / "run.pt"
    torch.save({"format": run_file.FORMAT, "step": _Hostile()}, path)
    with pytest.raises(CheckpointError):
        run_file.load(path)
    assert list(tmp_path.iterdir()) == [path]
    pickle.loads(pickle.dumps(_Hostile()))  # it would have worked
    assert (tmp_path / "made by the pickle").is_dir()


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_other_workers_start_from_the_mean(workers: int) -> None:
    """The mean over workers of what is still to be sent does not change."""
    saved = a_checkpoint(workers=4)  # memories differ by 0, 1, 2 and 3
    expected = saved.error_memory[0]["memory"]["weight"] + 1.5
    for rank in range(workers):
        state = saved.error_memory_for(rank, workers)
        assert state["steps"] == 12
        torch.testing.assert_close(state["memory"]["weight"], expected)
        assert state["memory"]["weight"].dtype == torch.float32


def test_digest_sees_a_single_bit() -> None:
    model = nn.Linear(3, 2)
    digest = run_file.digest(model)
    copy = nn.Linear(3, 2)
    copy.load_state_dict(model.state_dict())
    assert run_file.digest(copy) == digest
    with torch.no_grad():
        copy.weight.view(torch.int32)[0, 0] ^= 1
    assert run_file.digest(copy) != digest


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The system's reason, as a CheckpointError; the file before is whole, and nothing is left beside it."""
    path = tmp_path / "run.pt"
    whole_file.write_whole(path, {"kept": torch.ones(3)})
    program = f"""
import resource, signal, torch
from pathlib import Path
from gradwire.checkpoints.whole_file import CheckpointError, write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_whole(Path({str(path)!r}), {{"large": torch.ones(1_000_000)}})
except CheckpointError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == f"cannot write the checkpoint {path}: File too large\n"
    assert torch.load(path, weights_only=True)["kept"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == ["run.pt"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    program = f"""
import os, signal, torch
from pathlib import Path
from gradwire.checkpoints.whole_file import write_whole
torch.save = lambda content, file: (file.write(b"half"), file.flush(), os.kill(os.getpid(), signal.SIGKILL))
write_whole(Path({str(path)!r}), {{}})
"""
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1  # that of the last one: each removes what is left of others
    with open(tmp_path / ".run.pt.gradwire-another", "wb") as in_use:
        fcntl.flock(in_use, fcntl.LOCK_EX)
        whole_file.write_whole(path, {})
        assert sorted(os.listdir(tmp_path)) == [".run.pt.gradwire-another", "run.pt"]
    whole_file.write_whole(path, {})
    assert os.listdir(tmp_path) == ["run.pt"]


def test_remains_of_a_process_with_the_same_number(tmp_path: Path) -> None:
    """In a container every run has the same numbers; a remain of the last one is in nobody's way."""
    remains = [f".run.pt.gradwire-{socket.gethostname()}-{os.getpid()}-{count}" for count in range(2000)]
    for name in remains:
        (tmp_path / name).write_text("half")
    whole_file.write_whole(tmp_path / "run.pt", {})
    assert os.listdir(tmp_path) == ["run.pt"]


def test_those_who_save_at_once_do_not_remove_each_others_files(tmp_path: Path) -> None:
    """Locks keep threads apart as they do processes: each opens files of its own."""

    def save(_: int) -> None:
        for step in range(50):
            whole_file.write_whole(tmp_path / "run.pt", {"step": step})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(save, range(4)))
    assert os.listdir(tmp_path) == ["run.pt"]
    assert whole_file.read_whole(tmp_path / "run.pt") == {"step": 49}


def test_a_link_stays_one(tmp_path: Path) -> None:
    """What it leads to may lie on another disk, which has more room."""
    (tmp_path / "large").mkdir()
    link = tmp_path / "run.pt"
    link.symlink_to("large/run.pt")
    for step in range(2):  # where it leads to a file, and before there is one
        whole_file.write_whole(link, {"step": step})
        assert link.is_symlink()
        assert whole_file.read_whole(tmp_path / "large" / "run.pt") == {"step": step}


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """`--save /dev/null` by root would leave the machine without one."""
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"pipe: it is no ordinary file: name another one"):
        whole_file.write_whole(path, {})
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_longest_names_that_a_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    for step in range(2):
        whole_file.write_whole(path, {"step": step})
    assert whole_file.read_whole(path) == {"step": 1}
    with pytest.raises(CheckpointError, match="File name too long"):
        whole_file.write_whole(tmp_path / ("n" * 256), {})
    assert os.listdir(tmp_path) == [path.name]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        whole_file.write_whole(tmp_path / "run.pt", {})
    finally:
        os.umask(before)
    assert (tmp_path / "run.pt").stat().st_mode & 0o777 == 0o640
