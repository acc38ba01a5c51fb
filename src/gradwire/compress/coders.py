"""The list of all coders. The coding byte has room for four, and there are four.

Each is a file with a `Coder` (coding.py) and an entry here; a fifth would need a new version of the wire format.
"""

from __future__ import annotations

from gradwire.compress.coding import Coder
from gradwire.compress.constant import ConstantCoder
from gradwire.compress.huffman import HuffmanCoder
from gradwire.compress.rans import RansCoder
from gradwire.compress.raw import RawCoder

RAW, CONSTANT, HUFFMAN, RANS = RawCoder(), ConstantCoder(), HuffmanCoder(), RansCoder()
BY_NUMBER: tuple[Coder, ...] = (RAW, CONSTANT, HUFFMAN, RANS)
if [coder.wire_number for coder in BY_NUMBER] != [0, 1, 2, 3]:
    raise ValueError("coders are not listed in the order of their wire numbers")

CODERS: dict[str, Coder] = {coder.name: coder for coder in (RAW, HUFFMAN, RANS)}  # what users may write in specs
