"""Connects the ranks of a link to an aggregator: all of them, or none."""

from __future__ import annotations

import os
import warnings

from gradwire.aggregate.sums.aggregator_client import InNetwork
from gradwire.aggregate.sums.aggregator_fallback import AggregatorSums
from gradwire.aggregate.sums.word_sums import WordSums
from gradwire.aggregate.transport.link import Link, timeout_of
from gradwire.aggregator.packet.packet_format import JOB_BYTES
from gradwire.errors import AggregateError, GradwireError

REASON_BYTES = 400
FIRST_ANSWER = 30.0  # seconds until an aggregator that never answered is given up
PATIENCE = 5.0  # seconds that an aggregator has to answer, where training can go on without it


def aggregator_sums(link: Link, address: str, falls_back: bool, timeout: float | None) -> WordSums | None:
    """Return what sums words at the aggregator at this address; all ranks of the link call this together.

    Every rank joins, or none does. If one cannot, all raise AggregateError, or, if `falls_back`, all warn and return
    None: they sum words over the process group. `timeout` is in seconds; None means that of the process group.
    """
    job = link.gather_short(os.urandom(JOB_BYTES))[0]
    seconds = timeout or timeout_of(link.group).total_seconds()
    client = _client(link, address, job, seconds)
    # All ranks are here, so joining takes as long as the aggregator takes; then ranks tell each other.
    client.set_patience(min(seconds / 2, PATIENCE if falls_back else FIRST_ANSWER))
    reason = None
    try:
        client.join()
    except AggregateError as error:
        reason = error
    first_reason = _first_reason(link, reason)
    if not first_reason:
        client.set_patience(PATIENCE if falls_back else seconds)
        return AggregatorSums(client, _separate_link(link, timeout) if falls_back else None)
    client.close()
    if not falls_back:
        raise AggregateError(first_reason) from reason
    warnings.warn(f"going on over the process group: {first_reason}", RuntimeWarning, stacklevel=2)
    return None


def _separate_link(link: Link, timeout: float | None) -> Link:
    """Return a link with a process group of its own, for sums after the aggregator was lost.

    A rank that still got the last sum of a step goes on with other exchanges of the first link, while those that did
    not wait for it on this one.
    """
    separate = Link.beside(link.group, timeout)
    separate.share_roll_call(link)
    return separate


def _client(link: Link, address: str, job: bytes, seconds: float) -> InNetwork:
    """Return this rank's client. All ranks raise an error if one has no key, no address or no native code."""
    client, mistake = None, None
    try:
        client = InNetwork(address, link.rank, link.world, job, seconds)
    except GradwireError as error:
        mistake = error
    first_reason = _first_reason(link, mistake)
    if mistake is not None:
        raise mistake
    if first_reason:
        raise AggregateError(first_reason)
    assert client is not None
    return client


def _first_reason(link: Link, reason: GradwireError | None) -> str:
    """Return the reason of the first rank that cannot go on; empty if all can."""
    text = str(reason).encode()[:REASON_BYTES] if reason else b""
    reasons = [
        other.rstrip(b"\0").decode(errors="replace") for other in link.gather_short(text.ljust(REASON_BYTES, b"\0"))
    ]
    return next((f"rank {rank} could not join the aggregator: {why}" for rank, why in enumerate(reasons) if why), "")
