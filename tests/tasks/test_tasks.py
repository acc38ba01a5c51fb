"""The tasks: their data, their order, their models; each learns within a few steps."""

from __future__ import annotations

import gzip
import math
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire import SpecError, tasks
from gradwire.tasks import DataError, Task, example_order, text
from gradwire.tasks.base import evaluation_sums, loss_of
from gradwire.tasks.images import random_crop_and_flip
from gradwire.tasks.training import learning_rate_factor

NOWHERE = Path("no such folder")


def losses_of_first_steps(task: Task, steps: int, batch_size: int = 16) -> list[float]:
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model, task.defaults.lr)
    losses = []
    for step in range(steps):
        epoch, position = divmod(step, task.train_size // batch_size)
        indices = example_order.batch_indices(
            example_order.epoch_order(task.train_size, 0, epoch), position, 0, 1, batch_size
        )
        inputs, targets = task.train_batch(indices, example_order.augmentation_generator(0, epoch, position, 0))
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters(task: Task) -> int:
    return sum(p.numel() for p in task.build_model().parameters())


# ── order ──


def test_workers_share_an_epoch_without_overlap() -> None:
    size, workers, batch = 103, 3, 8
    shuffled = example_order.epoch_order(size, seed=5, epoch=2)
    steps = size // (workers * batch)
    seen = torch.cat(
        [example_order.batch_indices(shuffled, s, r, workers, batch) for s in range(steps) for r in range(workers)]
    )
    assert len(seen) == steps * workers * batch
    assert len(seen.unique()) == len(seen)
    assert shuffled.sort().values.equal(torch.arange(size))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = example_order.epoch_order(1000, seed=1, epoch=0)
    torch.manual_seed(99)
    assert example_order.epoch_order(1000, seed=1, epoch=0).equal(first)
    assert not example_order.epoch_order(1000, seed=2, epoch=0).equal(first)
    assert not example_order.epoch_order(1000, seed=1, epoch=1).equal(first)


def test_every_batch_has_its_own_randomness() -> None:
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    draws = {torch.rand(1, generator=example_order.augmentation_generator(*key)).item() for key in keys}
    assert len(draws) == len(keys)


def test_learning_rate_rises_and_falls() -> None:
    factors = [learning_rate_factor(step, 200) for step in range(200)]
    assert factors.index(max(factors)) == 9  # the end of the first twentieth
    assert 0 < factors[0] < 0.2
    assert 0 < factors[-1] < 0.001


# ── digits ──


def test_digits_is_inside_the_package_and_learns() -> None:
    digits = tasks.find("digits")(NOWHERE)
    assert (digits.train_size, digits.test_size) == (1437, 360)
    assert 50_000 < parameters(digits) < 200_000
    losses = losses_of_first_steps(digits, 40)
    assert losses[0] == pytest.approx(math.log(10), abs=0.2)
    assert sum(losses[-5:]) / 5 < 1.2


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    digits = tasks.TASKS["digits"](NOWHERE)
    held_out = torch.arange(1797) % 5 == 0
    for part, chosen in ((digits.train, ~held_out), (digits.test, held_out)):  # type: ignore[attr-defined]
        assert np.array_equal(part.pixels[:, 0], original.images[chosen])
        assert np.array_equal(part.labels, original.target[chosen])


def test_shares_of_the_evaluation_add_up() -> None:
    digits = tasks.find("digits")(NOWHERE)
    torch.manual_seed(1)
    model = digits.build_model()
    whole = evaluation_sums(digits, model, 0, 1)
    shares = sum(evaluation_sums(digits, model, rank, 7) for rank in range(7))
    assert isinstance(shares, torch.Tensor)
    assert whole[2] == shares[2] == 360
    assert whole[1] == shares[1]
    assert whole[0] == pytest.approx(shares[0].item(), rel=1e-5)
    assert model.training
    empty = evaluation_sums(digits, model, 400, 500)  # more workers than test images
    assert empty.tolist() == [0, 0, 0]


def test_checksum_sees_other_data() -> None:
    first, second = tasks.find("digits")(NOWHERE), tasks.find("digits")(NOWHERE)
    assert first.data_checksum() == second.data_checksum()
    second.train.pixels[5, 0, 4, 4] += 1  # type: ignore[attr-defined]
    assert first.data_checksum() != second.data_checksum()


# ── fashion-mnist ──


def write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_fashion(folder: Path, suffix: str) -> np.ndarray:
    """Images whose brightness tells their label."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(200, dtype=np.uint8) % 10
    noise = np.random.default_rng(0).integers(0, 20, (200, 28, 28), dtype=np.uint8)
    images = noise + 20 * labels[:, None, None]
    for part, count in (("train", 200), ("t10k", 50)):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images[:count])
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", labels[:count])
    return images


@pytest.mark.parametrize(("folder", "suffix"), [(".", ""), (".", ".gz"), ("FashionMNIST/raw", "")])
def test_fashion_mnist_reads_idx_files(tmp_path: Path, folder: str, suffix: str) -> None:
    images = write_fashion(tmp_path / folder, suffix)
    fashion = tasks.find("fashion-mnist")(tmp_path)
    assert (fashion.train_size, fashion.test_size) == (200, 50)
    inputs, targets = fashion.train_batch(torch.tensor([3, 14]), torch.Generator())
    expected = (images[[3, 14]] - images.mean()) / images.std()
    torch.testing.assert_close(inputs[:, 0], torch.from_numpy(expected).float(), atol=1e-4, rtol=1e-4)
    assert targets.tolist() == [3, 4]


def test_fashion_mnist_learns(tmp_path: Path) -> None:
    write_fashion(tmp_path, "")
    losses = losses_of_first_steps(tasks.find("fashion-mnist")(tmp_path), 60)
    assert min(losses[-10:]) < 0.7 * losses[0]


@pytest.mark.parametrize("damage", ["truncated", "wrong magic", "not gzip", "other labels"])
def test_fashion_mnist_refuses_damaged_files(tmp_path: Path, damage: str) -> None:
    write_fashion(tmp_path, ".gz")
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    if damage == "other labels":
        write_idx(path, np.zeros(7, dtype=np.uint8))
    elif damage == "wrong magic":
        write_idx(path, np.zeros((200, 1), dtype=np.uint8))
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "truncated" else b"<html>not found</html>")
    with pytest.raises(DataError, match=r"github\.com/zalandoresearch/fashion-mnist"):
        tasks.find("fashion-mnist")(tmp_path)


# ── cifar10 ──


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """{"data": array, "labels": list} as Python 2 and numpy 1 wrote it: strings are bytes, numpy.core."""
    shape = b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(" + shape
        + b"tcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    )  # fmt: skip
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels](" + numbers + b"eu."


def write_cifar_batches(root: Path, pixels: np.ndarray, labels: list[int]) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(python2_pickle(pixels.reshape(len(pixels), 3072), labels))


def cifar_pixels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)


def test_cifar10_reads_the_published_batches_and_image_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels, labels = cifar_pixels(), [i // 2 for i in range(20)]
    (tmp_path / "batches").mkdir()
    write_cifar_batches(tmp_path / "batches", pixels, labels)
    for part in ("train", "test"):
        for i, label in enumerate(labels):
            folder = tmp_path / "images" / part / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels[i].transpose(1, 2, 0)).save(folder / f"{i:04}.png")
    published, folders = (tasks.find("cifar10")(tmp_path / name) for name in ("batches", "images"))
    assert (published.train_size, published.test_size) == (100, 20)
    assert np.array_equal(published.train.pixels[:20], pixels)  # type: ignore[attr-defined]
    assert published.train.labels[:20].tolist() == labels  # type: ignore[attr-defined]
    assert folders.train.pixels.equal(published.test.pixels)  # type: ignore[attr-defined]
    assert folders.test.labels.equal(published.test.labels)  # type: ignore[attr-defined]


def test_cifar10_reads_batches_written_by_python_3(tmp_path: Path) -> None:
    pixels = cifar_pixels()
    write_cifar_batches(tmp_path, pixels, [0] * 20)
    content = {b"data": pixels.reshape(20, 3072), b"labels": [1] * 20}
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(content, protocol=3))
    assert np.array_equal(tasks.find("cifar10")(tmp_path).test.pixels, pixels)  # type: ignore[attr-defined]


def test_cifar10_does_not_run_what_a_pickle_asks_for(tmp_path: Path) -> None:
    write_cifar_batches(tmp_path, cifar_pixels(), [0] * 20)
    victim = tmp_path / "made by the pickle"
    hostile = b"cos\nmkdir\n(V" + str(victim).encode() + b"\ntR."
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(hostile)
    with pytest.raises(DataError, match=r"data_batch_3 .*os\.mkdir"):
        tasks.find("cifar10")(tmp_path)
    assert not victim.exists()


def test_cifar10_refuses_incomplete_data(tmp_path: Path) -> None:
    write_cifar_batches(tmp_path, cifar_pixels(), [0] * 20)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(DataError, match=r"test_batch .*cs\.toronto\.edu"):
        tasks.find("cifar10")(tmp_path)


def test_cifar10_refuses_images_of_another_size(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        image.new("RGB", (48, 32)).save(tmp_path / part / "cat" / "0.png")
    with pytest.raises(DataError, match="48x32 pixels, expected 32x32"):
        tasks.find("cifar10")(tmp_path)


@pytest.mark.thorough
def test_cifar10_learns(tmp_path: Path) -> None:
    pixels, labels = cifar_pixels() // 8, [i % 10 for i in range(20)]
    for i, label in enumerate(labels):
        pixels[i, label % 3] += np.uint8(20 * label)
    write_cifar_batches(tmp_path, pixels, labels)
    cifar = tasks.find("cifar10")(tmp_path)
    assert parameters(cifar) == 269_722  # 0.27 M in table 6 of the paper
    losses = losses_of_first_steps(cifar, 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_crop_and_flip_moves_whole_images() -> None:
    """Every result is one of the 2·9·9 shifted images, and all kinds of shift occur."""
    images = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8)
    results = random_crop_and_flip(images, torch.Generator().manual_seed(0), padding=2)
    assert results.shape == images.shape
    found = []
    for image, result in zip(images, results, strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        options = {
            (y, x, mirrored): crop.flip(2) if mirrored else crop
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            for crop in [padded[:, y : y + 6, x : x + 5]]
        }
        matches = [key for key, option in options.items() if option.equal(result)]
        assert len(matches) == 1
        found += matches
    for position in range(3):
        assert len({key[position] for key in found}) == (2 if position == 2 else 5)
    again = random_crop_and_flip(images, torch.Generator().manual_seed(0), padding=2)
    assert again.equal(results)


# ── text ──


@pytest.fixture(scope="module")
def text_task() -> Task:
    return tasks.find("text")(NOWHERE)


@pytest.mark.thorough
def test_text_is_the_standard_library(text_task: Task) -> None:
    inputs, targets = text_task.train_batch(torch.arange(50), torch.Generator())
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert b"import" in bytes(inputs.flatten().to(torch.uint8).tolist())
    assert 10_000 < text_task.train_size < 20_000
    assert 500_000 < parameters(text_task) < 1_000_000
    assert tasks.find("text")(NOWHERE).data_checksum() == text_task.data_checksum()


def test_text_skips_tests_and_installed_packages(tmp_path: Path) -> None:
    for name in ("a.py", "json/b.py", "site-packages/c.py", "test/d.py", "lib2to3/tests/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    assert {path.name for path in text._source_files(tmp_path)} == {"a.py", "b.py"}


@pytest.mark.thorough
def test_text_learns(text_task: Task) -> None:
    losses = losses_of_first_steps(text_task, 20, batch_size=8)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < 3.8


def test_text_reports_bits_per_byte(text_task: Task) -> None:
    assert text_task.metrics(math.log(256), 0.0)["bits_per_byte"] == pytest.approx(8)


# ── all ──


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"did you mean 'fashion-mnist'\?"):
        tasks.find("fashon-mnist")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fashion-mnist", "train-images-idx3-ubyte.*--data-dir.*github.com/zalandoresearch"),
        ("cifar10", "cifar-10-batches-py.*cs.toronto.edu.*train/CLASS/.*--data-dir"),
    ],
)
def test_missing_data_are_named_with_their_source(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        tasks.find(name)(tmp_path)
