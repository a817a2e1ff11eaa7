"""The commands that the trainer posts for a matrix, as they lie in the arena.

Each matrix has a queue of :data:`~lightning_zenflow.host.layout.QUEUE_DEPTH` records. Command number
``s`` (1-based) lies in record ``(s - 1) % QUEUE_DEPTH``; it counts as posted once the matrix's word in
``posted`` is at least ``s``, and as done by a lane once that lane's word is at least ``s``. The lanes
that own chunks of a matrix do its commands in order, each for its own chunks.

``posted`` is written by the device, behind the copies that the commands need; ``announced`` by the trainer,
at once. A lane that sees more announced than posted knows that a doorbell is on its way, and watches.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host.layout import COMMAND_BYTES, GRADIENT_BYTES


class Kind(IntEnum):
    """What a command asks of the owners of a matrix."""

    ACCUMULATE = 1  # accumulator += staged gradient, or = if first in its window
    UPDATE = 2  # one AdamW update with the mean of the accumulator
    REPLAY = 3  # one AdamW update for each of the kept gradients


RECORD = np.dtype(
    [
        ("kind", "<i8"),
        ("first", "<i8"),
        ("per_slot", "<i8"),
        ("step", "<i8"),
        ("decoupled", "<i8"),
        ("lr", "<f8"),
        ("beta1", "<f8"),
        ("beta2", "<f8"),
        ("eps", "<f8"),
        ("weight_decay", "<f8"),
        ("decay", "<f8"),
        ("inverse_count", "<f8"),
        ("factor_slot", "<i8"),
        ("count", "<i8"),
        ("late", "<i8"),
        ("late_from", "<i8"),
        ("reach", "<f8"),
    ]
)
assert RECORD.itemsize == COMMAND_BYTES


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the staged gradient to the accumulator; ``first``: overwrite it instead.

    Overwriting at the first gradient of a window saves clearing the accumulator after the update.
    The gradient is multiplied by ``arena.factors[factor_slot]``, which the device fills in before
    the command is rung; -1 is a factor of 1.
    """

    first: bool
    factor_slot: int = -1

    def record(self) -> tuple[float, ...]:
        return (Kind.ACCUMULATE, self.first, 0, 0, 0, *[0.0] * 7, self.factor_slot, *[0] * 4)


@dataclass(frozen=True, slots=True)
class Update:
    """One AdamW update of every cold column with ``accumulator * inverse_count``.

    ``step`` is the number of this host update (bias correction), ``decay`` the product of the
    window's decoupled decay factors. With ``per_slot`` the vectors in the arena replace the two
    scalars ``decay`` and ``inverse_count``.
    """

    hyper: AdamHyper
    step: int
    decay: float
    inverse_count: float
    per_slot: bool

    def record(self) -> tuple[float, ...]:
        h = self.hyper
        return (
            Kind.UPDATE,
            0,
            self.per_slot,
            self.step,
            h.decoupled,
            h.lr,
            h.beta1,
            h.beta2,
            h.eps,
            h.weight_decay,
            self.decay,
            self.inverse_count,
            -1,
            *[0] * 4,
        )

    @classmethod
    def from_record(cls, record: np.void) -> Update:
        return cls(
            hyper=_hyper(record),
            step=int(record["step"]),
            decay=float(record["decay"]),
            inverse_count=float(record["inverse_count"]),
            per_slot=bool(record["per_slot"]),
        )


GRADIENT_RECORD = np.dtype(
    [
        ("step", "<i8"),
        ("decoupled", "<i8"),
        ("lr", "<f8"),
        ("beta1", "<f8"),
        ("beta2", "<f8"),
        ("eps", "<f8"),
        ("weight_decay", "<f8"),
        ("factor_slot", "<i8"),
    ]
)
assert GRADIENT_RECORD.itemsize == GRADIENT_BYTES


@dataclass(frozen=True, slots=True)
class GradientScalars:
    """What a kept gradient needs beside its values: the scalars of its own step.

    ``step`` is the number of the AdamW step it makes (bias correction). The gradient is multiplied by
    ``arena.factors[factor_slot]``; -1 is a factor of 1.
    """

    hyper: AdamHyper
    step: int
    factor_slot: int

    def record(self) -> tuple[float, ...]:
        h = self.hyper
        scalars = (h.lr, h.beta1, h.beta2, h.eps, h.weight_decay)
        return (self.step, h.decoupled, *scalars, self.factor_slot)

    @classmethod
    def from_record(cls, record: np.void) -> GradientScalars:
        return cls(_hyper(record), int(record["step"]), int(record["factor_slot"]))


@dataclass(frozen=True, slots=True)
class Replay:
    """One AdamW update for each of ``count`` kept gradients, in order, then the values to send back.

    Attributes:
        first: slot of the first of them in ``records`` and ``blocks``; the slots form a ring.
        count: how many; 0 sends the masters back as they are.
        reach: how far to extrapolate: ``w - reach * mhat / (sqrt(vhat) + eps)`` is sent back.
        late: leading entries of the array ``late``: slots whose columns came in a migration.
        late_from: position of the first gradient that applies to them.
    """

    first: int
    count: int
    reach: float = 0.0
    late: int = 0
    late_from: int = 0

    def record(self) -> tuple[float, ...]:
        own = (self.count, self.late, self.late_from, self.reach)
        return (Kind.REPLAY, self.first, *[0] * 3, *[0.0] * 7, -1, *own)

    @classmethod
    def from_record(cls, record: np.void) -> Replay:
        return cls(
            first=int(record["first"]),
            count=int(record["count"]),
            reach=float(record["reach"]),
            late=int(record["late"]),
            late_from=int(record["late_from"]),
        )


def _hyper(record: np.void) -> AdamHyper:
    return AdamHyper(
        lr=float(record["lr"]),
        beta1=float(record["beta1"]),
        beta2=float(record["beta2"]),
        eps=float(record["eps"]),
        weight_decay=float(record["weight_decay"]),
        decoupled=bool(record["decoupled"]),
    )


Command = Accumulate | Update | Replay


def fence() -> None:
    """Order the memory accesses before this call before those after it.

    x86-64 keeps stores in order by itself. Elsewhere (Grace, Graviton) a word in the arena could
    become visible before the data it announces; giving a lock back and taking it again is the
    cheapest full ordering that Python offers (a release followed by an acquire, about 60 ns).
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
