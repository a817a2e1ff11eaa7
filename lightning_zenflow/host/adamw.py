"""The work on one chunk: cache-blocked accumulation and AdamW, built on torch alone.

A chunk's arrays are read and written once each, everything in between stays in the cache: whole-tensor
operations would move about 46 bytes a parameter instead of 28 (docs/benchmarks). The gradient needs a
scratch copy because torch's fused Adam takes one dtype for all its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import adam_step_, adam_update_, extrapolate
from lightning_zenflow.host.arena import MeanArrays, ReplayArrays
from lightning_zenflow.host.commands import Accumulate, GradientScalars, Replay, Update
from lightning_zenflow.host.layout import Chunk

BLOCK_ELEMENTS = (
    65536  # of a chunk that are brought up to date together: their state stays in the cache
)


@dataclass(frozen=True)
class KeptGradient:
    """One gradient of a matrix that waits for its replay: kept slot, scalars, and factor by value."""

    slot: int
    scalars: GradientScalars
    factor: float


def read_kept(arrays: ReplayArrays, command: Replay, factors: Tensor) -> list[KeptGradient]:
    """The gradients that ``command`` replays, in order. ``factors`` are the arena's."""
    kept = []
    for position in range(command.count):
        slot = (command.first + position) % len(arrays.records)
        scalars = GradientScalars.from_record(arrays.records[slot])
        factor = 1.0 if scalars.factor_slot < 0 else float(factors[scalars.factor_slot])
        kept.append(KeptGradient(slot, scalars, factor))
    return kept


class ChunkKernels:
    """Does commands on chunks, in the calling thread, with one scratch buffer.

    Args:
        largest: elements of the largest chunk that this instance will be given.
    """

    def __init__(self, largest: int) -> None:
        self._scratch = torch.empty(largest, dtype=torch.float32)

    def _scratch_like(self, block: Tensor) -> Tensor:
        return self._scratch[: block.numel()].view(block.shape)

    def accumulate(
        self, arrays: MeanArrays, chunk: Chunk, command: Accumulate, factor: float = 1.0
    ) -> int:
        """``accumulator += factor * staging`` in fp32, or ``=`` for the first gradient of a window.

        Returns:
            Bytes of the arena read and written.
        """
        accumulator = arrays.accumulator[chunk.start : chunk.stop]
        staged = arrays.staging[chunk.start : chunk.stop]
        if command.first:
            accumulator.copy_(staged)
            if factor != 1.0:
                accumulator.mul_(factor)
        elif staged.dtype == torch.float32:
            accumulator.add_(staged, alpha=factor)
        else:  # a mixed-dtype add_ is several times slower than cast and add in the cache
            accumulator.add_(self._scratch_like(accumulator).copy_(staged), alpha=factor)
        return staged.numel() * (staged.itemsize + (4 if command.first else 8))

    def update(self, arrays: MeanArrays, chunk: Chunk, command: Update) -> int:
        """One AdamW update of the chunk with the mean of its accumulated gradients.

        The new values are rounded into ``outgoing`` where the parameter is not fp32.

        Returns:
            Bytes of the arena read and written.
        """
        rows = slice(chunk.start, chunk.stop)
        master = arrays.master[rows]
        grad = self._scratch_like(master)
        inverse: Tensor | float = (
            arrays.inverse_count if command.per_slot else command.inverse_count
        )
        decay: Tensor | float = arrays.decay if command.per_slot else command.decay
        torch.mul(arrays.accumulator[rows], inverse, out=grad)
        adam_update_(
            master,
            grad,
            arrays.exp_avg[rows],
            arrays.exp_avg_sq[rows],
            step=command.step,
            hyper=command.hyper,
            decay=decay,
        )
        sent = 0
        if arrays.outgoing is not arrays.master:
            sent = arrays.outgoing.itemsize
            arrays.outgoing[rows].copy_(master)
        return master.numel() * (4 + 24 + sent)

    def replay(
        self,
        arrays: ReplayArrays,
        chunk: Chunk,
        command: Replay,
        kept: Sequence[KeptGradient],
    ) -> int:
        """One AdamW step of the chunk for each kept gradient, then the values to send back.

        Goes through the chunk block by block, so that the state crosses the memory bus once.

        Returns:
            Bytes of the arena read and written.
        """
        rows, cols = chunk.stop - chunk.start, arrays.master.shape[1]
        grads = [arrays.block(int(arrays.blocks[k.slot, chunk.number]), rows) for k in kept]
        stride = max(1, BLOCK_ELEMENTS // cols)
        late = arrays.late[: command.late] if command.late_from else None
        for start in range(0, rows, stride):
            block = slice(start, min(start + stride, rows))
            self._replay_block(
                arrays,
                slice(chunk.start + block.start, chunk.start + block.stop),
                [(grad[block], k) for grad, k in zip(grads, kept, strict=True)],
                command,
                late,
            )
        sent = 0 if arrays.outgoing is arrays.master else arrays.outgoing.itemsize
        state = 24 if kept else 4 * (sent > 0)
        return rows * cols * (state + sent + sum(grad.itemsize for grad in grads))

    def _replay_block(
        self,
        arrays: ReplayArrays,
        rows: slice,
        grads: Sequence[tuple[Tensor, KeptGradient]],
        command: Replay,
        late: Tensor | None,
    ) -> None:
        state = [a[rows] for a in (arrays.master, arrays.exp_avg, arrays.exp_avg_sq)]
        scratch = self._scratch_like(state[0])
        # Columns that came in a migration were up to date: the gradients before are not theirs.
        saved = [] if late is None else [array.index_select(1, late) for array in state]
        for position, (grad, kept) in enumerate(grads):
            if late is not None and position == command.late_from:
                for array, values in zip(state, saved, strict=True):
                    array.index_copy_(1, late, values)
            if grad.dtype != torch.float32 or kept.factor != 1.0:
                grad = scratch.copy_(grad)
                if kept.factor != 1.0:
                    grad.mul_(kept.factor)
            scalars = kept.scalars
            adam_step_(state[0], grad, *state[1:], step=scalars.step, hyper=scalars.hyper)
        self._send_back(arrays, rows, state, grads, command.reach, scratch)

    @staticmethod
    def _send_back(
        arrays: ReplayArrays,
        rows: slice,
        state: Sequence[Tensor],
        grads: Sequence[tuple[Tensor, KeptGradient]],
        reach: float,
        scratch: Tensor,
    ) -> None:
        if arrays.outgoing is arrays.master:
            return
        master, exp_avg, exp_avg_sq = state
        if reach and grads:
            last = grads[-1][1].scalars
            extrapolate(
                master,
                exp_avg,
                exp_avg_sq,
                step=last.step,
                hyper=last.hyper,
                reach=reach,
                out=scratch,
            )
            master = scratch
        arrays.outgoing[rows].copy_(master)
