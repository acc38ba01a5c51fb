"""Federated learning on Flower: `compress`, a mod for clients, and `Compressed`, a wrapper for strategies.

`client` holds what runs in a client app, `server` what runs in a server app, and `shared` the bytes between them; the
first two never import each other. One update goes this way from a client to the strategy:

1. `server.wire_grid.Wire.send_and_receive` takes the strategy's messages, puts a `Note` into each (which training and
   model it is, which update of this client arrived last), and sends them through Flower's grid.
2. `client.mod.CompressMod.__call__` gets the message before the client's own function does, and completes the model if
   downloads are compressed.
3. `client.client_memory.ClientMemory.settle` returns what the updates that arrived have left out; then the client
   trains.
4. `client.model_changes.changes` subtracts the received model from the trained one.
5. `shared.update.encode` turns the differences and the error memory into frames, by coarser recipes if there is a byte
   budget.
6. `shared.message.seal` adds a token, the number of the model and a checksum. `ClientMemory.propose` stores the new
   error memory, and the reply leaves.
7. `server.reply_intake.ReplyIntake.take` gets the reply from the `Wire`, with the message that it answers.
8. `server.reply_checks.ReplyRules` checks its records, and `server.replies.decoded` the header of the update; it calls
   `shared.update.decode`, which adds the differences to the model that this client was sent.
9. `ReplyIntake.take` rejects replies that exceed the limits of the round, and accepts the tokens of the rest; the
   strategy gets them as ordinary arrays, and the next `Note` tells the client that its update arrived.
"""

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
