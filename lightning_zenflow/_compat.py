"""The only place where private names of torch are used.

Each name has a test (``tests/engine/test_units.py``), so that a torch release which drops one fails there
and not in a user's run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """One Adam (``decoupled=False``) or AdamW update in place, one pass over memory.

    All tensors of one call share one floating dtype; ``steps`` are fp32 scalars that hold the number
    of the update being made, 1-based.
    """
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in one call (dtypes may differ)."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_mul_(targets: Sequence[Tensor], factor: float) -> None:
    """``target.mul_(factor)`` for each, in one call."""
    torch._foreach_mul_(list(targets), factor)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch's schedulers that ``optimizer`` has stepped.

    The engine steps in the optimizer's place; without the mark the first ``scheduler.step()`` would
    warn that it came before ``optimizer.step()``.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def version(tensor: Tensor) -> int:
    """How often ``tensor`` has been changed in place (``.data`` edits are not counted)."""
    return tensor._version
