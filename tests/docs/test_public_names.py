"""What `import gradwire` offers."""

import subprocess
import sys

import pytest

import gradwire

WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
from gradwire import *
assert DataParallel and Spec and Recipe and Handle
try:
    import gradwire.flower
except ImportError:
    print("flower is missing")
"""


@pytest.mark.thorough
def test_a_star_import_needs_no_flower():
    result = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], check=False, capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("flower is missing", 0), result.stderr


def test_every_public_name_is_there():
    assert [name for name in gradwire.__all__ if not hasattr(gradwire, name)] == []


def test_flower_is_imported_when_it_is_asked_for():
    assert gradwire.flower.Wire is not None
