"""What the structure of the code promises: state has one owner, a class name one meaning, a tensor a type and place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import gradwire

PACKAGE = Path(gradwire.__file__).parent
DATA_PATH = ("aggregate", "engine", "local_sgd", "fsdp", "correct", "codecs", "checkpoints", "ddp", "data_parallel")
# What is written from outside after all: records that the same file defines, and torch's own objects.
WRITTEN_FROM_OUTSIDE = {
    ("aggregate/sums/aggregator_fallback.py", "pending.at_aggregator"),
    ("aggregate/sums/aggregator_fallback.py", "pending.over_link"),
    ("aggregate/transport/link.py", "link._attendance"),  # by a class method that makes links
    ("data_parallel.py", "self._trained[name].grad"),
    ("engine/auto.py", "self._left[0].seconds"),
    ("fsdp/fsdp2_internals.py", "self._group._all_reduce_hook"),
    ("fsdp/fsdp2_internals.py", "self._group._reduce_scatter_comm"),
    ("fsdp/fsdp2_internals.py", "self._group.mesh_info.replicate_process_group"),
    ("local_sgd/local_sgd.py", "anchor.grad"),
    ("local_sgd/local_sgd.py", "self._anchor[name].grad"),
}
SAME_NAME_ON_PURPOSE = {"Compress"}  # the callbacks of Lightning and of Hugging Face's Trainer

MAKE_TENSORS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace",
                "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}  # fmt: skip
OF_INTEGERS = {"arange", "randint", "randperm"}  # by themselves, whatever the default dtype is


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def assigned(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else (target,)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


def test_nobody_writes_the_fields_of_another_object():
    """On the way of the data; a method of the owner does it, so that a reader finds all changes in one file."""
    written = {
        (path, ast.unparse(target))
        for path, tree in sources()
        if path.startswith(DATA_PATH)
        for target in assigned(tree)
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls")
    }
    assert written == WRITTEN_FROM_OUTSIDE


def test_a_class_name_has_one_meaning():
    files = defaultdict(list)
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
    assert {name for name, paths in files.items() if len(paths) > 1} == SAME_NAME_ON_PURPOSE


def test_every_new_tensor_has_a_dtype_and_a_device():
    """Otherwise they are torch's defaults, which belong to the user: kernels would find another type than they read."""
    unclear = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKE_TENSORS}:
                name, given = ast.unparse(node.func).removeprefix("torch."), {keyword.arg for keyword in node.keywords}
                if "device" not in given or ("dtype" not in given and name not in OF_INTEGERS):
                    unclear.add((path, ast.unparse(node)))
    assert not unclear
