"""What the ordering of the device half is written against: queues, events and kernels.

``Device`` (device.py) decides which operation waits for which. It does so in terms of the protocols
here, so that the very same code runs on CUDA streams, on the CPU at once, and on the racing queues
of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper


@dataclass(frozen=True)
class Columns:
    """Which column lies in which slot. On the parameter's device.

    Invariant: ``hot`` and ``cold`` together hold every column of the matrix exactly once, and
    ``slots`` is their inverse. Never changed in place: queued operations may still read it.

    Attributes:
        hot: int64 ``[n_hot]``: hot slot -> column.
        cold: int64 ``[n_cold]``: cold slot -> column.
        slots: int32 ``[cols]``: column -> cold slot s as s, hot slot s as -1 - s.
    """

    hot: Tensor
    cold: Tensor
    slots: Tensor

    @classmethod
    def of(cls, hot: Tensor, cold: Tensor) -> Columns:
        """From the two lists."""
        slots = torch.empty(hot.numel() + cold.numel(), dtype=torch.int32, device=cold.device)
        slots[cold] = torch.arange(cold.numel(), dtype=torch.int32, device=cold.device)
        slots[hot] = -1 - torch.arange(hot.numel(), dtype=torch.int32, device=cold.device)
        return cls(hot, cold, slots)


@dataclass
class HotState:
    """Optimizer state of a matrix's hot columns, compact, on the device.

    Attributes:
        master: fp32 ``[rows, n_hot]``, or None for fp32 parameters, which are their own master.
        exp_avg: fp32 ``[rows, n_hot]``.
        exp_avg_sq: fp32 ``[rows, n_hot]``.
    """

    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class EagerStep:
    """The scalars of one eager step (design: preview).

    Attributes:
        size: ``preview_gain * (1 - beta1) * lr``.
        correction: ``1 - beta2**c``, the bias correction of the mean squares.
        eps: the optimizer's.
        limit: a weight moves by at most ``limit * size``.
    """

    size: float
    correction: float
    eps: float
    limit: float


class Kernels(Protocol):
    """The arithmetic on the device. Every method works at once, or on the current stream.

    Matrices are 2-d views ``[rows, cols]``, row-major; a range of rows is ``[start, stop)``.
    """

    def column_scores(self, grad: Tensor, out: Tensor) -> None:
        """``out`` fp32 ``[cols]`` = squared norm of each column, summed in fp32."""

    def squared_norm(self, data: Tensor, out: Tensor) -> None:
        """``out`` fp32, one element = sum of squares of ``data``, summed in fp32."""

    def split_hot(self, grad: Tensor, columns: Columns, out: Tensor) -> None:
        """``out`` fp32 ``[rows, n_hot]`` = the gradient of the hot columns."""

    def split_cold(
        self, grad: Tensor, columns: Columns, start: int, stop: int, out: Tensor
    ) -> None:
        """``out`` ``[stop - start, n_cold]``, the gradient's dtype = its cold columns in these rows."""

    def adamw(
        self,
        param: Tensor,
        columns: Columns,
        state: HotState,
        grad: Tensor,
        scale: Tensor | None,
        step: int,
        hyper: AdamHyper,
        decay: float | Tensor,
    ) -> None:
        """Adam update number ``step`` of the hot columns, scattered into ``param``.

        ``grad`` is compact fp32 ``[rows, n_hot]`` and may be overwritten; ``scale`` a factor on it,
        one fp32 on the device; ``decay`` one factor, or fp32 ``[n_hot]``.
        """

    def track_squares(self, grad: Tensor, mean_squares: Tensor, beta2: float) -> None:
        """``q_j = beta2 * q_j + (1 - beta2) * mean_i grad[i, j]**2``, fp32 ``[cols]``, summed in fp32."""

    def preview(
        self,
        param: Tensor,
        columns: Columns,
        grad: Tensor,
        mean_squares: Tensor,
        step: EagerStep,
    ) -> None:
        """``p[i, j] -= size * clamp(grad[i, j] / (sqrt(q_j / correction) + eps), -limit, limit)`` for every
        cold column j, in fp32, rounded to the parameter's dtype."""

    def merge(self, param: Tensor, columns: Columns, start: int, stop: int, values: Tensor) -> None:
        """Write ``values`` ``[stop - start, n_cold]`` into the cold columns of these rows."""


class Event(Protocol):
    """A point in a queue: everything issued to it before."""

    def done(self) -> bool:
        """Whether that point has been passed; never waits."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


class Queue(Protocol):
    """Operations that are done in the order issued, perhaps later: a stream."""

    def run(self, work: Callable[[], object], nbytes: int = 0) -> None:
        """Issue ``work``. ``nbytes`` cross the bus in it (for queues that model time)."""

    def record(self) -> Event:
        """The point after everything issued so far."""

    def wait(self, event: Event) -> None:
        """What is issued from here starts after ``event``, of any queue. The host does not wait."""

    def synchronize(self) -> None:
        """Make the host wait for everything issued so far."""


class Queues(Protocol):
    """The queues of one device and the memory that goes with them.

    Attributes:
        compute: where forward, backward and the hot half run. Its work is visible to the host's
            next use of a tensor on that device (on CUDA, because that use is queued behind it).
        down: copies from the device to the arena.
        up: copies from the arena to the device.
        direct: whether the device reads and writes the arena itself, so that no staging is needed.
    """

    compute: Queue
    down: Queue
    up: Queue
    direct: bool

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, queue: Queue) -> Tensor:
        """An uninitialised tensor on the device, to be used on ``queue``."""

    def send_word(self, word: Tensor, values: Tensor) -> None:
        """On the current queue: host ``values`` into the host's ``word``, after all before it."""

    def discard(self, tensor: Tensor) -> None:
        """On the current queue: the contents are not needed any more (racing queues poison them)."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for asynchronous copies; undone by :meth:`close`."""

    def close(self) -> None:
        """Wait for everything, give everything back. Safe to call twice."""
