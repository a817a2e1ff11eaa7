"""The hot half of a matrix: AdamW on its hot columns, on the device, at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Device
from lightning_zenflow.engine.matrix import Matrix


@dataclass(frozen=True)
class Carried:
    """What promoted columns bring with them from the accumulator.

    ``accumulated`` fp32 ``[rows, n]`` and ``counts`` ``[n]``: gradients that have not been used yet;
    ``decays`` ``[n]``: the decay of their steps; all for the hot slots ``slots``, on the device.
    """

    slots: Tensor
    accumulated: Tensor
    counts: Tensor
    decays: Tensor


def update_hot(
    matrix: Matrix,
    grad: Tensor | None,
    factor: Tensor | None,
    hyper: AdamHyper,
    carried: Carried | None,
    device: Device,
) -> None:
    """One AdamW update of the hot columns with ``factor * grad``, compact fp32 ``[rows, n_hot]``.

    A promoted column with pending gradients uses the mean ``(acc + g_t) / (n + 1)`` and the pending
    decay times this step's, so no gradient is dropped or used twice.
    """
    matrix.steps += 1
    if matrix.hot is None or grad is None:
        return
    decay: float | Tensor = hyper.step_decay
    if carried is not None:
        device.on_compute(partial(_add_carried, grad, factor, carried))
        factor = None
        decay = torch.full(
            (grad.shape[1],), hyper.step_decay, dtype=torch.float32, device=grad.device
        )
        decay[carried.slots] = (carried.decays * hyper.step_decay).to(torch.float32)
    device.adamw_hot(
        matrix.view, matrix.columns, matrix.hot, grad, factor, matrix.steps, hyper, decay
    )


def _add_carried(grad: Tensor, factor: Tensor | None, carried: Carried) -> None:
    if factor is not None:
        grad.mul_(factor)
    now = grad[:, carried.slots]
    grad[:, carried.slots] = (carried.accumulated + now) / (carried.counts + 1)
