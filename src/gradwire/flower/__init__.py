"""Federated learning on Flower: `compress`, a mod for clients, and `Compressed`, a wrapper for strategies."""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("gradwire.flower needs Flower: pip install 'gradwire[flower]'") from error

from .lengths import message_bytes
from .mod import compress
from .rate import AdaQuantFL, FedDQ
from .strategy import Compressed
from .wire_grid import Wire

__all__ = ["AdaQuantFL", "Compressed", "FedDQ", "Wire", "compress", "message_bytes"]
