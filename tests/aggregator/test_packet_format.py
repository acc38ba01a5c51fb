"""The aggregator's packet has one format: packet_format.h for C and C++, and packet_format.py for Python."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from gradwire.aggregator.packet import packet_format
from gradwire.aggregator.packet.packet_format import Accept, Join, Kind, Packet, WordOperation

HEADER_FILE = Path(packet_format.__file__).with_suffix(".h")
LETTERS = {"8": "B", "16": "H", "32": "I", "64": "Q"}
FORMATS = {  # the struct of packet_format.py that has the same fields
    "packet_header": packet_format.HEADER,
    "packet_challenge": packet_format.CHALLENGE,
    "packet_join": packet_format.JOIN,
    "packet_wait": packet_format.WAIT,
    "packet_accept": packet_format.ACCEPT,
    "packet_gone": packet_format.GONE,
}


def source() -> str:
    return re.sub(r"//[^\n]*", "", HEADER_FILE.read_text())


def constants() -> dict[str, int]:
    """All enumerators of the header, by name."""
    found = {}
    for body in re.findall(r"\benum(?: \w+)? \{(.*?)\}", source(), re.DOTALL):
        for name, value in re.findall(r"(\w+) = ([^,}]+)", body):
            found[name] = eval(re.sub(r"'(.)'", lambda match: str(ord(match[1])), value))
    return found


def fields(name: str) -> list[tuple[str, str]]:
    """The fields of a struct of the header: names, and what Python's struct module calls their types."""
    body = re.search(rf"PACKET_STRUCT {name} \{{(.*?)\}};", source(), re.DOTALL)[1]
    found = []
    for bits, field, length in re.findall(r"packet_u(\d+) (\w+)(?:\[(\w+)\])?;", body):
        found.append((field, f"{constants()[length]}s" if length else LETTERS[bits]))
    assert len(found) == body.count(";"), f"{name} has a field of another type"
    return found


def test_every_constant_is_the_same():
    """Whatever the header defines, Python has under the same name, and nothing else."""
    kinds, operations, numbers = {}, {}, {}
    for name, value in constants().items():
        family, _, rest = name.partition("_")
        {"KIND": kinds, "OPERATION": operations, "PACKET": numbers}[family][rest] = value
    assert kinds == {kind.name: kind.value for kind in Kind}
    assert operations == {operation.name: operation.value for operation in WordOperation}
    assert numbers.pop("MAGIC").to_bytes(2, "little") == packet_format.MAGIC
    assert numbers.pop("BYTES") == packet_format.PACKET_BYTES
    in_python = {name: value for name, value in vars(packet_format).items() if isinstance(value, int)}
    assert in_python.pop("PACKET_BYTES") == packet_format.HEADER_BYTES + 4 * packet_format.WORDS
    assert numbers == in_python


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_lies_where_it_lies_in_c(name):
    letters = "".join(letter for _, letter in fields(name))
    ours = FORMATS[name].format.lstrip("<").replace("2sBB", "HBB")  # the magic is a number in C
    assert ours == letters
    assert struct.calcsize(f"@{letters}") == FORMATS[name].size, "a compiler would add padding"


def test_all_structs_are_compared():
    assert set(re.findall(r"PACKET_STRUCT (\w+) \{", source())) == {*FORMATS, "packet"}


def test_fields_are_packed_by_their_names():
    """Each field of a packet stands where the header has the field of that name."""

    def at(name: str, data: bytes) -> dict[str, object]:
        names, letters = zip(*fields(name), strict=True)
        return dict(zip(names, struct.unpack_from("<" + "".join(letters), data), strict=True))

    packet = Packet(Kind.DATA, 0x01020304, 0x05060708, 0x090A, 0x0B0C, WordOperation.OR, bytes(4 * packet_format.WORDS))
    data = packet.pack(bytes(16))
    read = packet_format.unpack(data)
    assert len(data) == packet_format.PACKET_BYTES
    assert at("packet_header", data) == {
        "magic": int.from_bytes(b"GW", "little"), "version": 1, "kind": 7, "session": 0x01020304, "round": 0x05060708,
        "slot": 0x090A, "worker": 0x0B0C, "operation": 1, "code": read.code,
    }  # fmt: skip
    join = Join(b"n" * 16, b"c" * 8, b"j" * 16, 1, 2, 3, 4)
    assert at("packet_join", join.pack()) == {**vars(join), "zero": 0} and Join.unpack(join.pack()) == join
    accept = Accept(b"n" * 16, b"s" * 16, 5, 6, 7)
    assert at("packet_accept", accept.pack()) == vars(accept) and Accept.unpack(accept.pack()) == accept
    nonce = b"n" * 16
    challenge = packet_format.challenge_payload(nonce, b"c" * 8)
    assert at("packet_challenge", challenge) == {"nonce": nonce, "cookie": b"c" * 8}
    assert at("packet_wait", packet_format.wait_payload(nonce, [0, 2])) == {"nonce": nonce, "joined": 5}
    assert at("packet_gone", packet_format.gone_payload(9, 3)) == {"session": 9, "worker": 3}


def test_the_xdp_program_and_the_native_code_define_no_packet_of_their_own():
    here = HEADER_FILE.parent.parent
    for text in (path.read_text() for path in here.glob("xdp/*.bpf.*")):
        assert not re.search(r"KIND_\w+ =|\bmagic;", text)
    assert '#include "packet_format.h"' in (here / "xdp/maps.bpf.h").read_text()
