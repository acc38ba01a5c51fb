"""Compressed DDP with real processes: Gloo over loopback, three workers.

Scenarios run on all ranks and return what they saw, and the tests look at what came back. Here everything goes well; in
test_ddp_bad_peers.py, peers disagree, hang and die.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import GradwireError, SpecError
from gradwire.frame import headers
from support.helpers import native
from support.rank_pool import WORLD, Outcomes, RankPool
from support.ranks import SMALL_BUCKETS, Net, Tensors, attach, backward, digest, loss_of, make_ddp

STEPS = 100 if native else 20  # the reference kernels take half a second a step
DECAY = 0.9


# ── a model, its batches and its true gradients ───────────────────────────────────────────────────


def true_gradients(model: DistributedDataParallel, rank: int, step: int, scale: float = 1.0) -> Tensors:
    """This rank's gradients, from a copy of the model that knows nothing of DDP."""
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    (scale * loss_of(alone, rank, step)).backward()
    return {name: p.grad.clone() for name, p in alone.named_parameters()}


def parameters_of(model: DistributedDataParallel) -> Tensors:
    return {name: p.detach() for name, p in model.module.named_parameters()}


def memory_of(handle: gradwire.ddp.Handle | gradwire.ddp.State) -> Tensors:
    return handle.state_dict()["memory"]


# ── scenarios: they return what the tests look at ─────────────────────────────────────────────────


@pytest.fixture(scope="module")
def good(ranks: RankPool) -> list[Outcomes]:
    """What scenarios returned, by rank and by the scenario's name."""
    return ranks.outcomes({s.__name__: s for s in SCENARIOS})


def train(rank: int) -> dict[str, object]:
    """Through `State` and `hook`, as register_comm_hook takes them."""
    model = make_ddp()
    state = gradwire.ddp.State("co3", model)
    buckets = []

    def counting_hook(state, bucket):  # DDP compares annotations, and strings are not what it wants
        buckets.append((bucket.index(), bucket.is_last()))
        return gradwire.ddp.hook(state, bucket)

    model.register_comm_hook(state, counting_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    digests, losses = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step % 10)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        digests.append(digest(parameters_of(model)))
    return {"digests": digests, "losses": losses, "buckets": buckets, "stats": state.stats(), "step": state.steps}


def test_replicas_stay_identical(good):
    digests = [result["train"]["digests"] for result in good]
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == STEPS, "every step changes the model"
    losses = [result["train"]["losses"] for result in good]
    first, last = (sum(sum(part) for part in parts) for parts in ([x[:10] for x in losses], [x[-10:] for x in losses]))
    assert last < (0.7 if STEPS == 100 else 0.9) * first, "it learns"


def test_buckets_are_rebuilt_and_several(good):
    """Otherwise the tests here would show nothing about them."""
    buckets = good[0]["train"]["buckets"]
    first = next(i for i, (_, is_last) in enumerate(buckets) if is_last) + 1
    last = len(buckets) - max(i for i, (_, is_last) in enumerate(buckets[:-1]) if is_last) - 1
    assert last > 2 and last > first


def test_stats(good):
    count = sum(p.numel() for p in Net().parameters())
    for result in good:
        stats = result["train"]["stats"]
        assert {"steps", "frame_bytes", "wire_bytes_sent", "wire_bytes_received", "dense_bytes", "ratio"} <= set(stats)
        assert {"encode_s", "decode_s", "wait_s"} <= set(stats)
        assert stats["steps"] == result["train"]["step"] == STEPS
        assert stats["dense_bytes"] == STEPS * 4 * count
        assert stats["ratio"] == stats["dense_bytes"] / stats["frame_bytes"] > 6
        assert stats["wire_bytes_sent"] >= (WORLD - 1) * stats["frame_bytes"]
        assert stats["wire_bytes_received"] == pytest.approx(stats["wire_bytes_sent"], rel=0.02)
        assert all(stats[key] > 0 for key in ("encode_s", "decode_s", "wait_s"))
    sent, received = (sum(r["train"]["stats"][f"wire_bytes_{way}"] for r in good) for way in ("sent", "received"))
    assert sent == received


