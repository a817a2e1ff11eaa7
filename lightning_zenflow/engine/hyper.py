"""Reading the user's optimizer, and refusing what the engine cannot do exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_zenflow.arithmetic import AdamHyper

WORKS = "torch.optim.AdamW and torch.optim.Adam with float hyperparameters"


class UnsupportedOptimizerError(ValueError):
    """The optimizer, or one of its options, cannot be offloaded."""


def read_hyper(group: dict[str, Any]) -> AdamHyper:
    """The group's hyperparameters as they are now (a scheduler may have changed them)."""
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that the two halves would not reproduce.

    Raises:
        UnsupportedOptimizerError: names the option, its value and what works instead.
    """
    kind = type(optimizer)
    if kind not in (Adam, AdamW):
        raise UnsupportedOptimizerError(
            f"ZenFlow cannot offload {kind.__module__}.{kind.__qualname__}: its update is not known "
            f"to the host half. What works: {WORKS}. Return one of them from "
            "configure_optimizers, or use strategy='ddp' for this optimizer."
        )
    for index, group in enumerate(optimizer.param_groups):
        _check_group(index, group, kind.__name__)


_REMEDIES = {
    "amsgrad": "it needs a third moment that the host half does not keep; set amsgrad=False",
    "capturable": "the step runs outside CUDA graphs; set capturable=False",
    "differentiable": "the update is done in place without autograd; set differentiable=False",
    "maximize": "set maximize=False and return the negated loss",
}


def _check_group(index: int, group: dict[str, Any], kind: str) -> None:
    for option, remedy in _REMEDIES.items():
        if group.get(option):
            raise UnsupportedOptimizerError(
                f"{kind} parameter group {index} has {option}={group[option]!r}: {remedy}. "
                f"What works: {WORKS}."
            )
    for option in ("lr", "eps", "weight_decay"):
        if isinstance(group[option], Tensor):
            raise UnsupportedOptimizerError(
                f"{kind} parameter group {index} has a tensor for {option} ({group[option]!r}): "
                "reading it would make the device wait at every step; pass "
                f"{option}={float(group[option])!r}. What works: {WORKS}."
            )
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise UnsupportedOptimizerError(
            f"{kind} parameter group {index} has tensor betas ({group['betas']!r}): pass floats. "
            f"What works: {WORKS}."
        )


def check_parameter(name: str, param: Tensor) -> None:
    """Refuse a parameter whose arithmetic Adam here does not cover.

    Raises:
        UnsupportedOptimizerError: names the parameter and its dtype or layout.
    """
    if param.layout != torch.strided:
        raise UnsupportedOptimizerError(
            f"parameter {name} has layout {param.layout}; only dense (strided) parameters can be "
            "trained with strategy='zenflow'. Convert it with .to_dense()."
        )
    if not param.is_floating_point():
        raise UnsupportedOptimizerError(
            f"parameter {name} has dtype {param.dtype}; only real floating-point parameters can be "
            "trained with strategy='zenflow'. For a complex parameter store its real view "
            "(torch.view_as_real)."
        )


def check_gradient(name: str, grad: Tensor) -> None:
    """Refuse a sparse gradient, as torch's AdamW does."""
    if grad.layout != torch.strided:
        raise UnsupportedOptimizerError(
            f"parameter {name} has a gradient of layout {grad.layout}: AdamW needs dense gradients. "
            "Create its module with sparse=False."
        )


def refuse_direct_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step pre-hook: the optimizer's own ``step`` would update weights behind the engine's back.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{type(optimizer).__name__}.step() was called directly while ZenFlow trains its parameters: "
        "it would change weights whose masters live on the host, and make a second set of moments. "
        "Let Lightning step (automatic optimization, or the LightningOptimizer that "
        "LightningModule.optimizers() returns), or call engine.step() in a loop of your own."
    )
