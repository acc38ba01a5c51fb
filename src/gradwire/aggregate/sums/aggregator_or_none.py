"""All ranks of a link meet at an aggregator, or none of them does."""

from __future__ import annotations

import os
import warnings

from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregate.sums.aggregator_fallback import AggregatorSums
from gradwire.aggregate.sums.word_sums import WordSums
from gradwire.aggregate.transport.link import Link, timeout_of
from gradwire.aggregator.packet.packet_format import JOB_BYTES
from gradwire.errors import AggregateError, GradwireError

REASON = 400  # bytes of one
FIRST_ANSWER = 30.0  # seconds until an aggregator that never answered is given up
PATIENCE = 5.0  # seconds that an aggregator has to answer, where training can go on without it


def aggregator_sums(link: Link, address: str, falls_back: bool, timeout: float | None) -> WordSums | None:
    """What sums words there; None where it does not answer all ranks, and they are to go on without it."""
    job = link.gather_short(os.urandom(JOB_BYTES))[0]
    seconds = timeout or timeout_of(link.group).total_seconds()
    client = _client(link, address, job, seconds)
    # All ranks are here, so joining takes as long as the aggregator takes. The rest of the time is for telling.
    client.patience = min(seconds / 2, PATIENCE if falls_back else FIRST_ANSWER)
    reason = None
    try:
        client.join()
    except AggregateError as error:
        reason = error
    found = _first_reason(link, reason)
    if not found:
        client.patience = PATIENCE if falls_back else seconds
        return AggregatorSums(client, _apart(link, timeout) if falls_back else None)
    client.close()
    if not falls_back:
        raise AggregateError(found) from reason
    warnings.warn(f"going on over the process group: {found}", RuntimeWarning, stacklevel=2)
    return None


def _apart(link: Link, timeout: float | None) -> Link:
    """A group of its own: a rank that has the last sum of a step goes on with other exchanges of the link, while those
    that have lost it wait for that rank here."""
    apart = Link.beside(link.group, timeout)
    apart.roll_call = link.roll_call
    return apart


def _client(link: Link, address: str, job: bytes, seconds: float) -> InNetwork:
    """No rank waits for one without a key, an address or native code: that is a mistake, whatever was chosen."""
    client, mistake = None, None
    try:
        client = InNetwork(address, link.rank, link.world, job, seconds)
    except GradwireError as error:
        mistake = error
    found = _first_reason(link, mistake)
    if mistake is not None:
        raise mistake
    if found:
        raise AggregateError(found)
    assert client is not None
    return client


def _first_reason(link: Link, reason: GradwireError | None) -> str:
    """What the first rank that cannot go on says; empty if all can."""
    text = str(reason).encode()[:REASON] if reason else b""
    told = [other.rstrip(b"\0").decode(errors="replace") for other in link.gather_short(text.ljust(REASON, b"\0"))]
    return next((f"rank {rank} could not join the aggregator: {why}" for rank, why in enumerate(told) if why), "")
