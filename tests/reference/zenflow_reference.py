"""Naive, sequential reference of the hot/cold column arithmetic.

It shares no code with the package. Everything happens in the caller's thread, in order. Each matrix
keeps one full-width array per quantity, so a column that changes side needs no copy: only the set
``hot`` changes, and the moments are rescaled. ``device`` is what the forward pass sees, ``master``
the newest value. Two observations keep it short:

* A hot column is a column whose pending window is emptied at every step. So every step adds its
  gradient to the pending window of *all* columns, then updates the hot ones, and at a boundary the
  cold ones. Promotion with ``(acc + g) / (n + 1)`` and demotion with ``acc = g, n = 1`` follow.
* A dense hot parameter is a matrix with every column hot and no selection; a warm-up step updates
  every column with the host's counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Side = Literal["hot", "host"]


@dataclass(frozen=True)
class ReferenceConfig:
    """Settings: ``k, S, L, R, W``, the size limit, and the scale of the host's learning rate."""

    topk_ratio: float
    update_interval: int
    update_lag: int
    select_interval: int
    warmup_steps: int
    min_offload_numel: int
    cold_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        ratio, interval, lag = self.topk_ratio, self.update_interval, self.update_lag
        if not (0.0 <= ratio <= 1.0 and interval >= 1 and 0 <= lag <= interval):
            raise ValueError(f"{self}: needs 0 <= k <= 1, S >= 1 and 0 <= L <= S")


