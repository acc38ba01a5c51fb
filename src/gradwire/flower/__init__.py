"""Federated learning on Flower: `compress`, a mod for clients, and `Compressed`, a wrapper for strategies."""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("gradwire.flower needs Flower: pip install 'gradwire[flower]'") from error

from gradwire.flower.client.mod import compress
from gradwire.flower.server.strategy import Compressed
from gradwire.flower.server.wire_grid import Wire
from gradwire.flower.shared.adaptive_rate import AdaQuantFL, FedDQ
from gradwire.flower.shared.message_lengths import message_bytes

__all__ = ["AdaQuantFL", "Compressed", "FedDQ", "Wire", "compress", "message_bytes"]
