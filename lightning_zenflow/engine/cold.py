"""The cold half: gradients into the arena, updates by the workers, results back by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Columns, Device, Event, Target
from lightning_zenflow.engine.columns import Swap
from lightning_zenflow.engine.hot import Carried
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix, Outstanding
from lightning_zenflow.host.commands import Command
from lightning_zenflow.host.pool import UpdaterPool

Why: TypeAlias = Literal["boundary", "warm-up", "flush"]
"""Why a window ends: at its time, at once because of the warm-up, or because all has to be merged."""

WAKE_BYTES = 4 << 20  # gradients sent after which sleeping lanes are woken within a step


class ColdHalf(ABC):
    """Moves the cold columns of all matrices between device and host.

    What happens to a window's gradients is the rule's: :class:`~.mean.MeanHalf`, the paper's, and
    :class:`~.replay.ReplayHalf`, ours.
    """

    def __init__(self, pool: UpdaterPool, device: Device, ledger: StallLedger) -> None:
        self.pool = pool
        self._device = device
        self.ledger = ledger
        self._unannounced = 0
        self._rung = pool.numbers
        # For each slot of clip factors the commands that read it: (matrix, number).
        slots = pool.spec.factor_slots
        self._factor_users: list[list[tuple[int, int]]] = [[] for _ in range(slots)]

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
        """Send the cold columns of this step's gradient ``[rows, cols]`` to the arena.

        Waits (cause ``ring``) while there is no room for it.
        """
        targets = self._targets(matrix)
        with self.ledger.stall("copy"):
            self._device.send_cold(grad, columns, targets, ready)

    def send_factor(self, factor: Tensor, step: int) -> int:
        """Send this step's clip factor; returns the slot for :meth:`accept`."""
        slot = step % len(self._factor_users)
        for matrix, number in self._factor_users[slot]:  # of many steps ago: long done
            self.ledger.add("ring", self._wait(matrix, number))
        self._factor_users[slot] = []
        self._device.send_factor(self.pool.arena.factors[slot : slot + 1], factor)
        return slot

    @abstractmethod
    def _targets(self, matrix: Matrix) -> Sequence[Target]:
        """Where the next gradient goes; the same again until it is accepted."""

    @abstractmethod
    def sent(self, matrix: Matrix) -> Tensor:
        """What :meth:`send` has put there, ``[rows, n_cold]``; the device must be synchronised."""

    @abstractmethod
    def accept(self, matrix: Matrix, hyper: AdamHyper, factor_slot: int) -> None:
        """The gradient that was sent becomes pending: this step uses it."""

    @abstractmethod
    def miss(self, matrix: Matrix, step: int, now: Event) -> None:
        """``step`` is a boundary, and the matrix has no gradient."""

    # -- updates ----------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, matrix: Matrix, step: int, why: Why) -> None:
        """Have the workers apply what is pending; the result is outstanding. Does nothing if nothing is."""

    @abstractmethod
    def pending(self, matrix: Matrix) -> bool:
        """Whether a flush has anything to do."""

    def _post(self, matrix: Matrix, command: Command, nbytes: int) -> int:
        """Post ``command``; lanes are woken within a step once enough work has come together."""
        number = self.pool.post(matrix.index, command)
        self._unannounced += nbytes
        if self._unannounced >= WAKE_BYTES:
            self.wake()
        return number

    def _post_update(self, matrix: Matrix, command: Command, step: int, previews: bool) -> int:
        """Post the command that makes the next result, behind the reading of the last one."""
        if matrix.outstanding is not None:
            raise RuntimeError(f"{matrix.name}: two host updates at once (a bug in the engine)")
        if matrix.outgoing_read is not None:
            self._device.await_outgoing(matrix.outgoing_read)
            matrix.outgoing_read = None
        number = self._post(matrix, command, matrix.arrays.master.nbytes)
        matrix.outstanding = Outstanding(step, number, previews)
        return number

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
        matrix.previewed = matrix.outstanding.previews
        matrix.outstanding = None

    def await_merge(self, matrix: Matrix) -> None:
        """Compute uses the parameter from here: let it wait for a merge that is under way."""
        if matrix.merged is not None:
            with self.ledger.stall("copy"):
                self._device.await_merge(matrix.merged)
            matrix.merged = None

    # -- state ------------------------------------------------------------------------------------

    def settle(self, matrix: Matrix, cause: str | None = None) -> None:
        """Wait until no command of the matrix is open: its arrays may be changed from here.

        The wait counts as a stall by ``cause``, or not at all (saving and loading are no steps).
        """
        waited = self._wait(matrix.index, self.pool.last_posted(matrix.index))
        if cause is not None:
            self.ledger.add(cause, waited)

    @abstractmethod
    def exchange(self, matrix: Matrix, swap: Swap, hyper: AdamHyper) -> Carried | None:
        """Exchange master, moments and what is pending of the pairs in ``swap``.

        Nothing of the matrix is open, on host or device. Returns the pending gradients that promoted
        columns bring to this step's hot update, None if there are none.
        """

    @abstractmethod
    def moments(self, matrix: Matrix, hyper: AdamHyper) -> tuple[Tensor, Tensor]:
        """The cold columns' moments as AdamW has them after ``matrix.steps`` steps, fp32
        ``[rows, n_cold]``, with as much as the rule can tell. Nothing of the matrix is open."""

    def forget(self, matrix: Matrix) -> None:
        """Drop what is pending. Nothing of the matrix is open."""
        matrix.outstanding = matrix.merged = matrix.outgoing_read = None
        matrix.previewed = False
