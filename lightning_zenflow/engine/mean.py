"""``cold_rule="mean"``, the paper's: a window's gradients are summed, and make one AdamW update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, moment_rescale
from lightning_zenflow.device import Device, Event, Target
from lightning_zenflow.engine.cold import ColdHalf, Why
from lightning_zenflow.engine.columns import Swap
from lightning_zenflow.engine.hot import Carried
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix
from lightning_zenflow.engine.migration import (
    read_demoted,
    read_slots,
    write_promoted,
    write_slots,
)
from lightning_zenflow.host.arena import MeanArrays
from lightning_zenflow.host.commands import Accumulate, Update
from lightning_zenflow.host.pool import UpdaterPool


def _arrays(matrix: Matrix) -> MeanArrays:
    assert isinstance(matrix.arrays, MeanArrays)
    return matrix.arrays


class MeanHalf(ColdHalf):
    """See :class:`~.cold.ColdHalf`. ``lr_scale`` multiplies the learning rate of host updates."""

    def __init__(
        self, pool: UpdaterPool, device: Device, ledger: StallLedger, lr_scale: float
    ) -> None:
        super().__init__(pool, device, ledger)
        self._lr_scale = lr_scale

    def _targets(self, matrix: Matrix) -> Sequence[Target]:
        # One staging: it is free once the gradient before has been added.
        self.ledger.add("ring", self._wait(matrix.index, matrix.accumulated))
        return [(0, matrix.rows, _arrays(matrix).staging)]

    def sent(self, matrix: Matrix) -> Tensor:
        return _arrays(matrix).staging

    def accept(self, matrix: Matrix, hyper: AdamHyper, factor_slot: int) -> None:
        first = matrix.window.count == 0
        nbytes = _arrays(matrix).staging.nbytes
        number = self._post(matrix, Accumulate(first, factor_slot), nbytes)
        matrix.accumulated = number
        if factor_slot >= 0:
            self._factor_users[factor_slot].append((matrix.index, number))
        matrix.window.add(hyper.step_decay)

    def miss(self, matrix: Matrix, step: int, now: Event) -> None:
        """The window goes on to the next boundary."""

    def submit(self, matrix: Matrix, step: int, why: Why) -> None:
        """One AdamW update of every cold column with the mean of its gradients.

        The hyperparameters are those of the last step taken.
        """
        window, arrays, hyper = matrix.window, _arrays(matrix), matrix.hyper
        if window.count == 0 or hyper is None:
            return
        if window.counts is not None and window.decays is not None:
            arrays.inverse_count.copy_(1.0 / window.counts.to(torch.float64))
            arrays.decay.copy_(window.decays)
        matrix.updates += 1
        scale = 1.0 if why == "warm-up" else self._lr_scale
        command = Update(
            hyper=replace(hyper, lr=hyper.lr * scale),
            step=matrix.updates,
            decay=window.decay,
            inverse_count=1.0 / window.count,
            per_slot=window.counts is not None,
        )
        self._post_update(matrix, command, step, previews=False)
        window.reset()
        self.ledger.updates += 1

    def pending(self, matrix: Matrix) -> bool:
        return matrix.outstanding is not None or matrix.window.count > 0

    def exchange(self, matrix: Matrix, swap: Swap, hyper: AdamHyper) -> Carried | None:
        """Moments are rescaled from one half's update count to the other's.

        A demoted column's accumulator starts empty, so that this step's gradient makes it ``acc = g_t,
        n = 1``.
        """
        arrays = _arrays(matrix)
        slots = swap.cold_slots.cpu()
        device = matrix.param.device
        pending = matrix.window.count > 0
        counts, decays = matrix.window.take(slots, matrix.columns.cold.numel())
        carried = None
        if pending:
            carried = Carried(
                slots=swap.hot_slots,
                accumulated=arrays.accumulator[:, slots].to(device),
                counts=counts.to(device),
                decays=decays.to(device),
            )
            arrays.accumulator[:, slots] = 0.0
        up, down = read_slots(matrix, slots), read_demoted(matrix, swap)
        for name, beta in (("exp_avg", hyper.beta1), ("exp_avg_sq", hyper.beta2)):
            if name in up:
                up[name] *= moment_rescale(beta, matrix.updates, matrix.steps)
                down[name] *= moment_rescale(beta, matrix.steps, matrix.updates)
        write_promoted(matrix, swap, up)
        write_slots(matrix, slots, down)
        return carried

    def moments(self, matrix: Matrix, hyper: AdamHyper) -> tuple[Tensor, Tensor]:
        """Rescaled to the hot half's step count; gradients of the open window are not in them."""
        first = moment_rescale(hyper.beta1, matrix.updates, matrix.steps)
        second = moment_rescale(hyper.beta2, matrix.updates, matrix.steps)
        return matrix.arrays.exp_avg * first, matrix.arrays.exp_avg_sq * second

    def forget(self, matrix: Matrix) -> None:
        super().forget(matrix)
        matrix.window.reset()
