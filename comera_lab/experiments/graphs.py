"""A whole training step as CUDA graphs: forward, loss with objective, backward, optimizer; bases renewed in between.

A graph replays the same kernels on the same addresses, without the host: what a step of many small kernels waits for.
Two graphs, because COAP's bases are renewed from the gradient and before the update, on few steps and with
factorisations that cannot be captured: [forward, loss, backward] - renew if due, eagerly - [update].
Rate and bias corrections are read from the device (optimizers/device_step.py), so schedules work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from comera_lab.optimizers.device_step import DeviceStep
from comera_lab.shapes import ShapeError

Loss = Callable[..., Tensor]
Objective = Callable[[Tensor, nn.Module], Tensor]


class Capture(Protocol):
    """How calls become something to replay."""

    def settle(self, call: Callable[[], None]) -> None:
        """Run `call` as it must run before it can be captured."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Take `call` down and return what replays it. Taking down need not run it: replay to have its effect."""


class CudaCapture:
    """torch.cuda.CUDAGraph, all graphs of one capture in one memory pool."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("CUDA graphs need a CUDA device, got none. Train eagerly here.")
        self._pool = torch.cuda.graph_pool_handle()

    def settle(self, call: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        return graph.replay


class GraphedStep:
    """Training steps on batches of one shape: the first `eager_steps` as usual, then captured and replayed.

    `loss(model, *batch)` gives a 0-d tensor; `objective(loss, model)` replaces it in backward. `step(*batch)` makes one
    update and returns the loss before it, on the device: reading it waits for the device, so read it seldom. The
    optimizer must be AdamW or COAPAdamW; its groups' "lr" may change at any time. After the capture gradients belong
    to the graph: do not set them to None. Raises ShapeError for a batch of another shape or dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        objective: Objective | None = None,
        eager_steps: int = 3,
        capture: Capture | None = None,
    ) -> None:
        if eager_steps < 2:
            raise ValueError(
                f"eager_steps must be at least 2, got {eager_steps}: the first makes the optimizer's state, "
                "the next one loads the kernels of the update. Leave it at 3."
            )
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self._loss_of, self._eager_steps = loss, eager_steps
        self._capture: Capture = CudaCapture() if capture is None else capture
        self._batch: tuple[Tensor, ...] = ()
        self._loss: Tensor | None = None
        self._update: DeviceStep | None = None
        self._replay_backward: Callable[[], None] = self._backward
        self._replay_update: Callable[[], None] = lambda: None
        self.steps_done = 0
        self.renewed = 0

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._update is not None

    def step(self, *batch: Tensor) -> Tensor:
        """One update on `batch`; the loss before it (0-d, on the device, a copy)."""
        self._take(batch)
        if self.steps_done < self._eager_steps:
            self._capture.settle(self._eager)
        else:
            if self._update is None:
                self._record_backward()
            assert self._update is not None
            self._update.write_scalars()  # first: the copy is under way while the GPU is busy with the gradients
            self._replay_backward()
            self.renewed += self._update.renew()
            if self.steps_done == self._eager_steps:
                self._replay_update = self._capture.record(self._update.run)
            self._replay_update()
            self._update.count()
        self.steps_done += 1
        assert self._loss is not None
        return self._loss.clone()

    def _take(self, batch: tuple[Tensor, ...]) -> None:
        if not self._batch:
            self._batch = tuple(tensor.clone() for tensor in batch)
            return
        got, want = ([(tuple(tensor.shape), tensor.dtype) for tensor in side] for side in (batch, self._batch))
        if got != want:
            raise ShapeError(
                f"a graph takes batches like the first one, {want}, got {got}. Drop the last, smaller batch."
            )
        for kept, new in zip(self._batch, batch, strict=True):
            kept.copy_(new)

    def _eager(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._backward()
        if self.steps_done == 0:
            self.optimizer.step()
            return
        # a kernel's first launch loads its code, which must not happen while a graph is taken down
        update = DeviceStep(self.optimizer)
        update.write_scalars()
        self.renewed += update.renew()
        update.run()
        update.count()

    def _backward(self) -> None:
        loss = self._loss_of(self.model, *self._batch)
        torch.autograd.backward(loss if self.objective is None else self.objective(loss, self.model))
        self._loss = loss.detach()

    def _record_backward(self) -> None:
        # without old gradients to add to, backward writes new ones into the graph's own memory
        self.optimizer.zero_grad(set_to_none=True)
        self._replay_backward = self._capture.record(self._backward)
        self._update = DeviceStep(self.optimizer)
