"""Error memory: kept by name, provisional until the step ends, saved and restored."""

from __future__ import annotations

import io

import pytest
import torch

import gradwire
from gradwire import CheckpointError, GradwireError
from gradwire.correct.error_memory_by_parameter import ErrorMemory
from support.helpers import check_contract_3, check_same, encode_into, gradient


def test_memory_starts_at_zero():
    memory, after = ErrorMemory().buffers("w", gradient(6).reshape(2, 3))
    assert torch.equal(memory, torch.zeros(2, 3))
    assert (after.shape, after.dtype) == (memory.shape, memory.dtype)
    assert after.data_ptr() != memory.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_memory_is_fp32_whatever_the_gradient(dtype):
    for buffer in ErrorMemory().buffers("w", gradient(6).to(dtype)):
        assert buffer.dtype == torch.float32


def test_commit_and_rollback():
    residual, grad = ErrorMemory(), torch.zeros(4)
    for step in range(1, 4):
        _, after = residual.buffers("w", grad)
        after.fill_(step)
        residual.commit()
        assert residual.buffers("w", grad)[0].tolist() == [step] * 4
        residual.rollback()
    _, after = residual.buffers("w", grad)
    after.fill_(9)
    residual.rollback()
    assert residual.buffers("w", grad)[0].tolist() == [3] * 4


def test_commit_touches_only_this_steps_parameters():
    residual = ErrorMemory()
    for name in ("a", "b"):
        residual.buffers(name, torch.zeros(2))[1].fill_(1)
    residual.commit()
    residual.buffers("a", torch.zeros(2))[1].fill_(2)
    residual.commit()
    residual.commit()
    memory = residual.state_dict()["memory"]
    assert (memory["a"].tolist(), memory["b"].tolist()) == ([2, 2], [1, 1])


def test_rollback_then_commit_commits_nothing():
    residual = ErrorMemory()
    residual.buffers("w", torch.zeros(2))[1].fill_(5)
    residual.rollback()
    residual.commit()
    assert residual.buffers("w", torch.zeros(2))[0].tolist() == [0, 0]


def test_names_keep_memories_apart():
    residual = ErrorMemory()
    for i in range(5):
        residual.buffers(f"layer{i}", torch.zeros(3))[1].fill_(i)
    residual.commit()
    for i in reversed(range(5)):
        assert residual.buffers(f"layer{i}", torch.zeros(3))[0].tolist() == [i] * 3


def test_a_name_keeps_its_shape():
    residual = ErrorMemory()
    residual.buffers("w", torch.zeros(2, 3))
    with pytest.raises(GradwireError, match=r"error memory of 'w' has shape \(2, 3\), its gradient \(3, 2\)"):
        residual.buffers("w", torch.zeros(3, 2))


def run(residual: ErrorMemory, steps: range, fail_at: int = -1) -> list[bytes]:
    """Error feedback through the bytes; contract 3 in every step that is committed."""
    codec, frames = gradwire.codec("co3"), []
    for t in steps:
        grad = gradient(200, t)
        memory, after = residual.buffers("w", grad)
        before = memory.clone()
        frame = encode_into(codec, grad, residual=memory, residual_out=after, decay=0.9)
        check_same(memory, before)
        if t == fail_at:
            residual.rollback()
            continue
        residual.commit()
        check_contract_3(gradwire.decode(frame), residual.memory["w"], grad, before, 0.9)
        frames.append(frame)
    return frames


def test_rolled_back_steps_leave_no_trace():
    assert run(ErrorMemory(), range(8), fail_at=3) == run(ErrorMemory(), [0, 1, 2, 4, 5, 6, 7])


def test_saved_memory_goes_on_where_it_was():
    whole = run(ErrorMemory(), range(8))
    first, second = ErrorMemory(), ErrorMemory()
    frames = run(first, range(4))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert frames + run(second, range(4, 8)) == whole


def test_saved_memory_is_a_copy():
    residual = ErrorMemory()
    run(residual, range(1))
    state = residual.state_dict()
    kept = state["memory"]["w"].clone()
    run(residual, range(1, 3))
    check_same(state["memory"]["w"], kept)
    residual.load_state_dict(state)
    run(residual, range(1, 3))
    check_same(state["memory"]["w"], kept)


def test_an_unfinished_step_is_not_saved():
    residual = ErrorMemory()
    run(residual, range(2))
    kept = residual.memory["w"].clone()
    residual.buffers("w", gradient(200))[1].fill_(99)
    check_same(residual.state_dict()["memory"]["w"], kept)
    residual.load_state_dict(residual.state_dict())
    residual.commit()
    check_same(residual.memory["w"], kept)


def test_loaded_memory_becomes_fp32():
    residual = ErrorMemory()
    residual.load_state_dict({"memory": {"w": torch.ones(3, dtype=torch.float64)}})
    assert residual.buffers("w", torch.zeros(3))[0].dtype == torch.float32


@pytest.mark.parametrize("state", [{}, {"memory": None}, {"memory": [torch.zeros(3)]}, {"steps": 4}])
def test_what_is_no_state(state):
    with pytest.raises(CheckpointError, match=r"not (the|a) state of"):
        ErrorMemory().load_state_dict(state)
