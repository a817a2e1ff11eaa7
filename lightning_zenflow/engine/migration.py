"""Choosing hot columns anew, and moving the state of those that change side."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, moment_rescale
from lightning_zenflow.device import Columns, Device
from lightning_zenflow.engine.cold import ColdHalf
from lightning_zenflow.engine.columns import Swap, choose_hot, plan_swap
from lightning_zenflow.engine.hot import Carried
from lightning_zenflow.engine.matrix import Matrix


def plan(matrix: Matrix, grad: Tensor, device: Device) -> Swap | None:
    """Which columns change side so that those with the largest norm of this gradient are hot.

    Changes nothing. None if all stay where they are. The host waits for the scores here.
    """
    if matrix.hot is None:
        return None
    scores = device.column_scores(grad)
    swap = plan_swap(matrix.columns, choose_hot(scores, matrix.columns.hot.numel()))
    return swap if len(swap) else None


def migrate(
    matrix: Matrix, swap: Swap, columns: Columns, hyper: AdamHyper, device: Device, cold: ColdHalf
) -> Carried | None:
    """Make ``columns`` those of the matrix, with the state of the pairs in ``swap`` exchanged.

    Must not be called while an update of the matrix is outstanding. Returns the pending gradients
    of promoted columns for this step's hot update, or None if there are none.
    """
    if matrix.outstanding is not None:
        raise RuntimeError(f"{matrix.name}: selection during a host update (a bug in the engine)")
    cold.settle(matrix, cause="selection")
    with cold.ledger.stall("selection"):
        device.synchronize()
    with cold.ledger.stall("copy"):
        carried = _exchange(matrix, swap, hyper)
    matrix.columns = columns
    return carried


def _exchange(matrix: Matrix, swap: Swap, hyper: AdamHyper) -> Carried | None:
    """Exchange master, moments and pending gradients of the pairs in ``swap``.

    A demoted column's accumulator starts empty, so that this step's accumulation gives it
    ``acc = g_t, n = 1``.
    """
    host = matrix.arrays
    slots = swap.cold_slots.cpu()
    gpu = matrix.param.device
    pending = matrix.window.count > 0
    counts, decays = matrix.window.take(slots, matrix.columns.cold.numel())
    carried = None
    if pending:
        carried = Carried(
            slots=swap.hot_slots,
            accumulated=host.accumulator[:, slots].to(gpu),
            counts=counts.to(gpu),
            decays=decays.to(gpu),
        )
        host.accumulator[:, slots] = 0.0

    host.master[:, slots] = _exchange_masters(matrix, swap, slots)
    if matrix.steps:  # before the first step all moments are zero: leave their pages untouched
        _exchange_moments(matrix, swap, slots, hyper)
    return carried


def _exchange_moments(matrix: Matrix, swap: Swap, slots: Tensor, hyper: AdamHyper) -> None:
    """Swap both moments, rescaled from one side's update count to the other's."""
    hot, host = matrix.hot, matrix.arrays
    if hot is None:
        return
    gpu = matrix.param.device
    # Both sides are read before either is written: the pairs use the same slots.
    for beta, device_side, host_side in (
        (hyper.beta1, hot.exp_avg, host.exp_avg),
        (hyper.beta2, hot.exp_avg_sq, host.exp_avg_sq),
    ):
        down = device_side[:, swap.hot_slots] * moment_rescale(beta, matrix.steps, matrix.updates)
        up = host_side[:, slots] * moment_rescale(beta, matrix.updates, matrix.steps)
        host_side[:, slots] = down.cpu()
        device_side[:, swap.hot_slots] = up.to(gpu)


def _exchange_masters(matrix: Matrix, swap: Swap, slots: Tensor) -> Tensor:
    """Promoted masters onto the device; returns the demoted columns' masters, fp32, on the host.

    In fp32 the parameter is the hot master. It already holds the promoted columns' host masters,
    bit for bit, because no update is outstanding; in 16 bits it holds their rounding.
    """
    hot = matrix.hot
    if hot is None or hot.master is None:
        return matrix.view.index_select(1, swap.demoted).to(torch.float32).cpu()
    demoted = hot.master[:, swap.hot_slots].cpu()
    hot.master[:, swap.hot_slots] = matrix.arrays.master[:, slots].to(hot.master.device)
    return demoted
