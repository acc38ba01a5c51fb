"""Mem-AOP-GD: cheaper backward passes, from K of the M outer products of a weight gradient. See docs/backward.md."""

from .choice import POLICIES
from .convert import convert, converted, forget, revert
from .function import linear
from .layers import Linear
from .memory import RowMemory

__all__ = ["POLICIES", "Linear", "RowMemory", "convert", "converted", "forget", "linear", "revert"]
