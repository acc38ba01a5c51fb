"""Everything gradwire raises on purpose derives from `GradwireError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradwireError(Exception):
    """Base of all errors raised on purpose; raised itself for tensors that no codec can take."""


class SpecError(GradwireError, ValueError):
    """An unknown name or a bad parameter in a spec; the message lists what is allowed."""


class FrameError(GradwireError, ValueError):
    """A damaged, truncated, hostile or too-new frame."""


class AggregateError(GradwireError, RuntimeError):
    """Workers disagree, or a peer was lost."""


class CheckpointError(GradwireError):
    """A checkpoint that is missing, damaged or of another run."""


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> SpecError:
    """A SpecError that lists what is allowed and suggests the nearest name.

    Users may write anything in place of a name.
    """
    allowed = list(allowed)
    near = difflib.get_close_matches(str(name).lower(), allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return SpecError(f"unknown {kind} {name!r}{hint} (allowed: {', '.join(allowed)})")
