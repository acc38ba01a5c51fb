"""One tensor to one frame and back: `Codec` encodes, `decode` needs nothing but the frame."""

from gradwire.codecs.decoding import (
    DECODERS,
    DEFAULT_LIMIT,
    ELEMENTS_PER_BYTE,
    Bytes,
    as_bytes,
    bound,
    decode,
    decode_onto,
    decode_payload,
    nonzero_positions,
    open_frame,
    payload_of,
)
from gradwire.codecs.encoding import CONVERTIBLE, Codec

__all__ = [
    "CONVERTIBLE",
    "DECODERS",
    "DEFAULT_LIMIT",
    "ELEMENTS_PER_BYTE",
    "Bytes",
    "Codec",
    "as_bytes",
    "bound",
    "decode",
    "decode_onto",
    "decode_payload",
    "nonzero_positions",
    "open_frame",
    "payload_of",
]
