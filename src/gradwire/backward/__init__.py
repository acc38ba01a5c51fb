"""Mem-AOP-GD: cheaper backward passes, from K of the M outer products of a weight gradient. See docs/backward.md."""

from gradwire.backward.autograd import linear
from gradwire.backward.convert_model import convert, converted, forget, revert
from gradwire.backward.layers import Linear
from gradwire.backward.row_choice import POLICIES
from gradwire.backward.row_memory import RowMemory

__all__ = ["POLICIES", "Linear", "RowMemory", "convert", "converted", "forget", "linear", "revert"]
