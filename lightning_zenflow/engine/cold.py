"""The cold half: gradients into the arena, updates by the workers, results back by index."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Columns, Device, Event
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix, Outstanding
from lightning_zenflow.host.commands import Accumulate, Update
from lightning_zenflow.host.layout import FACTOR_SLOTS
from lightning_zenflow.host.pool import UpdaterPool

WAKE_BYTES = 4 << 20  # gradients sent after which sleeping lanes are woken within a step


class ColdHalf:
    """Moves the cold columns of all matrices between device and host."""

    def __init__(self, pool: UpdaterPool, device: Device, ledger: StallLedger) -> None:
        self.pool = pool
        self._device = device
        self.ledger = ledger
        self._unannounced = 0
        self._rung = pool.numbers
        # For each slot of clip factors the commands that read it: (matrix, number).
        self._factor_users: list[list[tuple[int, int]]] = [[] for _ in range(FACTOR_SLOTS)]

    def wake(self) -> None:
        """Ring for what has been posted, and make the lanes look for it."""
        self._rung = self.pool.numbers
        self._device.ring(self.pool.arena.posted_tensor, self._rung)
        self.pool.wake()
        self._unannounced = 0

    def _wait(self, matrix: int, number: int) -> float:
        """Seconds waited for command ``number``, which is rung first if it has not been yet."""
        if number > self._rung[matrix]:
            self.wake()
        return self.pool.wait(matrix, number)

    # -- gradients --------------------------------------------------------------------------------

    def send(self, matrix: Matrix, columns: Columns, grad: Tensor, ready: Event) -> None:
        """Put the cold columns of this step's gradient ``[rows, cols]`` into the staging.

        Waits (cause ``ring``) while the staging still holds the gradient before.
        """
        self.ledger.add("ring", self._wait(matrix.index, matrix.accumulated))
        staging = matrix.arrays.staging
        with self.ledger.stall("copy"):
            self._device.send_cold(grad, columns, staging, ready)
        self._unannounced += staging.nbytes

    def send_factor(self, factor: Tensor, step: int) -> int:
        """Send this step's clip factor; returns the slot for :meth:`accumulate`."""
        slot = step % FACTOR_SLOTS
        for matrix, number in self._factor_users[slot]:  # of FACTOR_SLOTS steps ago: long done
            self.ledger.add("ring", self._wait(matrix, number))
        self._factor_users[slot] = []
        self._device.send_factor(self.pool.arena.factors[slot : slot + 1], factor)
        return slot

    def accumulate(self, matrix: Matrix, step_decay: float, factor_slot: int) -> None:
        """Add the gradient that was sent to the window."""
        first = matrix.window.count == 0
        matrix.accumulated = self.pool.post(matrix.index, Accumulate(first, factor_slot))
        if factor_slot >= 0:
            self._factor_users[factor_slot].append((matrix.index, matrix.accumulated))
        matrix.window.add(step_decay)
        if self._unannounced >= WAKE_BYTES:
            self.wake()

    # -- updates ----------------------------------------------------------------------------------

    def submit(self, matrix: Matrix, step: int, hyper: AdamHyper, lr_scale: float) -> None:
        """End the window: one AdamW update of every cold column with the mean of its gradients.

        The hyperparameters are captured now. Nothing is submitted for an empty window.
        """
        window = matrix.window
        if window.count == 0:
            return
        if matrix.outstanding is not None:
            raise RuntimeError(f"{matrix.name}: two host updates at once (a bug in the engine)")
        if window.counts is not None and window.decays is not None:
            matrix.arrays.inverse_count.copy_(1.0 / window.counts.to(torch.float64))
            matrix.arrays.decay.copy_(window.decays)
        if matrix.outgoing_read is not None:
            self._device.await_outgoing(matrix.outgoing_read)
            matrix.outgoing_read = None
        matrix.updates += 1
        command = Update(
            hyper=replace(hyper, lr=hyper.lr * lr_scale),
            step=matrix.updates,
            decay=window.decay,
            inverse_count=1.0 / window.count,
            per_slot=window.counts is not None,
        )
        matrix.outstanding = Outstanding(step, self.pool.post(matrix.index, command))
        window.reset()
        self.ledger.updates += 1

    def merge(self, matrix: Matrix, free: Event, cause: str = "update") -> None:
        """Wait for the outstanding update, if any, and have its result written into the parameter.

        ``free`` is a point of compute after the last use of the parameter. The parameter is whole
        again after :meth:`await_merge`.
        """
        if matrix.outstanding is None:
            return
        self.ledger.add(cause, self._wait(matrix.index, matrix.outstanding.command))
        with self.ledger.stall("copy"):
            merged = self._device.merge(matrix.view, matrix.columns, matrix.arrays.outgoing, free)
        matrix.merged = matrix.outgoing_read = merged
        matrix.outstanding = None

    def await_merge(self, matrix: Matrix) -> None:
        """Compute uses the parameter from here: let it wait for a merge that is under way."""
        if matrix.merged is not None:
            with self.ledger.stall("copy"):
                self._device.await_merge(matrix.merged)
            matrix.merged = None

    def settle(self, matrix: Matrix, cause: str | None = None) -> None:
        """Wait until no command of the matrix is open: its arrays may be changed from here.

        The wait counts as a stall by ``cause``, or not at all (saving and loading are no steps).
        """
        waited = self._wait(matrix.index, self.pool.last_posted(matrix.index))
        if cause is not None:
            self.ledger.add(cause, waited)
