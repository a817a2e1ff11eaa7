"""The pool of equal blocks that holds kept gradients under ``replay``: how large, and who has which.

A block holds the gradient of one chunk at one step. The trainer hands blocks out when a gradient leaves the
device and takes them back when the update that replays it is done; workers only read them. So the free
list is the trainer's own and nothing about it is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_zenflow.host.layout import ALIGN, HostMatrix, cut_rows

Blocks = npt.NDArray[np.int32]

SIZES = 16  # block sizes that are compared: so many equal steps up to the limit
TOLERANCE = (
    1.01  # larger blocks mean less work in the trainer, and may waste so much more than the best
)


@dataclass(frozen=True)
class BlockPlan:
    """``count`` blocks of ``nbytes`` each."""

    nbytes: int
    count: int


def plan_blocks(
    matrices: Sequence[HostMatrix],
    phases: Sequence[int],
    *,
    interval: int,
    lag: int,
    chunk_elements: int,
) -> BlockPlan:
    """The largest block size that wastes next to nothing, and as many blocks as the schedule needs.

    At the end of a step a matrix with phase f holds 1 to S gradients, S at its boundary. The pool has
    room for the step at which all matrices together hold most. With a lag the matrices whose update
    is under way need one more each, as their next gradient may arrive before it is done. No more is
    ever kept (a boundary submits also where a gradient is missing), so waiting for outstanding
    updates always frees enough.

    Args:
        matrices: the cold halves.
        phases: their phases, 0 to S - 1.
        interval: S, at least 1.
        lag: L.
        chunk_elements: upper bound of a chunk's elements (of the widest dtype), rows permitting.
    """
    plans = []
    for part in range(1, SIZES + 1):
        limit = max(1, chunk_elements * part // SIZES)
        nbytes = _block_bytes(matrices, limit)
        plans.append(BlockPlan(nbytes, _count(matrices, phases, interval, lag, nbytes)))
    least = min(plan.nbytes * plan.count for plan in plans)
    good = [plan for plan in plans if plan.nbytes * plan.count <= TOLERANCE * least]
    return max(good, key=lambda plan: plan.nbytes)


def _block_bytes(matrices: Sequence[HostMatrix], limit: int) -> int:
    """Bytes of the largest chunk if chunks have at most ``limit`` elements of the widest dtype."""
    widest = max((m.torch_dtype.itemsize for m in matrices), default=1)
    largest = max(
        (
            max(
                stop - start
                for start, stop in cut_rows(m, limit * widest // m.torch_dtype.itemsize)
            )
            * m.n_cold
            * m.torch_dtype.itemsize
            for m in matrices
        ),
        default=1,
    )
    return -(-largest // ALIGN) * ALIGN


def _count(
    matrices: Sequence[HostMatrix], phases: Sequence[int], interval: int, lag: int, nbytes: int
) -> int:
    chunks = [len(cut_rows(m, nbytes // m.torch_dtype.itemsize)) for m in matrices]
    needs = []
    for step in range(interval):
        held = 0
        for count, phase in zip(chunks, phases, strict=True):
            gradients = (step + phase) % interval or interval
            held += count * (gradients + (gradients == interval and lag > 0))
        needs.append(held)
    return max(needs)


class BlockAllocator:
    """The free blocks. Not thread-safe; all calls come from the trainer."""

    def __init__(self, count: int) -> None:
        self._free: Blocks = np.arange(count, dtype=np.int32)[::-1].copy()
        self.free = count

    def take(self, count: int) -> Blocks:
        """``count`` blocks.

        Raises:
            RuntimeError: fewer are free (the caller reclaims or waits first).
        """
        if count > self.free:
            raise RuntimeError(f"{count} gradient blocks wanted, {self.free} are free")
        self.free -= count
        return self._free[self.free : self.free + count].copy()

    def give(self, blocks: Blocks) -> None:
        """Take ``blocks`` back."""
        self._free[self.free : self.free + len(blocks)] = blocks
        self.free += len(blocks)
