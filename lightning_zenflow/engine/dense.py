"""Dense hot parameters: updated whole, on the device, at every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zenflow._compat import foreach_copy_, version
from lightning_zenflow.arithmetic import AdamHyper, adam_updates_


@dataclass
class DenseState:
    """Adam state of one parameter, on its device.

    ``master`` is None if the parameter is it: fp32 or wider, with its elements side by side in memory.
    The fused update walks through memory, so all its tensors must lie in it in the same order.
    """

    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int = 0
    version: int = 0  # the parameter's, after our own last change of it


class DenseHot:
    """All parameters that are not offloaded. State is made at a parameter's first gradient."""

    def __init__(self) -> None:
        self.states: dict[Tensor, DenseState] = {}

    def state(self, param: Tensor) -> DenseState:
        """The parameter's state, made if need be (16-bit parameters get an fp32 master)."""
        if param not in self.states:
            dtype = torch.promote_types(param.dtype, torch.float32)
            value = param.detach()
            # Keeps the order of the parameter's elements in memory, but closes gaps between them.
            master = torch.empty_like(value, dtype=dtype).copy_(value)
            itself = dtype == value.dtype and master.stride() == value.stride()
            self.states[param] = DenseState(
                master=None if itself else master,
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
                version=version(value),
            )
        return self.states[param]

    @property
    def numel(self) -> int:
        """Parameters with state so far."""
        return sum(param.numel() for param in self.states)

    def load_masters(self) -> None:
        """Take the parameters' present values as masters."""
        for param, state in self.states.items():
            if state.master is not None:
                state.master.copy_(param.detach())
                state.version = version(param)

    def update(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        hyper: AdamHyper,
        factor: Tensor | None = None,
    ) -> None:
        """One Adam update of each parameter with ``factor`` times its gradient, in few fused calls.

        ``factor`` is one fp32 on the device; None is 1.
        """
        batches: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for param, grad in pairs:
            state = self.state(param)
            state.steps += 1
            _adopt_changes(param.detach(), state)
            key = (param.dtype, param.device, state.master is None, state.steps)
            batches[key].append((param, grad))
        for batch in batches.values():
            self._update_batch(batch, hyper, factor)

    def _update_batch(
        self, batch: list[tuple[Tensor, Tensor]], hyper: AdamHyper, factor: Tensor | None
    ) -> None:
        """Parameters of one dtype, device and step count."""
        states = [self.states[param] for param, _ in batch]
        values = [param.detach() for param, _ in batch]
        masters = [
            value if s.master is None else s.master for value, s in zip(values, states, strict=True)
        ]
        grads = [_like(grad, master) for (_, grad), master in zip(batch, masters, strict=True)]
        if factor is not None:
            grads = [grad * factor.to(grad.dtype) for grad in grads]
        adam_updates_(
            masters,
            grads,
            [state.exp_avg for state in states],
            [state.exp_avg_sq for state in states],
            step=states[0].steps,
            hyper=hyper,
            decay=hyper.step_decay,
        )
        if masters[0] is not values[0]:
            foreach_copy_(values, masters)
        for value, state in zip(values, states, strict=True):
            state.version = version(value)


def _adopt_changes(value: Tensor, state: DenseState) -> None:
    """Take into the master what someone else has written into the parameter since our last step."""
    if state.master is not None and version(value) != state.version:
        ours = state.master.to(value.dtype) == value
        state.master.copy_(torch.where(ours, state.master, value.to(state.master.dtype)))


def _like(grad: Tensor, master: Tensor) -> Tensor:
    """``grad`` in the dtype and memory order of ``master``; itself if it is already."""
    if grad.dtype == master.dtype and grad.stride() == master.stride():
        return grad
    return torch.empty_like(master).copy_(grad)
