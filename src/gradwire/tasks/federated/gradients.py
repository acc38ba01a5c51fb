"""A model and the gradients of batches, on a CPU or a GPU.

A GPU gets the forward and backward pass as one CUDA graph, since small models would spend most of their time on
launches. A process keeps the model and its graph for all clients that it plays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradwire.tasks.base import loss_of
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.training import own_device

State = dict[str, torch.Tensor]
WARM_UP = 3  # passes before a capture, which CUDA graphs need


def gradients_for(settings: FederatedSettings) -> BatchGradients:
    """Return the model of a task with its gradients; on a GPU, always the same object for the same settings."""
    return _on_gpu(settings) if settings.device != "cpu" else BatchGradients(settings)


class BatchGradients:
    """A model that computes the gradients of one batch at a time, in the parameters' `grad`.

    One thread of the client's process uses it.
    """

    def __init__(self, settings: FederatedSettings):
        self.device = own_device(settings.device)
        self.model = settings.load().build_model().to(self.device)

    def load(self, state: State) -> None:
        """Set all parameters and buffers of the model."""
        self.model.load_state_dict(state)

    def state(self) -> State:
        """Return all parameters and buffers of the model, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of a batch, in place of those before, and return the loss."""
        self.model.zero_grad()
        loss = loss_of(self.model(inputs), targets)
        torch.autograd.backward(loss)
        return loss.detach()


class GraphedGradients(BatchGradients):
    """The same on a GPU: batches of the usual size are a replay of one CUDA graph; the last of an epoch may be smaller.

    States are copied between CPU and GPU as one tensor: a hundred tensors would wait for the GPU a hundred times.
    """

    graph: torch.cuda.CUDAGraph | None = None

    def load(self, state: State) -> None:
        """Set all parameters and buffers of the model."""
        tensors = self.model.state_dict()
        flat = torch.cat([state[name].reshape(-1).double() for name in tensors]).to(self.device)
        parts = torch.split(flat, [t.numel() for t in tensors.values()])
        for tensor, values in zip(tensors.values(), parts, strict=True):
            tensor.copy_(values.view(tensor.shape))

    def state(self) -> State:
        """Return all parameters and buffers of the model, on the CPU."""
        tensors = self.model.state_dict()
        flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors.values()]).cpu()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
        return {name: p.view(t.shape).to(t.dtype) for (name, t), p in zip(tensors.items(), parts, strict=True)}

    def __init__(self, settings: FederatedSettings):
        super().__init__(settings)
        self.batch_size = settings.batch_size

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of a batch, and return the loss."""
        if len(inputs) != self.batch_size:
            return self._other_size(inputs, targets)
        if self.graph is None:
            self._capture(inputs, targets)
        assert self.graph is not None
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self.graph.replay()
        return self._loss

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        make_stream: Any = torch.cuda.Stream  # which torch leaves without types
        side = make_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                super().__call__(self._inputs, self._targets)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()  # the capture allocates the gradients, and every replay overwrites them
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._loss = super().__call__(self._inputs, self._targets)
        self.model.load_state_dict(before)  # the warm-up has changed the statistics of batch normalization

    def _other_size(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            return super().__call__(inputs, targets)
        loss = loss_of(self.model(inputs), targets)
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)  # into the memory that the graph writes to
        return loss.detach()


@functools.lru_cache(maxsize=1)
def _on_gpu(settings: FederatedSettings) -> GraphedGradients:
    return GraphedGradients(settings)
