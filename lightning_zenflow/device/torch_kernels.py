"""The device kernels in plain torch: for the CPU, for CUDA without CuPy, and the oracle for both."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, adam_update_
from lightning_zenflow.device.base import Columns, EagerStep, HotState


class TorchKernels:
    """See :class:`~lightning_zenflow.device.base.Kernels`."""

    def column_scores(self, grad: Tensor, out: Tensor) -> None:
        torch.sum(grad.to(torch.float32).square(), dim=0, out=out)

    def squared_norm(self, data: Tensor, out: Tensor) -> None:
        out.copy_(torch.linalg.vector_norm(data, dtype=torch.float32).square())

    def split_hot(self, grad: Tensor, columns: Columns, out: Tensor) -> None:
        out.copy_(grad.index_select(1, columns.hot))

    def split_cold(
        self, grad: Tensor, columns: Columns, start: int, stop: int, out: Tensor
    ) -> None:
        torch.gather(grad[start:stop], 1, columns.cold.expand(stop - start, -1), out=out)

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
        if scale is not None:
            grad.mul_(scale)
        master = state.master
        if master is None:
            master = param.index_select(1, columns.hot)
        adam_update_(
            master,
            grad,
            state.exp_avg,
            state.exp_avg_sq,
            step=step,
            hyper=hyper,
            decay=decay,
        )
        _scatter(param, columns.hot, master.to(param.dtype))

    def track_squares(self, grad: Tensor, mean_squares: Tensor, beta2: float) -> None:
        sums = grad.to(torch.float32).square().sum(dim=0)
        mean_squares.mul_(beta2).add_(sums, alpha=(1.0 - beta2) / grad.shape[0])

    def preview(
        self,
        param: Tensor,
        columns: Columns,
        grad: Tensor,
        mean_squares: Tensor,
        step: EagerStep,
    ) -> None:
        scale = (mean_squares / step.correction).sqrt_().add_(step.eps)
        # Piece by piece: no second gradient in fp32 on the device.
        for part, values in zip(_pieces(grad), _pieces(param), strict=True):
            # Over all columns, as that needs no index: a hot one moves by nothing.
            reaction = torch.div(part, scale).clamp_(-step.limit, step.limit)
            reaction[:, columns.hot] = 0.0
            if param.dtype == torch.float32:
                values.sub_(reaction, alpha=step.size)
            else:
                values.copy_(values.to(torch.float32).sub_(reaction, alpha=step.size))

    def merge(self, param: Tensor, columns: Columns, start: int, stop: int, values: Tensor) -> None:
        _scatter(param[start:stop], columns.cold, values)


def _pieces(matrix: Tensor) -> tuple[Tensor, ...]:
    """Ranges of rows: such that they stay in a CPU's cache, or such that a GPU is busy with each."""
    elements = 1 << 18 if matrix.device.type == "cpu" else 1 << 24
    return torch.split(matrix, max(1, elements // matrix.shape[1]))


def _scatter(param: Tensor, columns: Tensor, values: Tensor) -> None:
    """``param[:, columns] = values``; on the CPU twice as fast as ``index_copy_``.

    As 16-bit integers where it can be: torch's scatter of bf16 on the CPU writes whole rows back, and
    another queue may be writing the other columns of these rows.
    """
    if param.dtype.itemsize == 2:
        param, values = param.view(torch.int16), values.view(torch.int16)
    param.scatter_(1, columns.expand(param.shape[0], -1), values)
