"""A model and its gradients, on a CPU or a GPU.

A GPU gets the passes over a batch as one CUDA graph: small models spend most of their time on launches otherwise. The
model and its graph stay with the process, for all clients that it plays.
"""

from __future__ import annotations

import functools

import torch

from gradwire.tasks.base import loss_of
from gradwire.tasks.federated.settings import FederatedSettings
from gradwire.tasks.training import own_device

State = dict[str, torch.Tensor]
WARM_UP = 3  # passes before a capture, as CUDA graphs want them


def gradients_for(settings: FederatedSettings) -> Gradients:
    return _on_gpu(settings) if settings.device != "cpu" else Gradients(settings)


class Gradients:
    def __init__(self, settings: FederatedSettings):
        self.device = own_device(settings.device)
        self.model = settings.load().build_model().to(self.device)

    def load(self, state: State) -> None:
        self.model.load_state_dict(state)

    def state(self) -> State:
        return {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Those of a batch, in the parameters' `grad`; returns the loss."""
        self.model.zero_grad()
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        return loss.detach()


class Graphed(Gradients):
    """Batches of the usual size are a replay; the last one of an epoch may be smaller.

    States travel as a whole: a hundred tensors one by one would wait for the GPU a hundred times.
    """

    graph: torch.cuda.CUDAGraph | None = None

    def load(self, state: State) -> None:
        own = self.model.state_dict()
        flat = torch.cat([state[name].reshape(-1).double() for name in own]).to(self.device)
        for tensor, values in zip(own.values(), flat.split([t.numel() for t in own.values()]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def state(self) -> State:
        own = self.model.state_dict()
        flat = torch.cat([tensor.reshape(-1).double() for tensor in own.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in own.values()])
        return {name: p.view(t.shape).to(t.dtype) for (name, t), p in zip(own.items(), parts, strict=True)}

    def __init__(self, settings: FederatedSettings):
        super().__init__(settings)
        self.batch_size = settings.batch_size

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
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
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                super().__call__(self._inputs, self._targets)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad()  # gradients are made in the capture, and every replay writes them anew
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._loss = super().__call__(self._inputs, self._targets)
        self.model.load_state_dict(before)  # statistics of batch normalization have seen the warm-up

    def _other_size(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            return super().__call__(inputs, targets)
        loss = loss_of(self.model(inputs), targets)
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)  # where the graph writes, too
        return loss.detach()


@functools.lru_cache(maxsize=1)
def _on_gpu(settings: FederatedSettings) -> Graphed:
    return Graphed(settings)
