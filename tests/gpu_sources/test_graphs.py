"""Launches that become one graph: the driver is a stand-in, which runs kernels on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire
from gradwire.cuda_runtime import graphs, launcher, programs
from gradwire.cuda_runtime.launcher import CudaKernel
from gradwire.gpu.decoder import FrameTarget, MessageDecoder
from gradwire.gpu.encoder import MessageEncoder
from gradwire.gpu.unattended import FRONT, UnattendedMessages
from support.cuda_on_cpu import CudaOnCpu
from support.device_frames import HOST, encode, frame_task, tensor_tasks

GPU = torch.device("cuda:0")
Ran = tuple[str, int, int, int]  # what, blocks, threads and stream


class Driver:
    """The functions of the driver that graphs need. Handles are indices, and 0 is none."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []
        self.names: list[str] = []
        self.graphs: dict[int, list[tuple[int, int, int, int]]] = {}
        self.executables: dict[int, list[tuple[int, int, int, int]]] = {}
        self.launched: list[Ran] = []  # by cuLaunchKernel
        self.replayed: list[list[Ran]] = []
        self.failing, self.version, self._handle = "", 13000, 0

    def _new(self, handle: Any) -> int:
        self._handle += 1
        handle._obj.value = self._handle
        return self._handle

    def _run(self, function: int, blocks: int, threads: int, arguments: int, stream: int | None) -> Ran:
        self.functions[function - 1](ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_void_p(arguments))
        return self.names[function - 1], blocks, threads, stream or 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return int(self.failing == "cuDriverGetVersion")

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:
        blocks, _, _, threads, _, _, _, stream, arguments, _ = given
        self.launched.append(self._run(function.value, blocks, threads, ctypes.addressof(arguments), stream.value))
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        if self.failing == "cuGraphCreate":
            return 2
        self.graphs[self._new(graph)] = []
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, after: Any, count: Any, what: Any) -> int:
        nodes, params = self.graphs[graph.value], what._obj
        if self.failing == "cuGraphAddKernelNode_v2" and nodes:
            return 1
        assert count.value == (1 if nodes else 0)
        assert (after._obj.value == self._handle) if nodes else after is None  # a node is behind the one before
        assert (list(params.blocks)[1:], list(params.threads)[1:], params.shared_bytes) == ([1, 1], [1, 1], 0)
        assert (params.extra, params.kernel, params.context) == (None, None, None)
        nodes.append((params.function, params.blocks[0], params.threads[0], params.arguments))
        self._new(node)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:
        if self.failing == "cuGraphInstantiateWithFlags":
            return 2
        assert flags.value == 0
        self.executables[self._new(executable)] = self.graphs[graph.value]
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        if self.failing == "cuGraphLaunch":
            return 1
        self.replayed.append([self._run(*node, stream.value) for node in self.executables[executable.value]])
        return 0

    def cuGraphExecDestroy(self, executable: Any) -> int:
        del self.executables[executable.value]
        return 0


class ThroughDriver(CudaOnCpu):
    """Kernels as those of a GPU are started."""

    def __init__(self, driver: Driver):
        self.driver = driver

    def kernel(self, program: ctypes.CDLL, name: str, device: torch.device) -> Any:
        self.driver.functions.append(getattr(program, f"start_{name}"))
        self.driver.names.append(name)
        return CudaKernel(ctypes.c_void_p(len(self.driver.functions)), name, GPU)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(launcher, "driver", lambda: found)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 0)
    before = programs.use_backend(ThroughDriver(found))
    yield found
    programs.use_backend(before)


def messages(encoder: MessageEncoder, decoder: MessageDecoder, count: int, seed: int = 0) -> list[bytes]:
    """Encode and average messages of the same tensors, each twice; return their bytes, of which every mean is right."""
    made = []
    for step in range(count):
        torch.manual_seed(seed + step)
        task = frame_task("sbc", tensor_tasks([3000]))
        [frame] = encode([task], encoder)
        mean, message = torch.full((3000,), float("nan")), torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        assert decoder.average([FrameTarget(task.converter, [mean])], [message], [[True]], 1.0).wait()
        assert torch.equal(mean, gradwire.decode(frame))
        made.append(frame)
    return made