@dataclass
class GroupHyper:
    """One parameter group's values at one step; ``decoupled`` is AdamW, otherwise Adam."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


class GradientUse(NamedTuple):
    """Column ``columns[i]`` of the gradient of ``grad_step`` entered an update at ``weights[i]``.

    It is update number ``update`` of ``side``, computed at ``applied_step`` (flush: the last step).
    """

    grad_step: int
    applied_step: int
    side: Side
    update: int
    columns: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass
class Counters:
    """Steps with a gradient, host updates (warm-up and flush included), and selections made."""

    hot_steps: int = 0
    host_updates: int = 0
    selections: int = 0


@dataclass
class MatrixState:
    """All state of one parameter viewed as ``[rows, cols]``; per-column vectors are ``[cols]``."""

    device: Tensor  # [rows, cols], view of the exposed parameter
    master: Tensor  # [rows, cols], newest value of each column
    m: Tensor  # [rows, cols]
    v: Tensor  # [rows, cols]
    acc: Tensor  # [rows, cols], sum of the pending gradients
    n: Tensor  # [cols] int64, how many gradients are pending
    decay: Tensor  # [cols], product of (1 - lr_i * weight_decay) over the pending gradients
    hot: Tensor  # [cols] bool
    n_hot: int
    dense: bool
    phase: int
    counters: Counters = field(default_factory=Counters)
    last_selection: int | None = None
    submitted: int | None = None  # step of the outstanding host update: in master, not in device
    pending: dict[int, Tensor] = field(default_factory=dict)  # step -> [cols] bool: not yet used


def hot_column_count(topk_ratio: float, cols: int) -> int:
    """Number of hot columns of a matrix with ``cols`` columns."""
    if topk_ratio == 0.0:
        return 0
    return min(cols, max(1, math.floor(topk_ratio * cols + 0.5)))


class ZenFlowReference:
    """Sequential oracle; ``params`` holds what a forward pass would see after each step.

    ``params`` are copied; ``phases`` (staggered schedule, ``0 .. S-1``) default to 0; ``dtype`` is
    that of masters, moments and accumulators. A phase out of range is a ValueError.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        config: ReferenceConfig,
        phases: Mapping[str, int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        phases = phases or {}
        for name, phase in phases.items():
            if name not in params or not 0 <= phase < config.update_interval:
                raise ValueError(f"phase {phase} of {name!r}: unknown name or not in 0..S-1")
        self.config = config
        self.t = 0
        self.params = {name: p.detach().clone().contiguous() for name, p in params.items()}
        self.matrices = {
            name: self._new_matrix(p, phases.get(name, 0), dtype) for name, p in self.params.items()
        }
        self.usage: dict[str, list[GradientUse]] = {name: [] for name in self.params}
        self._last_hyper: dict[str, GroupHyper] = {}

    def step(self, grads: Mapping[str, Tensor | None], hyper: Mapping[str, GroupHyper]) -> None:
        """Take one optimizer step. ``grads`` and ``hyper`` are keyed by parameter name.

        A gradient of None (or an absent name) leaves that parameter and its counters alone.
        A flush reads the ``hyper`` of the last call that named the parameter.
        """
        if unknown := set(grads) - set(self.params):
            raise ValueError(f"gradients for unknown parameters {sorted(unknown)}")
        self.t += 1
        # Copies: a scheduler may change the caller's objects before flush() reads these.
        self._last_hyper.update({name: replace(h) for name, h in hyper.items()})
        for name, state in self.matrices.items():
            if (grad := grads.get(name)) is not None:
                self._step_matrix(name, state, grad.detach().reshape(state.master.shape))

    def flush(self) -> None:
        """Merge what is outstanding, then update from the partial window and merge that."""
        for name, state in self.matrices.items():
            self._merge(state)
            if bool((state.n > 0).any()):
                self._submit(name, state, self.config.cold_lr_scale)
                self._merge(state)

    def masters(self) -> dict[str, Tensor]:
        """Newest fp32 value of every element, host results not yet merged included."""
        fp32 = {n: s.master.to(torch.float32, copy=True) for n, s in self.matrices.items()}
        return {name: master.view_as(self.params[name]) for name, master in fp32.items()}

    def hot_columns(self) -> dict[str, list[int]]:
        """Ascending hot column indices of each parameter (all of them if dense hot)."""
        return {name: _indices(s.hot).tolist() for name, s in self.matrices.items()}

    def counters(self) -> dict[str, Counters]:
        """Counters of each parameter; no selection is counted where there is nothing to choose."""
        return {name: replace(s.counters) for name, s in self.matrices.items()}

    def _new_matrix(self, param: Tensor, phase: int, dtype: torch.dtype) -> MatrixState:
        rows = param.shape[0] if param.dim() > 0 else 1
        cols = param.numel() // rows if rows > 0 else 0
        small = param.dim() < 2 or param.numel() < self.config.min_offload_numel
        n_hot = cols if small else hot_column_count(self.config.topk_ratio, cols)
        return MatrixState(
            device=param.view(rows, cols),
            master=param.view(rows, cols).to(dtype, copy=True),
            m=torch.zeros(rows, cols, dtype=dtype),
            v=torch.zeros(rows, cols, dtype=dtype),
            acc=torch.zeros(rows, cols, dtype=dtype),
            n=torch.zeros(cols, dtype=torch.int64),
            decay=torch.ones(cols, dtype=dtype),
            hot=torch.full((cols,), n_hot == cols),
            n_hot=n_hot,
            dense=n_hot == cols,
            phase=phase,
        )

    def _step_matrix(self, name: str, state: MatrixState, grad: Tensor) -> None:
        hyper, config = self._last_hyper[name], self.config
        since_warmup = self.t - config.warmup_steps
        boundary = since_warmup > 0 and (since_warmup + state.phase) % config.update_interval == 0
        if state.submitted is not None and self.t >= state.submitted + config.update_lag:
            self._merge(state)
        if self._selects_now(state, boundary):
            self._select(state, grad, hyper)
        # Into every column's pending window; hot columns use it up at once.
        state.acc += grad.to(state.acc.dtype)
        state.n += 1
        if hyper.decoupled:
            state.decay *= 1.0 - hyper.lr * hyper.weight_decay
        state.pending[self.t] = torch.ones_like(state.hot)
        if since_warmup <= 0 and not state.dense:
            self._submit(name, state, lr_scale=1.0)
            self._merge(state)
        else:
            self._adam(name, "hot", state.counters.hot_steps + 1, _indices(state.hot), hyper.lr)
            _publish(state, state.hot)
            if boundary and not state.dense:
                self._submit(name, state, config.cold_lr_scale)
                if config.update_lag == 0:
                    self._merge(state)
        state.counters.hot_steps += 1

    def _selects_now(self, state: MatrixState, boundary: bool) -> bool:
        if state.dense or state.n_hot == 0 or self.t <= self.config.warmup_steps:
            return False
        last = state.last_selection
        return last is None or (boundary and self.t - last >= self.config.select_interval)

    def _select(self, state: MatrixState, grad: Tensor, hyper: GroupHyper) -> None:
        assert state.submitted is None, "selection while an update is outstanding"
        score = grad.to(torch.float32).square().sum(dim=0)
        # A stable descending sort leaves equal scores in index order: ties go to the lower index.
        best = torch.sort(score, descending=True, stable=True).indices[: state.n_hot]
        chosen = torch.zeros_like(state.hot)
        chosen[best] = True
        promoted, demoted = _indices(chosen & ~state.hot), _indices(state.hot & ~chosen)
        hot_count, host_count = state.counters.hot_steps, state.counters.host_updates
        _rescale(state, promoted, hyper, source=host_count, target=hot_count)
        _rescale(state, demoted, hyper, source=hot_count, target=host_count)
        state.hot = chosen
        state.last_selection = self.t
        state.counters.selections += 1

    def _submit(self, name: str, state: MatrixState, lr_scale: float) -> None:
        """Update the cold columns that have pending gradients; the result becomes outstanding."""
        assert state.submitted is None, "two updates of one matrix outstanding"
        columns = _indices(~state.hot & (state.n > 0))
        count = state.counters.host_updates = state.counters.host_updates + 1
        self._adam(name, "host", count, columns, self._last_hyper[name].lr * lr_scale)
        state.submitted = self.t

    def _merge(self, state: MatrixState) -> None:
        # No selection or second submission since then, so the cold masters are still the result.
        if state.submitted is not None:
            _publish(state, ~state.hot)
            state.submitted = None

    def _adam(self, name: str, side: Side, count: int, columns: Tensor, lr: float) -> None:
        """One Adam(W) update, number ``count``, of ``columns`` from their pending windows."""
        state, h = self.matrices[name], self._last_hyper[name]
        master = state.master[:, columns]
        grad = state.acc[:, columns] / state.n[columns]
        if h.decoupled:
            master = master * state.decay[columns]
        else:
            grad = grad + h.weight_decay * master
        m = h.beta1 * state.m[:, columns] + (1.0 - h.beta1) * grad
        v = h.beta2 * state.v[:, columns] + (1.0 - h.beta2) * grad * grad
        m_hat = m / (1.0 - h.beta1**count)
        v_hat = v / (1.0 - h.beta2**count)
        state.master[:, columns] = master - lr * m_hat / (v_hat.sqrt() + h.eps)
        state.m[:, columns], state.v[:, columns] = m, v
        self._empty_window(name, side, count, columns)

    def _empty_window(self, name: str, side: Side, count: int, columns: Tensor) -> None:
        """Record the use of every pending gradient of ``columns``, then forget them."""
        state = self.matrices[name]
        for step, unused in list(state.pending.items()):
            used = columns[unused[columns]]
            if used.numel() > 0:
                weights = tuple((1.0 / state.n[used].double()).tolist())
                use = GradientUse(step, self.t, side, count, tuple(used.tolist()), weights)
                self.usage[name].append(use)
                unused[used] = False
            if not bool(unused.any()):
                del state.pending[step]
        state.acc[:, columns] = 0.0
        state.n[columns] = 0
        state.decay[columns] = 1.0


def _indices(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten()


def _publish(state: MatrixState, mask: Tensor) -> None:
    """Make the masters of the columns in ``mask`` visible to the forward pass."""
    state.device[:, mask] = state.master[:, mask].to(state.device.dtype)


def _rescale(s: MatrixState, columns: Tensor, h: GroupHyper, source: int, target: int) -> None:
    """Keep the bias-corrected moments of ``columns`` while their update count changes."""
    if source > 0 and target > 0:
        s.m[:, columns] *= (1.0 - h.beta1**target) / (1.0 - h.beta1**source)
        s.v[:, columns] *= (1.0 - h.beta2**target) / (1.0 - h.beta2**source)
