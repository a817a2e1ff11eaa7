"""The work on one chunk: cache-blocked accumulation and AdamW, built on torch alone.

A chunk's arrays are read and written once each, everything in between stays in the cache: whole-tensor
operations would move about 46 bytes a parameter instead of 28 (docs/benchmarks). The gradient needs a
scratch copy because torch's fused Adam takes one dtype for all its tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import adam_update_
from lightning_zenflow.host.arena import MatrixArrays
from lightning_zenflow.host.commands import Accumulate, Update
from lightning_zenflow.host.layout import Chunk


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
        self, arrays: MatrixArrays, chunk: Chunk, command: Accumulate, factor: float = 1.0
    ) -> None:
        """``accumulator += factor * staging`` in fp32, or ``=`` for the first gradient of a window."""
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

    def update(self, arrays: MatrixArrays, chunk: Chunk, command: Update) -> None:
        """One AdamW update of the chunk with the mean of its accumulated gradients.

        The new values are rounded into ``outgoing`` where the parameter is not fp32.
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
        if arrays.outgoing is not arrays.master:
            arrays.outgoing[rows].copy_(master)
