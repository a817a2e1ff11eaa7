"""Choosing hot columns anew, and moving the state of those that change side."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
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
        carried = cold.exchange(matrix, swap, hyper)
    matrix.columns = columns
    return carried


def read_slots(matrix: Matrix, slots: Tensor) -> dict[str, Tensor]:
    """A copy of the cold ``slots``' state on the host: master and moments, fp32 ``[rows, n]``.

    Before the first step all moments are zero and left out: pages that nothing needs stay untouched.
    """
    return {n: getattr(matrix.arrays, n).index_select(1, slots) for n in _names(matrix)}


def write_slots(matrix: Matrix, slots: Tensor, state: dict[str, Tensor]) -> None:
    """Put ``state`` into the cold ``slots`` on the host."""
    for name, values in state.items():
        getattr(matrix.arrays, name)[:, slots] = values


def read_demoted(matrix: Matrix, swap: Swap) -> dict[str, Tensor]:
    """A copy, on the host, of the state that the columns to be demoted have on the device."""
    hot = matrix.hot
    assert hot is not None
    state = {}
    for name in _names(matrix):
        side = getattr(hot, name)
        # In fp32 the parameter is the hot master.
        values = (
            matrix.view.index_select(1, swap.demoted) if side is None else side[:, swap.hot_slots]
        )
        state[name] = values.to("cpu", torch.float32)
    return state


def write_promoted(matrix: Matrix, swap: Swap, state: dict[str, Tensor]) -> None:
    """Make ``state`` that of the promoted columns on the device.

    In fp32 it goes into the parameter, which may have shown a preview.
    """
    hot = matrix.hot
    assert hot is not None
    for name, values in state.items():
        side = getattr(hot, name)
        if side is None:
            matrix.view[:, swap.promoted] = values.to(matrix.param.device)
        else:
            side[:, swap.hot_slots] = values.to(side.device)


def _names(matrix: Matrix) -> tuple[str, ...]:
    return ("master", "exp_avg", "exp_avg_sq") if matrix.steps else ("master",)
