"""AdamW as both halves apply it: one formula, one implementation, for device and host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow._compat import foreach_mul_, fused_adam_


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyperparameters of one parameter group, as they are at one step.

    ``decoupled`` is True for AdamW (the decay multiplies the weights) and False for Adam (the decay
    is added to the gradient).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    @property
    def step_decay(self) -> float:
        """The factor that one step's decoupled decay applies to a weight."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled else 1.0


def adam_update_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    hyper: AdamHyper,
    decay: float | Tensor,
) -> None:
    """One Adam update of ``master`` and its moments, in place.

    Args:
        master: weights, fp32 (or wider), any shape.
        grad: the gradient to apply, same shape and dtype. Not changed.
        exp_avg: first moment, same shape and dtype.
        exp_avg_sq: second moment, same shape and dtype.
        step: number of this update, 1-based; decides the bias correction.
        hyper: learning rate, betas, eps and the *coupled* decay.
        decay: decoupled decay factor, multiplied into ``master`` first. A tensor broadcasts over
            rows, one factor a column. It is given apart from ``hyper`` because a host update carries
            the product of the factors of several steps (design: hyperparameters of a host update).
    """
    if isinstance(decay, Tensor):
        master.mul_(decay)
        decay = 1.0
    adam_updates_([master], [grad], [exp_avg], [exp_avg_sq], step=step, hyper=hyper, decay=decay)


def adam_updates_(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int,
    hyper: AdamHyper,
    decay: float,
) -> None:
    """:func:`adam_update_` of several tensors of one dtype and device, in one call."""
    if decay != 1.0:
        foreach_mul_(masters, decay)
    count = torch.full((), float(step), dtype=torch.float32, device=masters[0].device)
    fused_adam_(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [count] * len(masters),
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=0.0 if hyper.decoupled else hyper.weight_decay,
        decoupled=hyper.decoupled,
    )


def adam_step_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    hyper: AdamHyper,
) -> None:
    """One step of torch's fused Adam or AdamW, decay included, in place; ``grad`` is not changed.

    What ``replay`` does for each gradient. Beside :func:`adam_update_`, whose decay belongs to several
    steps, it saves a pass over the master.
    """
    fused_adam_(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [torch.full((), float(step), dtype=torch.float32)],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        decoupled=hyper.decoupled,
    )


def extrapolate(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    hyper: AdamHyper,
    reach: float,
    out: Tensor,
) -> None:
    """``out = master - reach * mhat / (sqrt(vhat) + eps)`` with the moments after step number ``step``.

    The preview's first half (design: preview): where the weights will be when they are used. ``out`` is
    fp32, the master's shape, and none of the inputs.
    """
    torch.sqrt(exp_avg_sq, out=out)
    out.mul_((1.0 - hyper.beta2**step) ** -0.5).add_(hyper.eps)
    torch.addcdiv(master, exp_avg, out, value=-reach / (1.0 - hyper.beta1**step), out=out)


def moment_rescale(beta: float, count_from: int, count_to: int) -> float:
    """The factor that keeps a bias-corrected moment unchanged when its update count changes.

    ``(1 - beta**to) / (1 - beta**from)``; 1 when either count is 0, as there is then nothing to
    correct or no correction to keep (design: migration).
    """
    if count_from == 0 or count_to == 0 or count_from == count_to:
        return 1.0
    return float((1.0 - beta**count_to) / (1.0 - beta**count_from))
