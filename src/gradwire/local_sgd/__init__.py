"""Communication delay: several local steps, then one exchange of the compressed update (docs/local-sgd.md)."""

from gradwire.local_sgd.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
