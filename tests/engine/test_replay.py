"""``cold_rule="replay"``: AdamW's masters to rounding, and the device's view as the reference has it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from lightning_zenflow._compat import mark_stepped
from tests.reference.replay_reference import ReplayReference
from tests.reference.zenflow_reference import GroupHyper, ReferenceConfig
from tests.support import make_engine

TOLERANCE = 2e-6
SHAPES = ((7, 10), (5, 3, 3, 3), (6,), (9, 1), (1, 11), (12, 4))


@dataclass(frozen=True)
class Case:
    """Settings and circumstances of one run."""

    k: float = 0.3
    s: int = 4
    lag: int | None = None
    r: int = 4
    w: int = 0
    schedule: str = "auto"
    adam: bool = False
    preview: bool = True
    gain: float = 1.0
    dtype: torch.dtype = torch.float32
    steps: int = 18
    chunk_elements: int = 16
    workers: int = 1
    seed: int | None = 0
    delay_us: int = 0
    missing: float = 0.0  # probability that a parameter has no gradient at a step
    flushes: frozenset[int] = field(default_factory=frozenset)  # after these steps


class Run:
    """The engine and what it is compared with, on the same gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        gen = torch.Generator().manual_seed(11)
        self.params = [
            nn.Parameter((0.02 * torch.randn(shape, generator=gen)).to(case.dtype))
            for shape in SHAPES
        ]
        # AdamW itself, on fp32 copies: what 16-bit weights are the rounding of.
        self.twins = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self.params]
        self.optimizer, self.schedule = self._optimizer(self.params)
        self.twin, self.twin_schedule = self._optimizer(self.twins)
        self.engine = make_engine(
            self.optimizer,
            seed=case.seed,
            delay_us=case.delay_us,
            cold_rule="replay",
            topk_ratio=case.k,
            update_interval=case.s,
            update_lag=case.lag,
            select_interval=case.r,
            warmup_steps=case.w,
            schedule=case.schedule,
            preview=case.preview,
            num_workers=case.workers,
            chunk_elements=case.chunk_elements,
            **({"preview_gain": case.gain} if case.preview else {}),
        )
        self.names = [f"p{i}" for i in range(len(self.params))]
        matrices = [self.engine.matrix_of(p) for p in self.params]
        phases = {n: m.phase for n, m in zip(self.names, matrices, strict=True) if m is not None}
        self.reference = ReplayReference(
            dict(zip(self.names, self.params, strict=True)),
            ReferenceConfig(case.k, case.s, self.engine.config.lag, case.r, case.w, 0),
            phases,
            gain=case.gain if case.preview else 0.0,
            extrapolate=case.preview,
        )
        self.gen = torch.Generator().manual_seed(12)

    def _optimizer(self, params: list[nn.Parameter]) -> tuple[Optimizer, LRScheduler]:
        groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
        kind = Adam if self.case.adam else AdamW
        optimizer = kind(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
        # Changes lr and beta1 at every step.
        return optimizer, OneCycleLR(optimizer, 2e-3, total_steps=self.case.steps + 1)

    def gradients(self) -> list[Tensor | None]:
        grads: list[Tensor | None] = []
        for param in self.params:
            scale = torch.exp(torch.randn(param.shape[-1:], generator=self.gen))  # hot ones wander
            grad = (scale * torch.randn(param.shape, generator=self.gen)).to(self.case.dtype)
            missing = torch.rand((), generator=self.gen).item() < self.case.missing
            grads.append(None if missing else grad)
        return grads

    def step(self) -> None:
        grads = self.gradients()
        for param, twin, grad in zip(self.params, self.twins, grads, strict=True):
            param.grad = grad
            twin.grad = None if grad is None else grad.to(torch.float32)
        hyper = dict(
            zip(self.names, [self._hyper(0), *[self._hyper(1)] * (len(SHAPES) - 1)], strict=True)
        )
        self.reference.step(dict(zip(self.names, grads, strict=True)), hyper)
        self.engine.step()
        mark_stepped(self.optimizer)
        self.twin.step()
        self.schedule.step()
        self.twin_schedule.step()

    def _hyper(self, group: int) -> GroupHyper:
        g = self.optimizer.param_groups[group]
        return GroupHyper(
            g["lr"], *g["betas"], g["eps"], g["weight_decay"], g["decoupled_weight_decay"]
        )

    def flush(self) -> None:
        self.engine.flush()
        self.reference.flush()

    def check_device(self, where: str) -> None:
        """What a forward pass sees is what the reference says it sees."""
        for name, param in zip(self.names, self.params, strict=True):
            close(param, self.reference.params[name], f"{name}, {where}", self.case.dtype)

    def check_adamw(self, where: str) -> None:
        """After a flush: weights, masters and moments are those of AdamW."""
        for param, twin in zip(self.params, self.twins, strict=True):
            close(param, twin.to(param.dtype), where, self.case.dtype)
            state = self.twin.state[twin]
            matrix = self.engine.matrix_of(param)
            if matrix is None or not state:
                continue
            for key in ("master", "exp_avg", "exp_avg_sq"):
                whole = (twin.detach() if key == "master" else state[key]).view(matrix.rows, -1)
                cold = getattr(matrix.arrays, key)
                close(cold, whole[:, matrix.columns.cold], f"{key} {where}")
                if matrix.hot is not None and getattr(matrix.hot, key) is not None:
                    hot = getattr(matrix.hot, key)
                    close(hot, whole[:, matrix.columns.hot], f"hot {key} {where}")


def close(got: Tensor, expected: Tensor, where: str, dtype: torch.dtype = torch.float32) -> None:
    atol, rtol = (TOLERANCE, TOLERANCE) if dtype == torch.float32 else (TOLERANCE, 2**-7)
    message = lambda text: f"{where}: {text}"  # noqa: E731
    torch.testing.assert_close(
        got.detach(), expected.detach(), atol=atol, rtol=rtol, check_dtype=False, msg=message
    )


def compare(case: Case) -> Run:
    run = Run(case)
    with run.engine:
        for step in range(1, case.steps + 1):
            run.step()
            run.check_device(f"step {step}")
            if step in case.flushes:
                run.flush()
                run.check_device(f"flush after {step}")
                run.check_adamw(f"flush after {step}")
        run.flush()
        run.check_device("last flush")
        run.check_adamw("last flush")
    return run


BASE = Case()


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        replace(BASE, k=0.0),
        replace(BASE, s=1, lag=1),
        replace(BASE, s=2, lag=2, r=2),
        replace(BASE, s=3, lag=0, r=1),
        replace(BASE, lag=4, schedule="window"),
        replace(BASE, lag=3, schedule="window", missing=0.3),
        replace(BASE, s=8, lag=8, r=8, missing=0.2),
        replace(BASE, w=3, missing=0.2),
        replace(BASE, adam=True),
        replace(BASE, preview=False),
        replace(BASE, gain=0.0),
        replace(BASE, gain=2.0, missing=0.5),
        replace(BASE, flushes=frozenset({3, 4, 9})),
        replace(BASE, dtype=torch.bfloat16),
        replace(BASE, dtype=torch.float16, missing=0.2),
    ],
)
def test_follows_the_reference(case: Case) -> None:
    run = compare(case)
    for name, matrix in run.reference.matrices.items():
        assert matrix.selections > 1 or matrix.dense or not matrix.n_hot, (
            f"{name} never re-selected"
        )