def feedback(rank: int) -> list[dict[str, Tensors]]:
    """True gradients, aggregated ones and the memory, step by step, across the rebuilding of the buckets."""
    model = make_ddp()
    handle = attach(model, "co3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(6):
        true = true_gradients(model, rank, step)
        mean = backward(model, rank, step)
        optimizer.step()
        steps.append({"true": true, "mean": mean, "memory": memory_of(handle)})
    return steps


def check_nothing_is_lost(before: list[Tensors], steps: list[dict[str, Tensors]]) -> None:
    """W·mean + Σe′ = Σ(g + γe) over the ranks: contract 3, seen from outside."""
    decay = float(torch.tensor(DECAY))
    for name, mean in steps[0]["mean"].items():
        old = [decay * memory[name].double() if name in memory else torch.zeros(1) for memory in before]
        new = [step["memory"][name].double() for step in steps]
        true = [step["true"][name].double() for step in steps]
        left, right = WORLD * mean.double() + sum(new), sum(true) + sum(old)
        # Each rank rounds γe, g + γe, u − ĝ and ĝ/W, and each sum of the mean is rounded once more.
        sizes = sum(a.abs() + 2 * b.abs() + 2 * c.abs() for a, b, c in zip(old, true, new, strict=True))
        bound = 2.0**-24 * (2 * sizes + 3 * WORLD * WORLD * mean.double().abs() + 4 * sum(true).abs()) + 1e-40
        assert bool(((left - right).abs() <= bound).all()), name


def test_nothing_is_lost_across_buckets(good):
    before: list[Tensors] = [{} for _ in range(WORLD)]
    for step in range(6):
        steps = [result["feedback"][step] for result in good]
        check_nothing_is_lost(before, steps)
        before = [s["memory"] for s in steps]
    assert set(before[0]) == {name for name, _ in Net().named_parameters()}
    assert all(float(memory.abs().max()) > 0 for memory in before[0].values())


def frames(rank: int) -> dict[str, object]:
    """The messages that arrived in the third step, and the gradients made of them."""
    model = make_ddp()
    handle = attach(model, "co3")
    for step in range(2):
        backward(model, rank, step)
    arrived: list[tuple[int, bytes, list[list[str]]]] = []
    coder = handle.state.exchange.coder
    decode = coder.decode

    def recording_decode(sender: int, message: object, pieces: list, *rest: object, **options: object) -> None:
        arrived.append((sender, bytes(message), [piece.names for piece in pieces]))
        decode(sender, message, pieces, *rest, **options)

    coder.decode = recording_decode
    return {"mean": backward(model, rank, 2), "arrived": arrived}


def test_the_mean_is_that_of_the_decoded_frames(good):
    """Bit for bit: each frame over the number of ranks, added in their order."""
    shapes = {name: p.shape for name, p in Net().named_parameters()}
    for result in good:
        total: Tensors = {}
        for sender, message, pieces in result["frames"]["arrived"]:
            split = [gradwire.decode(bytes(frame)).reshape(-1) for frame in headers.split(memoryview(message))]
            assert [len(frame) for frame in split] == [sum(shapes[n].numel() for n in names) for names in pieces]
            for names, values in zip(pieces, split, strict=True):
                for name, part in zip(names, values.split([shapes[n].numel() for n in names]), strict=True):
                    share = part.reshape(shapes[name]) * (1 / WORLD)
                    total[name] = total[name] + share if sender else share
        assert digest(total) == digest(result["frames"]["mean"])
    assert good[0]["frames"]["arrived"] == good[1]["frames"]["arrived"] == good[2]["frames"]["arrived"]


def nonfinite(rank: int) -> list[dict[str, object]]:
    """Rank 1 has a NaN in one large parameter, then an infinity in a small one; all others are as usual."""
    model = make_ddp()
    handle = attach(model, "co3")
    bad: dict[str, float] = {}

    def spoil(name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            if name not in bad:
                return None
            grad = grad.clone()
            grad.view(-1)[3] = bad[name]
            return grad

        return hook

    for name, parameter in model.module.named_parameters():
        parameter.register_hook(spoil(name))
    steps = []
    for step, what in enumerate([{}, {}, {"big.weight": float("nan")}, {}, {"norm.bias": float("inf")}, {}]):
        before = digest(memory_of(handle))
        bad.clear()
        bad.update(what if rank == 1 else {})
        mean = backward(model, rank, step)
        steps.append(
            {
                "what": list(what),
                "mean": mean,
                "memory_kept": digest(memory_of(handle)) == before,
                "memory_finite": all(bool(m.isfinite().all()) for m in memory_of(handle).values()),
            }
        )
    return steps


def test_non_finite_gradients_reach_every_rank(good):
    for result in good:
        for step in result["nonfinite"]:
            broken = [name for name, grad in step["mean"].items() if not grad.isfinite().all()]
            assert set(step["what"]) <= set(broken)
            assert bool(broken) == bool(step["what"])


def test_a_step_with_one_leaves_all_memories_as_they_were(good):
    for result in good:
        for step in result["nonfinite"]:
            assert step["memory_kept"] == bool(step["what"])
            assert step["memory_finite"]


def test_they_are_the_same_on_every_rank(good):
    for step in range(6):
        assert len({digest(result["nonfinite"][step]["mean"]) for result in good}) == 1


def by_name(rank: int) -> dict[str, object]:
    """A spec for each parameter, and the specs that attach refuses."""
    model = make_ddp()
    handle = gradwire.ddp.attach(model, {"*.bias": "none", "big*": "co3:format=fp8", "first.*": "bf16", "*": "co3"})
    true = true_gradients(model, rank, 0)
    mean = backward(model, rank, 0)
    errors = []
    for wrong in ({"*.bias": "none"}, {}, 5, {"*": "co4"}):
        try:
            gradwire.ddp.attach(model, wrong)
        except SpecError as error:
            errors.append(str(error))
    try:
        gradwire.ddp.attach(model.module, "co3")
    except GradwireError as error:
        errors.append(str(error))
    return {"true": true, "mean": mean, "memory": sorted(memory_of(handle)), "errors": errors}


def test_specs_by_parameter_name(good):
    results = [result["by_name"] for result in good]
    for name, mean in results[0]["mean"].items():
        exact = sum(r["true"][name].double() for r in results) / WORLD
        error = float((mean.double() - exact).norm() / exact.norm())
        if name.endswith("bias"):
            assert error < 1e-6, name
        elif name.startswith("first"):
            assert 1e-6 < error < 2**-7, name
        else:
            assert 0.005 < error < (0.1 if name == "big.weight" else 0.5), name
    assert results[0]["memory"] == ["big.weight", "last.weight", "norm.weight"]


def test_attach_refuses_what_it_cannot_use(good):
    unmatched, empty, number, unknown, bare = good[0]["by_name"]["errors"]
    assert "no pattern matches parameter 'first.weight'" in unmatched
    assert "a spec is a string, or a dict" in empty and "a spec is a string, or a dict" in number
    assert "unknown recipe 'co4'" in unknown
    assert "needs a DistributedDataParallel model, got Net" in bare


def detach(rank: int) -> dict[str, object]:
    model = make_ddp()
    first = gradwire.ddp.attach(model, "co3")
    backward(model, rank, 0)
    first.detach()
    plain, true = backward(model, rank, 1), true_gradients(model, rank, 1)
    second = gradwire.ddp.attach(model, "bf16")
    first.detach()  # of no effect on the second
    cast = backward(model, rank, 2)
    return {
        "true": true, "plain": plain, "cast": cast, "true_cast": true_gradients(model, rank, 2),
        "steps": (first.stats()["steps"], second.stats()["steps"]),
    }  # fmt: skip


def test_detach_and_attach_again(good):
    results = [result["detach"] for result in good]
    for name in results[0]["plain"]:
        for kind, true, low, high in (("plain", "true", 0, 1e-6), ("cast", "true_cast", 1e-6, 2**-7)):
            exact = sum(r[true][name].double() for r in results) / WORLD
            assert low <= float((results[0][kind][name].double() - exact).norm() / exact.norm()) <= high, name
    assert all(r["steps"] == (1, 1) for r in results)


def restore(rank: int) -> dict[str, object]:
    """The same two steps, once straight on, once after saving and loading."""
    model = make_ddp()
    handle = attach(model, "co3")
    for step in range(3):
        backward(model, rank, step)
    saved = copy.deepcopy(handle.state_dict())
    straight = [digest(backward(model, rank, step)) for step in (3, 4)]
    other = attach(make_ddp(), "co3")
    other.load_state_dict(saved)
    fresh_memory = digest(memory_of(other)) == digest(saved["memory"])
    handle.load_state_dict(saved)
    loaded = [digest(backward(model, rank, step)) for step in (3, 4)]
    forgotten = attach(model, "co3")
    without = [digest(backward(model, rank, step)) for step in (3, 4)]
    try:
        forgotten.load_state_dict({"memory": {"nobody": torch.zeros(3)}})
        error = ""
    except GradwireError as caught:
        error = str(caught)
    return {
        "straight": straight, "loaded": loaded, "without": without, "fresh_memory": fresh_memory,
        "steps": (saved["steps"], other.state.steps), "names": sorted(saved["memory"]), "error": error,
    }  # fmt: skip


def test_saved_memory_goes_on_where_it_was(good):
    for result in good:
        part = result["restore"]
        assert part["straight"] == part["loaded"] != part["without"]
        assert part["fresh_memory"]
        assert part["steps"] == (3, 3)
        assert part["names"] == sorted(name for name, _ in Net().named_parameters())
        assert "parameters that the model does not have: nobody" in part["error"]


def growth(rank: int) -> dict[str, object]:
    """No gradient at all until every bucket has agreed on a small capacity; then the full one."""
    model = make_ddp()
    handle = gradwire.ddp.attach(model, "co3", aggregate="all_gather")
    parts: list[str] = []
    link = handle.state.exchange.link
    all_to_all, send_and_receive = link.all_to_all, link.send_and_receive

    def recording_all_to_all(blocks: list, sizes: list[int], into: torch.Tensor) -> object:
        parts.append("lengths" if into.dtype == torch.int64 else "first")
        return all_to_all(blocks, sizes, into)

    def recording_rest(sent: dict, received: dict) -> None:
        if sent or received:
            parts.append("rest")
        send_and_receive(sent, received)

    link.all_to_all, link.send_and_receive = recording_all_to_all, recording_rest
    steps, rounds = [], []
    for step in range(6):
        parts.clear()
        scale = 0.0 if step < 3 else 1.0
        true = true_gradients(model, rank, step, scale)
        steps.append({"true": true, "mean": backward(model, rank, step, scale), "memory": memory_of(handle)})
        rounds.append(list(parts))
    return {"steps": steps, "rounds": rounds}


def test_messages_may_outgrow_what_was_agreed(good):
    rounds = good[0]["growth"]["rounds"]
    assert all(result["growth"]["rounds"] == rounds for result in good)
    assert "rest" not in rounds[2] and "lengths" not in rounds[2]
    assert "rest" in rounds[3], "of the largest bucket; the others fit into the room that there is at least"
    assert rounds[5] == rounds[2], "one round each, with the new capacity"
    before = [result["growth"]["steps"][2]["memory"] for result in good]
    for step in (3, 4, 5):
        steps = [result["growth"]["steps"][step] for result in good]
        assert len({digest(s["mean"]) for s in steps}) == 1
        check_nothing_is_lost(before, steps)
        before = [s["memory"] for s in steps]


def other_kinds(rank: int) -> dict[str, object]:
    """Half precision, stochastic rounding, other recipes, one bucket only, and parameters without names."""
    results = {}
    for name, spec, dtype, cap in (
        ("bf16 model", "co3", torch.bfloat16, SMALL_BUCKETS),
        ("fp16 model", "gennorm", torch.float16, SMALL_BUCKETS),
        ("stochastic", "co3:rounding=stochastic,decay=0", torch.float32, SMALL_BUCKETS),
        ("none", "none", torch.float32, SMALL_BUCKETS),
        ("one bucket", "co3:coder=huffman", torch.float32, 25),
    ):
        model = make_ddp(dtype, cap)
        handle = gradwire.ddp.attach(model, spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            backward(model, rank, step)
            optimizer.step()
        results[name] = (digest(parameters_of(model)), {m.dtype for m in memory_of(handle).values()})
    model = make_ddp()
    state = gradwire.ddp.State("co3")
    model.register_comm_hook(state, gradwire.ddp.hook)
    for step in range(3):
        mean = backward(model, rank, step)
    results["nameless"] = (digest(mean), sorted(memory_of(state)))
    return results


def test_other_models_and_recipes(good):
    for name, (parameters, memory) in good[0]["other_kinds"].items():
        assert all(result["other_kinds"][name][0] == parameters for result in good), name
        if name in ("bf16 model", "one bucket"):
            assert memory == {torch.float32}, name
        elif name in ("none", "stochastic", "fp16 model"):
            assert memory == set(), "no memory without decay"
    assert len({result["other_kinds"]["none"][0] for result in good}) == 1
    assert good[0]["other_kinds"]["nameless"][1] == sorted(f"parameter{i}" for i in range(8))


def accumulation(rank: int) -> dict[str, object]:
    """Two micro-batches under no_sync: the hook sees their sum once."""
    model = make_ddp()
    handle = gradwire.ddp.attach(model, "none")
    true = [true_gradients(model, rank, step) for step in (0, 1)]
    model.zero_grad()
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    mean = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    return {"true": {n: true[0][n] + true[1][n] for n in mean}, "mean": mean, "steps": handle.stats()["steps"]}


def test_accumulated_gradients(good):
    results = [result["accumulation"] for result in good]
    for name, mean in results[0]["mean"].items():
        exact = sum(r["true"][name].double() for r in results) / WORLD
        assert float((mean.double() - exact).norm() / exact.norm()) < 1e-6, name
    assert results[0]["steps"] == 1


SCENARIOS = (train, feedback, frames, nonfinite, by_name, detach, restore, growth, other_kinds, accumulation)
