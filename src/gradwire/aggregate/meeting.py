"""All ranks of a link meet at an aggregator, or none of them does."""

from __future__ import annotations

import os
import warnings

from ..errors import AggregateError, GradwireError, SpecError
from .fallback import ByAggregator
from .in_network import InNetwork
from .link import Link, timeout_of
from .word_sums import WordSums

JOB = 16  # bytes that tell a job from all others
REASON = 400  # bytes of one
PATIENCE = 5.0  # seconds that an aggregator has to answer, where training can go on without it


def by_aggregator(link: Link, address: str, falls_back: bool, timeout: float | None) -> WordSums | None:
    """What sums words there; None where it does not answer all ranks, and they are to go on without it."""
    job = link.gather_short(os.urandom(JOB))[0]
    seconds = timeout or timeout_of(link.group).total_seconds()
    reason: GradwireError | None = None
    client = None
    try:
        client = InNetwork(address, link.rank, link.world, job, seconds)
        if falls_back:
            client.patience = PATIENCE
        client.join()
    except (AggregateError, SpecError) as error:
        reason = error
    text = str(reason).encode()[:REASON] if reason else b""
    reasons = [other.rstrip(b"\0").decode(errors="replace") for other in link.gather_short(text.ljust(REASON, b"\0"))]
    if not any(reasons):
        assert client is not None
        if not falls_back:
            return ByAggregator(client, None)
        # A group of its own: a rank that has the last sum of a step goes on with other exchanges of the link, while
        # those that have lost it wait for that rank here.
        apart = Link.beside(link.group, timeout)
        apart.roll_call = link.roll_call
        return ByAggregator(client, apart)
    if client is not None:
        client.close()
    if isinstance(reason, SpecError):  # a mistake, whatever was chosen
        raise reason
    rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
    if not falls_back:
        raise AggregateError(f"rank {rank} could not join the aggregator: {why}") from reason
    warnings.warn(f"going on over the process group: rank {rank}: {why}", RuntimeWarning, stacklevel=2)
    return None
