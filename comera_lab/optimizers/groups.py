"""Which parameters are projected, by name, and updates layer by layer during backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from comera_lab.optimizers.base import ProjectedOptimizer


def projection_groups(model: nn.Module, match: Sequence[str], **settings: Any) -> list[dict[str, Any]]:
    """Two groups of named parameters: those to project, with `settings` (rank=.., lr=..), and all others, unprojected.

    To project are matrices and convolutions with one of `match` in their name: ("attn", "mlp"). Norms, biases and
    scalars that match are not; frozen parameters are in neither group. Raises ValueError if nothing is left.
    """
    if isinstance(match, str):
        raise ValueError(f"match must be a sequence of name parts, got the text {match!r}. Give ({match!r},).")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    chosen = [(name, p) for name, p in named if p.ndim in (2, 4) and any(part in name for part in match)]
    if not chosen:
        names = ", ".join(name for name, p in named if p.ndim in (2, 4))
        raise ValueError(
            f"match must meet the name of a matrix or convolution, got {tuple(match)} for: {names or 'none at all'}. "
            "Name a part of one of these."
        )
    taken = {id(parameter) for _, parameter in chosen}
    others = [(name, parameter) for name, parameter in named if id(parameter) not in taken]
    groups: list[dict[str, Any]] = [{"params": chosen, **settings}]
    return [*groups, {"params": others, "rank": None, "rank_ratio": None}] if others else groups


class step_in_backward:
    """Update each parameter as soon as its gradient is complete, and free the gradient: one is alive at a time.

    After `loss.backward()` call `optimizer.step()` as always: it has nothing left to do, ends the iteration and keeps
    schedulers in step. Gradients cannot be accumulated, clipped by their total norm or unscaled this way: a second
    backward before `step` raises RuntimeError. `.remove()` goes back to normal updates.
    """

    def __init__(self, optimizer: ProjectedOptimizer) -> None:
        self._optimizer = optimizer
        self._done: set[int] = set()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._update) for p in parameters]
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._done.clear()))

    def _update(self, parameter: Tensor) -> None:
        if id(parameter) in self._done:
            raise RuntimeError(
                "layer-wise updates take one backward per step, got a second one: its gradients cannot be added to "
                "those already used. Call optimizer.step() after each backward, or remove() the layer-wise updates."
            )
        self._optimizer.update([parameter])
        parameter.grad = None
        self._done.add(id(parameter))

    def remove(self) -> None:
        """Take the hooks off; gradients stay after backward again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
