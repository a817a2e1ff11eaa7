"""Naive, sequential reference of ``cold_rule="replay"``.

It shares no code with the package. One observation keeps it short: under replay the masters *are* those of
AdamW, whatever the schedule; only the moment at which the device sees a cold column differs. So plain
AdamW is run on every column at every step (``master, m, v``), and the rest of this file is about what the
device shows of it: hot columns at once, cold columns as they were at the last submission plus the preview.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.reference.zenflow_reference import GroupHyper, ReferenceConfig, hot_column_count


@dataclass
class ReplayMatrix:
    """One parameter viewed as ``[rows, cols]``; per-column vectors are ``[cols]``."""

    device: Tensor  # [rows, cols], view of the exposed parameter
    master: Tensor  # [rows, cols], AdamW's weights after every gradient so far
    m: Tensor  # [rows, cols]
    v: Tensor  # [rows, cols]
    q: Tensor  # [cols], moving average of the gradient's mean square
    hot: Tensor  # [cols] bool
    n_hot: int
    dense: bool
    phase: int
    steps: int = 0  # gradients so far
    kept: int = 0  # gradients since the last submission
    selections: int = 0
    last_selection: int | None = None
    submitted: int | None = None
    hyper: GroupHyper | None = None  # of the last gradient
    outgoing: Tensor | None = None  # [rows, cols], what the outstanding submission will merge


class ReplayReference:
    """Sequential oracle; ``params`` holds what a forward pass would see after each step.

    Args:
        params: initial values, copied.
        config: the settings, shared with the reference of ``mean``.
        phases: of the staggered schedule, ``0 .. S-1``; 0 by default.
        gain: of the eager step, 0 for none; ``extrapolate``: whether merged values look ahead.
        dtype: of masters and moments.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        config: ReferenceConfig,
        phases: Mapping[str, int] | None = None,
        *,
        gain: float = 1.0,
        extrapolate: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config = config
        self.gain = gain
        self.t = 0
        late = config.update_interval > 1 or config.update_lag > 0
        self.late = late
        self.ahead = config.update_lag + config.update_interval // 2 if late and extrapolate else 0
        self.params = {name: p.detach().clone().contiguous() for name, p in params.items()}
        self.matrices = {
            name: self._new(p, (phases or {}).get(name, 0), dtype)
            for name, p in self.params.items()
        }
        self._hyper: dict[str, GroupHyper] = {}

    def _new(self, param: Tensor, phase: int, dtype: torch.dtype) -> ReplayMatrix:
        rows = param.shape[0] if param.dim() > 0 else 1
        cols = param.numel() // rows
        small = param.dim() < 2 or param.numel() < self.config.min_offload_numel
        n_hot = cols if small else hot_column_count(self.config.topk_ratio, cols)
        return ReplayMatrix(
            device=param.view(rows, cols),
            master=param.view(rows, cols).to(dtype, copy=True),
            m=torch.zeros(rows, cols, dtype=dtype),
            v=torch.zeros(rows, cols, dtype=dtype),
            q=torch.zeros(cols, dtype=dtype),
            hot=torch.full((cols,), n_hot == cols),
            n_hot=n_hot,
            dense=n_hot == cols,
            phase=phase,
        )

    def step(self, grads: Mapping[str, Tensor | None], hyper: Mapping[str, GroupHyper]) -> None:
        """One optimizer step; a gradient of None leaves weights and counters of its parameter alone.

        Only what a matrix has kept is submitted at its boundary even then (no effect on the masters).
        """
        self.t += 1
        self._hyper.update({name: replace(h) for name, h in hyper.items()})
        for name, state in self.matrices.items():
            after_warmup = self.t - self.config.warmup_steps
            boundary = (
                after_warmup > 0 and (after_warmup + state.phase) % self.config.update_interval == 0
            )
            grad = grads.get(name)
            if grad is not None:
                self._step(name, state, grad.detach().reshape(state.master.shape), boundary)
            elif boundary and state.kept and not state.dense:
                self._merge(state)
                self._submit(state)
                if self.config.update_lag == 0:
                    self._merge(state)

    def _step(self, name: str, state: ReplayMatrix, grad: Tensor, boundary: bool) -> None:
        if state.submitted is not None and self.t >= state.submitted + self.config.update_lag:
            self._merge(state)
        self._select(state, grad, boundary)
        hyper = self._hyper[name]
        grad = grad.to(state.master.dtype)
        self._adam(state, grad, hyper)
        _show(state, state.master, state.hot)
        if state.dense:
            return
        state.kept += 1
        state.q = hyper.beta2 * state.q + (1.0 - hyper.beta2) * grad.square().mean(dim=0)
        if self.t <= self.config.warmup_steps:
            state.outgoing, state.kept = state.master, 0
            _show(state, state.master, ~state.hot)
            return
        if self.late and self.gain:
            scale = (state.q / (1.0 - hyper.beta2**state.steps)).sqrt() + hyper.eps
            reaction = (grad / scale).clamp(-10.0, 10.0)
            eager = self.gain * (1.0 - hyper.beta1) * hyper.lr * reaction
            _show(state, state.device.to(grad.dtype) - eager, ~state.hot)
        if boundary:
            self._submit(state)
            if self.config.update_lag == 0:
                self._merge(state)

    def _select(self, state: ReplayMatrix, grad: Tensor, boundary: bool) -> None:
        if state.dense or state.n_hot == 0 or self.t <= self.config.warmup_steps:
            return
        last = state.last_selection
        if last is not None and not (boundary and self.t - last >= self.config.select_interval):
            return
        score = grad.to(torch.float32).square().sum(dim=0)
        best = torch.sort(score, descending=True, stable=True).indices[: state.n_hot]
        chosen = torch.zeros_like(state.hot)
        chosen[best] = True
        # A demoted column keeps what the device shows of it: it was hot, so that is its master.
        state.hot = chosen
        state.last_selection = self.t
        state.selections += 1

    def _adam(self, state: ReplayMatrix, grad: Tensor, h: GroupHyper) -> None:
        state.steps += 1
        state.hyper = h
        if h.decoupled:
            state.master = state.master * (1.0 - h.lr * h.weight_decay)
        else:
            grad = grad + h.weight_decay * state.master
        state.m = h.beta1 * state.m + (1.0 - h.beta1) * grad
        state.v = h.beta2 * state.v + (1.0 - h.beta2) * grad * grad
        state.master = state.master - h.lr * _direction(state, h)

    def _submit(self, state: ReplayMatrix) -> None:
        assert state.submitted is None, "two updates of one matrix outstanding"
        h = state.hyper
        assert h is not None
        reach = sum(h.beta1**i for i in range(1, self.ahead + 1))
        state.outgoing = state.master - h.lr * reach * _direction(state, h)
        state.submitted, state.kept = self.t, 0

    def _merge(self, state: ReplayMatrix) -> None:
        if state.submitted is not None:
            assert state.outgoing is not None
            _show(state, state.outgoing, ~state.hot)
            state.submitted = None

    def flush(self) -> None:
        """Nothing is owed any more: the device shows the masters."""
        for state in self.matrices.values():
            state.submitted, state.kept = None, 0
            _show(state, state.master, torch.ones_like(state.hot))


def _direction(state: ReplayMatrix, h: GroupHyper) -> Tensor:
    """AdamW's step of the present moments, before the learning rate."""
    if state.steps == 0:
        return torch.zeros_like(state.master)
    m_hat = state.m / (1.0 - h.beta1**state.steps)
    v_hat = state.v / (1.0 - h.beta2**state.steps)
    return m_hat / (v_hat.sqrt() + h.eps)


def _show(state: ReplayMatrix, values: Tensor, mask: Tensor) -> None:
    state.device[:, mask] = values[:, mask].to(state.device.dtype)
