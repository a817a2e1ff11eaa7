"""The interface between the engine and a device. Six operations; nothing else touches gradients.

The engine issues them in step order. An implementation may run them later (on streams), as long as
they take effect in the order issued, and :meth:`Device.ring` after every copy issued before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host.arena import Int64Array


@dataclass
class HotState:
    """Optimizer state of a matrix's hot columns, compact, on the device.

    Attributes:
        columns: int64 ``[n_hot]``: hot slot -> column of the matrix.
        master: fp32 ``[rows, n_hot]``, or None for fp32 parameters, which are their own master.
        exp_avg: fp32 ``[rows, n_hot]``.
        exp_avg_sq: fp32 ``[rows, n_hot]``.
        steps: hot updates made, the number of steps at which the matrix had a gradient.
    """

    columns: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int = 0


class Device(Protocol):
    """What the engine needs of the device that holds parameters and gradients.

    Matrices are given as their 2-d views ``[rows, cols]``; ``columns`` are int64 on that device.
    """

    def column_scores(self, grad: Tensor) -> Tensor:
        """Squared norm of each column, fp32 ``[cols]``, summed in fp32."""

    def split_hot(self, grad: Tensor, columns: Tensor) -> Tensor:
        """The gradient of ``columns``, compact: fp32 ``[rows, len(columns)]``."""

    def split_cold(self, grad: Tensor, columns: Tensor, staging: Tensor) -> None:
        """Send the gradient of ``columns`` to ``staging``, a host tensor of the gradient's dtype.

        ``staging`` is ``[rows, len(columns)]`` and lies in the arena.
        """

    def adamw_hot(
        self, param: Tensor, state: HotState, grad: Tensor, hyper: AdamHyper, decay: float | Tensor
    ) -> None:
        """One Adam update (number ``state.steps``) of the hot columns, scattered into ``param``.

        ``grad`` is compact fp32 ``[rows, n_hot]``; ``decay`` one factor, or fp32 ``[n_hot]``.
        """

    def merge(self, param: Tensor, columns: Tensor, values: Tensor) -> None:
        """Write host ``values`` ``[rows, len(columns)]`` into ``columns`` of ``param``."""

    def ring(self, word: Int64Array, index: int, number: int) -> None:
        """Store ``word[index] = number`` once every copy issued so far has arrived."""
