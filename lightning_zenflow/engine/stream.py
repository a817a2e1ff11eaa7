"""Gradients that leave during backward: taken one by one, applied by the step that follows.

Nothing that a step would change is changed here: what has been taken can be dropped again
(:meth:`GradientStream.discard`). Clipping by norm stays exact: squared norms are taken on the way, and
the factor reaches the hot update and the host's accumulation with the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_zenflow.device import Columns, Device, Event
from lightning_zenflow.engine.columns import Swap
from lightning_zenflow.engine.hyper import check_gradient
from lightning_zenflow.engine.matrix import Matrix


@dataclass(frozen=True)
class Arrival:
    """A matrix's gradient of one step, split: its cold half is on its way to the staging.

    Attributes:
        hot_grad: fp32 ``[rows, n_hot]``, or None if there are no hot columns.
        columns: by which it was split: the matrix's own, or those that this step's selection chose.
        swap: what has to migrate to get from the one to the other, None if nothing.
        selected: whether a selection was due.
    """

    hot_grad: Tensor | None
    columns: Columns
    swap: Swap | None
    selected: bool


Arrive = Callable[[Matrix, Tensor, Event], Arrival]


class GradientStream:
    """Takes the matrices' gradients as backward makes them.

    Args:
        matrices: whose gradients are taken.
        device: the device half.
        arrive: splits a gradient and sends its cold half.
        sent: gives back what has been sent, ``[rows, n_cold]`` on the host.
        clip_norm: the whole gradient is clipped to this 2-norm (as ``clip_grad_norm_`` does); None
            for no clipping.
        free: set ``.grad`` to None once a gradient is taken, by a hook on each parameter. False if
            someone else calls :meth:`take`.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        device: Device,
        arrive: Arrive,
        sent: Callable[[Matrix], Tensor],
        *,
        clip_norm: float | None,
        free: bool,
    ) -> None:
        self.clip_norm = clip_norm
        self._free = free
        self.arrivals: dict[Matrix, Arrival] = {}
        self._device = device
        self._arrive = arrive
        self._sent = sent
        self._kept: set[Matrix] = set()
        self._norms = device.empty(max(1, len(matrices)))  # squared, one a matrix
        self._handles: list[RemovableHandle] = []
        if free:
            for matrix in matrices:
                hook = partial(self._take_and_free, matrix)
                register: Any = matrix.param.register_post_accumulate_grad_hook
                self._handles.append(register(hook))

    def _take_and_free(self, matrix: Matrix, param: Tensor) -> None:
        if param.grad is None or matrix in self._kept:
            return
        if matrix in self.arrivals:
            self._recall(matrix, param)
            return
        self.take(matrix, param.grad)
        param.grad = None

    @torch.no_grad()
    def take(self, matrix: Matrix, grad: Tensor) -> None:
        """Split ``grad`` (the parameter's shape) and send its cold half.

        Its memory must not be written again before ``Device.release_gradients``, unless it is freed.
        """
        device = self._device
        check_gradient(matrix.name, grad)
        if self.clip_norm is not None:
            if not self.arrivals:
                device.on_compute(self._norms.zero_)
            device.squared_norm(grad, self._norms[matrix.index])
        flat = matrix.table(grad).contiguous()
        self.arrivals[matrix] = self._arrive(matrix, flat, device.now())
        device.bound_gradients(discard=self._free)

    def _recall(self, matrix: Matrix, param: Tensor) -> None:
        """A second gradient before the step: put the first back and add them, as autograd would.

        It happens where a parameter's gradient is made in several backward passes of one step (a
        layer shared by two reentrantly checkpointed blocks, or a loop that calls backward twice).
        """
        warnings.warn(
            f"the gradient of {matrix.name} arrived twice in one step; it is retained until the step "
            "from now on, instead of leaving during backward. If the first of the two was to be "
            "dropped, call engine.discard_gradients() beside zero_grad().",
            stacklevel=2,
        )
        arrival = self.arrivals.pop(matrix)
        self._kept.add(matrix)
        self._device.synchronize()
        first = torch.empty(matrix.rows, matrix.cols, dtype=param.dtype, device=param.device)
        first[:, arrival.columns.cold] = self._sent(matrix).to(param.device)
        if arrival.hot_grad is not None:
            first[:, arrival.columns.hot] = arrival.hot_grad.to(param.dtype)
        assert param.grad is not None
        param.grad = matrix.shaped(first) + param.grad
        if self.clip_norm is not None:
            self._device.on_compute(self._norms[matrix.index].zero_)

    def factor(self, retained: Sequence[Tensor]) -> Tensor | None:
        """The clip factor of this step (fp32, one element, on the device), None without clipping.

        ``retained`` are the gradients that have not been taken.
        """
        if self.clip_norm is None:
            return None
        out = self._device.empty(1)
        norms = self._norms if self.arrivals else None
        self._device.on_compute(partial(_clip_factor, norms, list(retained), self.clip_norm, out))
        return out

    def discard(self) -> None:
        """Forget what has been taken since the last step."""
        if any(arrival.swap is not None for arrival in self.arrivals.values()):
            self._device.synchronize()  # down may still be reading the columns chosen for it
        self.arrivals.clear()

    def close(self) -> None:
        """Take no more gradients."""
        self.discard()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _clip_factor(
    squares: Tensor | None, retained: list[Tensor], clip_norm: float, out: Tensor
) -> None:
    """The factor of ``torch.nn.utils.clip_grad_norm_``: ``clip_norm / (norm + 1e-6)``, at most 1."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in retained]
    if squares is not None:
        norms.append(squares.sum().sqrt())
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(out)
    out.copy_((clip_norm / (total + 1e-6)).clamp(max=1.0))
