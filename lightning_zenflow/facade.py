"""What the precision plugin steps instead of the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_zenflow._compat import mark_stepped
from lightning_zenflow.engine import ZenFlowEngine


class OptimizerFacade:
    """Looks like the user's AdamW, steps the engine.

    Everything but ``step`` is the user's optimizer's; ``isinstance(facade, AdamW)`` holds, because
    hooks such as ``on_before_optimizer_step`` are given this object.
    """

    # A fused AdamW says that it unscales gradients itself; then Lightning would not clip them.
    _step_supports_amp_scaling = False

    def __init__(self, engine: ZenFlowEngine, before_step: Callable[[], None]) -> None:
        self._engine = engine
        self._before_step = before_step

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._engine.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.optimizer, name)

    def __repr__(self) -> str:
        return repr(self._engine.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``closure`` (forward, backward, clipping), then one step of the engine."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._before_step()
        self._engine.step()
        mark_stepped(self._engine.optimizer)
        return result
