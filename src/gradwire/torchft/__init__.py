"""A process group for torchft, by which replicas that come and go exchange frames (docs/torchft.md).

One allreduce goes this way:

1. `process_group.ProcessGroup.allreduce` decides whether the tensor is compressed, and
   `replica_rounds.ReplicaRounds.next_call` gives it the name that its memory is kept by.
2. `replicas.Replicas.add_up` cuts it into messages, which the exchange thread takes through gradwire's all-gather.
3. `sum_under_way.SumUnderWay` is what torchft waits for; it holds the error if a replica was lost.
4. `observed_calls` hears torchft's vote, and `ReplicaRounds.end` commits the memories or leaves the round undecided.
5. `ProcessGroup.configure` makes the replicas of the next quorum meet (`meeting`), which settles undecided rounds.
"""

try:
    import torchft  # noqa: F401
except ImportError as error:
    raise ImportError("gradwire.torchft needs torchft: pip install torchft (or 'gradwire[torchft]')") from error

from gradwire.torchft import observed_calls
from gradwire.torchft.process_group import ProcessGroup

observed_calls.observe()

__all__ = ["ProcessGroup"]
