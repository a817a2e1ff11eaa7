"""The device operations in plain torch: for the CPU, and the oracle for every other device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, adam_update_
from lightning_zenflow.device.base import HotState
from lightning_zenflow.host.arena import Int64Array
from lightning_zenflow.host.commands import fence


class TorchDevice:
    """Runs each operation at once, on whichever device the tensors are. See ``Device``."""

    def column_scores(self, grad: Tensor) -> Tensor:
        return grad.to(torch.float32).square().sum(dim=0)

    def split_hot(self, grad: Tensor, columns: Tensor) -> Tensor:
        return grad.index_select(1, columns).to(torch.float32)

    def split_cold(self, grad: Tensor, columns: Tensor, staging: Tensor) -> None:
        if grad.device == staging.device:
            torch.gather(grad, 1, columns.expand(grad.shape[0], -1), out=staging)
        else:
            staging.copy_(grad.index_select(1, columns))

    def adamw_hot(
        self, param: Tensor, state: HotState, grad: Tensor, hyper: AdamHyper, decay: float | Tensor
    ) -> None:
        master = state.master
        if master is None:
            master = param.index_select(1, state.columns)
        adam_update_(
            master,
            grad,
            state.exp_avg,
            state.exp_avg_sq,
            step=state.steps,
            hyper=hyper,
            decay=decay,
        )
        _scatter_columns(param, state.columns, master.to(param.dtype))

    def merge(self, param: Tensor, columns: Tensor, values: Tensor) -> None:
        _scatter_columns(param, columns, values.to(param.device))

    def ring(self, word: Int64Array, index: int, number: int) -> None:
        # The copies above were synchronous: all that is left is to keep the processor's order.
        fence()
        word[index] = number


def _scatter_columns(param: Tensor, columns: Tensor, values: Tensor) -> None:
    """``param[:, columns] = values``; on the CPU twice as fast as ``index_copy_``."""
    param.scatter_(1, columns.expand(param.shape[0], -1), values)