def test_the_layout_is_that_of_the_driver() -> None:
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h has 72 bytes: a pointer, seven ints and four pointers."""
    node = graphs._KernelNode
    assert ctypes.sizeof(node) == 72
    places = (node.blocks, node.threads, node.shared_bytes, node.arguments, node.extra, node.kernel, node.context)
    assert [place.offset for place in places] == [8, 20, 32, 40, 48, 56, 64]


def test_all_but_the_first_message_are_one_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, decoder = MessageEncoder(HOST), MessageDecoder(HOST)
    frames = messages(encoder, decoder, 1)
    plain, [encoding] = driver.launched, driver.replayed  # the message is encoded twice
    assert encoding == plain[: len(encoding)]
    decoding = plain[len(encoding) :]
    assert encoding[-1][0] == "place_all" and decoding[-1][0] == "combine_sparse"
    driver.launched, driver.replayed = [], []
    monkeypatch.setattr(launcher, "current_stream", lambda device: 77)
    frames += messages(encoder, decoder, 2, seed=1)
    assert not driver.launched
    on_stream = [[(*launch[:3], 77) for launch in launches] for launches in (encoding, encoding, decoding)]
    assert driver.replayed == 2 * on_stream
    assert len(set(frames)) == 3
    driver.version = 0
    assert messages(MessageEncoder(HOST), MessageDecoder(HOST), 3) == frames


def test_messages_that_nobody_waits_for_are_two_launches(driver: Driver) -> None:
    """Seals and what opens them are in the same graphs, with the stamp of each step."""
    unattended = UnattendedMessages(MessageEncoder(HOST), MessageDecoder(HOST))
    for step in range(3):
        torch.manual_seed(step)
        task, mean = frame_task("qsgd", tensor_tasks([5000])), torch.full((5000,), float("nan"))
        block = torch.zeros(8192 + step, dtype=torch.uint8)
        layout = unattended.encode("key", [task], block, stamp=7 + step)
        outcome = unattended.average("key", layout, [FrameTarget(task.converter, [mean])], [block], stamp=7 + step)
        outcome.wait()
        assert not outcome.waited and int.from_bytes(outcome.prefixes[0][8:].tobytes(), "little") == 7 + step
        frame = bytes(block[FRONT : FRONT + sum(layout.frame_lengths())].numpy())
        assert torch.equal(mean, gradwire.decode(frame))
    encoding, decoding = driver.replayed[:2]
    assert driver.launched == encoding + decoding and driver.replayed == 2 * [encoding, decoding]
    assert (encoding[0][0], encoding[-1][0]) == ("find_absent", "seal")
    assert (decoding[0][0], decoding[-1][0]) == ("open_messages", "conclude")


def test_a_workspace_that_has_grown_makes_a_new_graph(driver: Driver) -> None:
    encoder, decoder = MessageEncoder(HOST), MessageDecoder(HOST)
    messages(encoder, decoder, 1)
    encode([frame_task("co3", tensor_tasks([100_000]))], encoder)
    assert len(driver.executables) == 3
    driver.launched, driver.replayed = [], []
    messages(encoder, decoder, 1)
    assert driver.launched == driver.replayed[0] and len(driver.replayed) == 2  # the decoder's is still good
    assert len(driver.executables) == 3 and not driver.graphs
    del encoder, decoder
    assert not driver.executables


@pytest.mark.parametrize(
    "failing", ["cuDriverGetVersion", "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags"]
)
def test_without_a_graph_kernels_are_launched(driver: Driver, failing: str) -> None:
    frames = messages(MessageEncoder(HOST), MessageDecoder(HOST), 2)
    driver.failing, driver.launched, driver.replayed = failing, [], []
    assert messages(MessageEncoder(HOST), MessageDecoder(HOST), 2) == frames
    assert driver.launched and not driver.replayed
    assert not driver.graphs and not driver.executables


def test_a_graph_that_does_not_start_is_given_up(driver: Driver) -> None:
    encoder, decoder = MessageEncoder(HOST), MessageDecoder(HOST)
    frames = messages(encoder, decoder, 2)
    driver.failing, driver.replayed = "cuGraphLaunch", []
    assert messages(encoder, decoder, 2) == frames
    driver.failing = ""
    assert messages(encoder, decoder, 2) == frames
    assert not driver.replayed and not driver.executables


def test_drivers_before_cuda_12_4_have_none(driver: Driver) -> None:
    driver.version = 12030
    messages(MessageEncoder(HOST), MessageDecoder(HOST), 2)
    assert not driver.replayed