def test_every_step_is_adamws_where_nothing_is_late() -> None:
    run = Run(replace(BASE, s=1, lag=0, r=1))
    with run.engine:
        for step in range(1, 12):
            run.step()
            run.check_adamw(f"step {step}")


@pytest.mark.parametrize("workers", [1, 2])
def test_real_workers(workers: int) -> None:
    compare(replace(BASE, seed=None, workers=workers, delay_us=300, missing=0.1, steps=14))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    s = draw(st.integers(1, 6))
    steps = draw(st.integers(1, 20))
    return Case(
        k=draw(st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])),
        s=s,
        lag=draw(st.one_of(st.none(), st.integers(0, s))),
        r=draw(st.integers(1, 8)),
        w=draw(st.sampled_from([0, 0, 0, 2, 30])),
        schedule=draw(st.sampled_from(["auto", "window", "staggered"])),
        adam=draw(st.booleans()),
        preview=draw(st.booleans()),
        gain=draw(st.sampled_from([0.0, 1.0, 1.5])),
        steps=steps,
        chunk_elements=draw(st.integers(1, 64)),
        workers=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
        missing=draw(st.sampled_from([0.0, 0.2, 0.6])),
        flushes=frozenset(draw(st.sets(st.integers(1, steps), max_size=2))),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_drawn_cases(case: Case) -> None:
    """After a flush at any step all of AdamW's state is there, whatever the settings."""
    compare(case)
