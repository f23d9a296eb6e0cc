"""What every optimizer of the kit shares with torch.optim: closure, own settings of groups, no capture or tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch._compile import _disable_dynamo

from comera_lab.optimizers import checks
from comera_lab.optimizers.report import OptimizerReport


class EagerOptimizer(torch.optim.Optimizer):
    """torch.optim.Optimizer whose subclass gives `update()`. Python decides there what is due in a step.

    torch.compile leaves it alone: traced, each step would be another graph. A CUDA graph would replay one step's
    decisions, so it is refused.
    """

    # what a subclass gives

    splits = False  # whether it steps parameters of which each process holds a part (FSDP2)

    def update(self) -> None:
        """`step` without closure and hooks."""
        raise NotImplementedError

    def report(self) -> OptimizerReport:
        """Name, shape, rank and bytes of every parameter; str() prints a table."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is a closure.

        Raises ValueError, with nothing changed, for sparse and for non-finite gradients, naming the parameters;
        RuntimeError while a CUDA graph is being captured.
        """
        checks.refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _untraced(self.update)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its own settings win over the defaults. The caller's dict stays as it is."""
        group = checks.checked_group(param_group, self.defaults)
        checks.check_parts({**self.defaults, **group}, type(self).__name__, splits=self.splits)
        super().add_param_group(group)

    def refuse_idle_projection(self) -> None:
        """Raises ValueError where groups ask for projection and no parameter is projected."""
        wanted = [group for group in self.param_groups if (group["rank"], group["rank_ratio"]) != (None, None)]
        if wanted and not any(row.rank for row in self.report().rows):
            sizes = [parameter.numel() for group in wanted for parameter in group["params"]]
            raise ValueError(
                f"rank or rank_ratio asks for projection, but none of {len(sizes)} parameters is projected: the "
                f"largest has {max(sizes, default=0):,} elements. Matrices and convolutions of more than plain_up_to = "
                f"{wanted[0]['plain_up_to']:,} elements are; lower plain_up_to, or set rank and rank_ratio to None."
            )


# Not torch.compiler.disable: that would import the whole compiler with the kit.
@_disable_dynamo
def _untraced(update: Callable[[], None]) -> None:
    update()
