"""The native module is built with the protections that a reader of other people's bytes should have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from support.helpers import native

pytestmark = [
    pytest.mark.skipif(native is None, reason="no native module (test_coders says so, if that is wrong)"),
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="needs an ELF file and readelf"),
]


def readelf(*options: str) -> str:
    [module] = Path(gradwire._native.__file__).parent.glob("_native*.so")
    return subprocess.run(["readelf", "-W", *options, str(module)], capture_output=True, text=True, check=True).stdout


def test_addresses_of_functions_cannot_be_overwritten() -> None:
    """Full RELRO: all of them are looked up when the module is loaded, and read-only afterwards."""
    assert "GNU_RELRO" in readelf("--program-headers")
    assert "NOW" in readelf("--dynamic")


def test_the_stack_is_guarded_and_not_executable() -> None:
    [stack] = [line for line in readelf("--program-headers").splitlines() if "GNU_STACK" in line]
    assert " RWE " not in stack
    assert "__stack_chk_fail" in readelf("--dyn-syms")


def test_lengths_of_copies_are_checked() -> None:
    """_FORTIFY_SOURCE: functions of the C library are called by names that end in _chk where a length is known."""
    assert "_chk@" in readelf("--dyn-syms").replace("__stack_chk_fail@", "")
