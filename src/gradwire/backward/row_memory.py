"""What a layer remembers of the rows that were not chosen: their two factors, in the slots of the batch."""

from __future__ import annotations

import torch

from gradwire.errors import GradwireError, SpecError

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class RowMemory:
    """Row j of `inputs` and row j of `outputs` are what slot j of the batch has left: the factors of an outer product.

    Slots appear when a batch needs them. A shorter batch uses the first ones; the others wait as they are.
    """

    def __init__(self, decay: float = 1.0, dtype: torch.dtype | None = None) -> None:
        if not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise SpecError(
                f"decay={decay!r}: a memory keeps a share above 0 and at most 1; for no memory, give layers decay=0, "
                "and gradwire.backward.linear no memory="
            )
        if dtype not in (None, *DTYPES):
            raise SpecError(f"memory_dtype={dtype}: give torch.float32, torch.bfloat16 or torch.float64")
        self.decay, self.dtype = float(decay), dtype
        self.inputs: torch.Tensor | None = None
        self.outputs: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """How many bytes the memory takes."""
        return sum(t.numel() * t.element_size() for t in (self.inputs, self.outputs) if t is not None)

    def clear(self) -> None:
        """Forget everything; slots appear anew with the next batch."""
        self.inputs = self.outputs = None

    def move(self, device: torch.device) -> None:
        """Take the memory to another device; to the meta device, which has no values, by forgetting it."""
        if self.inputs is not None and self.outputs is not None and self.inputs.device != device:
            if device.type == "meta":
                return self.clear()
            self.inputs, self.outputs = self.inputs.to(device), self.outputs.to(device)

    def load(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Take over copies of these factors, row j of one and row j of the other."""
        with torch.inference_mode(False):  # what is made in that mode cannot be trained with after it
            self.inputs, self.outputs = inputs.detach().clone(), outputs.detach().clone()

    def slots(self, inputs: torch.Tensor, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of these rows, to be read and written; made or made longer where there is too little."""
        if self.inputs is not None and self.outputs is not None:
            known, new = (self.inputs.shape[1], self.outputs.shape[1]), (inputs.shape[1], outputs.shape[1])
            if known != new:
                raise GradwireError(
                    f"the memory is of a layer with {known[0]} inputs and {known[1]} outputs, but the rows have "
                    f"{new[0]} and {new[1]}: a RowMemory belongs to one weight; where a layer got another weight, "
                    "call gradwire.backward.forget(model)"
                )
        self.inputs = self._long_enough(self.inputs, inputs)
        self.outputs = self._long_enough(self.outputs, outputs)
        return _first(self.inputs, inputs.shape[0]), _first(self.outputs, outputs.shape[0])

    def _long_enough(self, memory: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype or torch.promote_types(rows.dtype, torch.float32)
        have = 0 if memory is None else memory.shape[0]
        if memory is not None and have >= rows.shape[0] and memory.device == rows.device and memory.dtype == dtype:
            return memory
        with torch.inference_mode(False):  # as in `load`
            longer = torch.zeros(max(have, len(rows)), rows.shape[1], dtype=dtype, device=rows.device)
        if memory is not None:
            longer[:have] = memory
        return longer


def _first(memory: torch.Tensor, count: int) -> torch.Tensor:
    return memory if memory.shape[0] == count else memory[:count]
