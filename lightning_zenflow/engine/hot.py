"""The hot half of a matrix: AdamW on its hot columns, on the device, at every step."""

from __future__ import annotations

from dataclasses import dataclass

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
    matrix: Matrix, grad: Tensor, hyper: AdamHyper, carried: Carried | None, device: Device
) -> None:
    """One AdamW update of the hot columns with this step's gradient ``[rows, cols]``.

    A promoted column with pending gradients uses the mean ``(acc + g_t) / (n + 1)`` and the pending
    decay times this step's, so no gradient is dropped or used twice.
    """
    matrix.steps += 1
    hot = matrix.hot
    if hot is None:
        return
    hot.steps = matrix.steps
    hot_grad = device.split_hot(grad, hot.columns)
    decay: float | Tensor = hyper.step_decay
    if carried is not None:
        now = hot_grad[:, carried.slots]
        hot_grad[:, carried.slots] = (carried.accumulated + now) / (carried.counts + 1)
        decay = torch.full(
            (hot.columns.numel(),), hyper.step_decay, dtype=torch.float32, device=grad.device
        )
        decay[carried.slots] = (carried.decays * hyper.step_decay).to(torch.float32)
    device.adamw_hot(matrix.view, hot, hot_grad, hyper, decay)
