"""The cold half: gradients into the arena, updates by the workers, results back by index."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Device
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix, Outstanding
from lightning_zenflow.host.commands import Accumulate, Command, Update
from lightning_zenflow.host.pool import UpdaterPool

WAKE_BYTES = 4 << 20  # announced gradients after which sleeping lanes are woken within a step


class ColdHalf:
    """Moves the cold columns of all matrices between device and host."""

    def __init__(self, pool: UpdaterPool, device: Device, ledger: StallLedger) -> None:
        self.pool = pool
        self._device = device
        self.ledger = ledger
        self._unannounced = 0

    def _post(self, matrix: Matrix, command: Command) -> int:
        return self.pool.post(matrix.index, command, self._ring)

    def _ring(self, matrix: int, number: int) -> None:
        self._device.ring(self.pool.arena.posted, matrix, number)

    def wake(self) -> None:
        """Make the lanes look for what has been posted."""
        self.pool.wake()
        self._unannounced = 0

    def accumulate(self, matrix: Matrix, grad: Tensor, step_decay: float) -> None:
        """Add this step's gradient ``[rows, cols]`` of the cold columns to the window.

        Waits (cause ``ring``) while the staging still holds the gradient before.
        """
        self.ledger.add("ring", self.pool.wait(matrix.index, matrix.accumulated))
        staging = matrix.arrays.staging
        with self.ledger.stall("copy"):
            self._device.split_cold(grad, matrix.columns.cold, staging)
        matrix.accumulated = self._post(matrix, Accumulate(first=matrix.window.count == 0))
        matrix.window.add(step_decay)
        self._unannounced += staging.nbytes
        if self._unannounced >= WAKE_BYTES:
            self.wake()

    def submit(self, matrix: Matrix, step: int, hyper: AdamHyper, lr_scale: float) -> None:
        """End the window: one AdamW update of every cold column with the mean of its gradients.

        The hyperparameters are captured now. Nothing is submitted for an empty window.
        """
        window = matrix.window
        if window.count == 0:
            return
        if matrix.outstanding is not None:
            raise RuntimeError(f"{matrix.name}: two host updates at once (a bug in the engine)")
        per_slot = window.counts is not None
        if window.counts is not None and window.decays is not None:
            matrix.arrays.inverse_count.copy_(1.0 / window.counts.to(torch.float64))
            matrix.arrays.decay.copy_(window.decays)
        matrix.updates += 1
        command = Update(
            hyper=replace(hyper, lr=hyper.lr * lr_scale),
            step=matrix.updates,
            decay=window.decay,
            inverse_count=1.0 / window.count,
            per_slot=per_slot,
        )
        matrix.outstanding = Outstanding(step, self._post(matrix, command))
        window.reset()
        self.ledger.updates += 1

    def merge(self, matrix: Matrix, cause: str = "update") -> None:
        """Wait for the outstanding update, if any, and write its result into the parameter."""
        if matrix.outstanding is None:
            return
        self.ledger.add(cause, self.pool.wait(matrix.index, matrix.outstanding.command))
        with self.ledger.stall("copy"):
            self._device.merge(matrix.view, matrix.columns.cold, matrix.arrays.outgoing)
        matrix.outstanding = None

    def settle(self, matrix: Matrix, cause: str | None = None) -> None:
        """Wait until no command of the matrix is open: its arrays may be changed from here.

        The wait counts as a stall by ``cause``, or not at all (saving and loading are no steps).
        """
        waited = self.pool.wait(matrix.index, self.pool.last_posted(matrix.index))
        if cause is not None:
            self.ledger.add(cause, waited)
