"""What the structure of the code promises: state has one owner, a class name one meaning, a tensor a type and place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import gradwire

PACKAGE = Path(gradwire.__file__).parent
DATA_PATH = ("aggregate", "engine", "local_sgd", "fsdp", "correct", "codecs", "checkpoints", "ddp", "data_parallel",
             "torchft")  # fmt: skip
# What is written from outside after all: records that the same file defines, and torch's own objects.
WRITTEN_FROM_OUTSIDE = {
    ("aggregate/sums/aggregator_fallback.py", "pending.at_aggregator"),
    ("aggregate/sums/aggregator_fallback.py", "pending.over_link"),
    ("aggregate/transport/link.py", "link._attendance"),  # by a class method that makes links
    ("data_parallel.py", "self._trained[name].grad"),
    ("data_parallel.py", "self._sparse[name].grad"),
    ("engine/auto.py", "self._left[0].seconds"),
    ("engine/gradients.py", "give_back.atexit"),  # as weakref.finalize says
    ("local_sgd/common_parameters.py", "self.tensors[name].grad"),
    ("torchft/observed_calls.py", "DiLoCo.__init__"),  # torchft's classes
    ("torchft/observed_calls.py", "DistributedDataParallel._comm_hook"),
    ("torchft/observed_calls.py", "LocalSGD.__init__"),
    ("torchft/observed_calls.py", "Manager.should_commit"),
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


def test_nothing_of_the_interpreter_or_the_process_is_relied_on():
    """Counts of references differ between versions of Python, and who asks for the umask sets it for all threads."""
    unreliable = {"getrefcount": "reference counts", "umask": "files made meanwhile by other threads are open to all"}
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)} ({unreliable[node.attr]})"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in unreliable
    ]
    assert not found, "\n".join(found)


OBSERVES_TORCHFT = "torchft/observed_calls.py"  # and has all that gradwire knows of torchft's insides
DOCUMENTED = {
    "torch",
    "torch.autograd.function",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn",
    "torch.nn.parallel",
    "torch.optim.optimizer",
}  # modules that anything may be imported from
NOT_OF_TORCH = {"os._exit", "_replace", "_asdict", "_fields"}  # of the standard library, and of its named tuples


def test_torchs_insides_are_touched_in_one_place_alone():
    """What torch does not document may change with any release: torch_internals has all of it, and tests for each name.

    A private name counts as torch's if gradwire does not define it: for other objects than `self` in the same file.
    """
    private = {path: private_names(tree) for path, tree in sources()}
    everywhere = set().union(*private.values())
    found = []
    for path, tree in sources():
        if path.startswith("torch_internals/") or path == OBSERVES_TORCHFT:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                known = everywhere if owner in ("self", "cls") else private[path]
                from_torch = owner.split(".")[0] in ("torch", "dist", "nn", "super()")
                if (from_torch or node.attr not in known) and not {node.attr, ast.unparse(node)} & NOT_OF_TORCH:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                if is_private(name) and not name.startswith("_gradwire") and name not in private[path]:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                of = getattr(node, "module", None)
                imported = [(of, f"{of}.{alias.name}") if of else (alias.name, alias.name) for alias in node.names]
                found += [
                    f"{path}:{node.lineno}: import of {name}"
                    for module, name in imported
                    if module.split(".")[0] == "torch"
                    and (module not in DOCUMENTED or "._" in name or "distributed_c10d" in name)
                ]
    assert not found, "\n".join(["use gradwire.torch_internals:", *found])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.Module) -> set[str]:
    """The private functions, classes, variables and fields that a file defines."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for target in assigned(tree):
        if isinstance(target, ast.Name):
            names.add(target.id)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
            names.add(target.attr)
    return {name for name in names if is_private(name)}
