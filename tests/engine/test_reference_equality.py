"""The engine follows the sequential reference of the arithmetic, step by step, in every setting."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_zenflow.engine import ZenFlowEngine
from tests.reference.zenflow_reference import GroupHyper, ReferenceConfig, ZenFlowReference
from tests.support import make_engine

TOLERANCE = 2e-6


@dataclass(frozen=True)
class Case:
    """Settings and circumstances of one comparison."""

    k: float = 0.3
    s: int = 4
    lag: int = 4
    r: int = 4
    w: int = 0
    schedule: str = "window"
    adam: bool = False
    cold_lr_scale: float = 1.0
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ((7, 10), (5, 3, 3, 3), (6,), (9, 1), (1, 11))
    steps: int = 18
    chunk_elements: int = 16
    workers: int = 1
    seed: int | None = 0
    delay_us: int = 0
    missing: float = 0.0  # probability that a parameter has no gradient at a step
    flushes: frozenset[int] = field(default_factory=frozenset)  # after these steps


def compare(case: Case) -> ZenFlowReference:
    """Run both; equal weights, hot columns and counters after every step and flush."""
    gen = torch.Generator().manual_seed(11)
    params = [
        nn.Parameter((0.02 * torch.randn(shape, generator=gen)).to(case.dtype))
        for shape in case.shapes
    ]
    names = [f"p{i}" for i in range(len(params))]
    groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
    optimizer = (Adam if case.adam else AdamW)(
        groups if len(params) > 1 else groups[:1], lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1
    )
    with make_engine(
        optimizer,
        seed=case.seed,
        delay_us=case.delay_us,
        topk_ratio=case.k,
        update_interval=case.s,
        update_lag=case.lag,
        select_interval=case.r,
        warmup_steps=case.w,
        schedule=case.schedule,
        cold_lr_scale=case.cold_lr_scale,
        num_workers=case.workers,
        chunk_elements=case.chunk_elements,
    ) as engine:
        phases = {
            name: matrix.phase
            for name, param in zip(names, params, strict=True)
            if (matrix := engine.matrix_of(param)) is not None
        }
        reference = ZenFlowReference(
            dict(zip(names, params, strict=True)),
            ReferenceConfig(case.k, case.s, case.lag, case.r, case.w, 0, case.cold_lr_scale),
            phases,
        )
        run(case, engine, optimizer, reference, dict(zip(names, params, strict=True)))
    return reference


def run(
    case: Case,
    engine: ZenFlowEngine,
    optimizer: Optimizer,
    reference: ZenFlowReference,
    params: dict[str, nn.Parameter],
) -> None:
    draw = random.Random(5)
    gen = torch.Generator().manual_seed(12)
    for step in range(1, case.steps + 1):
        grads: dict[str, Tensor | None] = {}
        for name, param in params.items():
            scale = torch.exp(torch.randn(param.shape[-1:], generator=gen))  # hot columns wander
            grad = (scale * torch.randn(param.shape, generator=gen)).to(case.dtype)
            grads[name] = None if draw.random() < case.missing else grad
            param.grad = grads[name]
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1.0 + 0.5 * draw.random())
        reference.step(grads, read_hypers(optimizer, params))
        engine.step()
        check(case, engine, reference, params, f"step {step}")
        if step in case.flushes:
            flush(case, engine, reference, params, f"flush after {step}")
    flush(case, engine, reference, params, "last flush")


def flush(
    case: Case,
    engine: ZenFlowEngine,
    reference: ZenFlowReference,
    params: dict[str, nn.Parameter],
    where: str,
) -> None:
    reference.flush()
    engine.flush()
    assert not any(m.outstanding or m.window.count for m in engine.matrices), where
    check(case, engine, reference, params, where)
    for name, param in params.items():  # nothing is under way: masters can be looked at
        matrix = engine.matrix_of(param)
        if matrix is not None:
            master = reference.masters()[name].view(matrix.rows, matrix.cols)
            cold = matrix.arrays.master - master[:, matrix.columns.cold]
            assert cold.abs().max() <= TOLERANCE, f"{where}: {name}"


def read_hypers(optimizer: Optimizer, params: dict[str, nn.Parameter]) -> dict[str, GroupHyper]:
    found = {}
    for group in optimizer.param_groups:
        for name, param in params.items():
            if any(param is p for p in group["params"]):
                found[name] = GroupHyper(
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["weight_decay"],
                    decoupled=type(optimizer) is AdamW,
                )
    return found


def check(
    case: Case,
    engine: ZenFlowEngine,
    reference: ZenFlowReference,
    params: dict[str, nn.Parameter],
    where: str,
) -> None:
    # bf16 weights are the rounding of masters that agree: at most one step of bf16 apart.
    relative = 0.0 if case.dtype == torch.float32 else 2.0**-7
    hot, counters = reference.hot_columns(), reference.counters()
    for name, param in params.items():
        expected = reference.params[name].float()
        limit = TOLERANCE + relative * expected.abs()
        assert bool(((param.detach().float() - expected).abs() <= limit).all()), f"{where}: {name}"
        matrix = engine.matrix_of(param)
        if matrix is None:
            continue
        count = counters[name]
        assert (matrix.steps, matrix.updates) == (count.hot_steps, count.host_updates), where
        if count.selections:
            assert sorted(matrix.columns.hot.tolist()) == hot[name], f"{where}: {name}"


GRID = [(s, schedule) for s in (2, 3, 4) for schedule in ("window", "staggered")]


@pytest.mark.parametrize("adam", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize(("s", "schedule"), GRID)
def test_the_whole_grid(s: int, schedule: str, adam: bool) -> None:
    selections = 0
    for lag, k, r, w in itertools.product(
        (0, 1, s), (0.0, 0.1, 0.3), (s, 2 * s + 1), (0, 1, s, s + 1)
    ):
        case = Case(
            k=k,
            s=s,
            lag=lag,
            r=r,
            w=w,
            schedule=schedule,
            adam=adam,
            shapes=((7, 10), (5, 3, 3, 3), (6,)),
            steps=4 * s + 3,
            seed=lag + r + w,
        )
        reference = compare(case)
        selections += sum(c.selections for c in reference.counters().values())
    two_matrices_in_two_thirds_of_72_cases = 2 * 48
    assert selections >= 2 * two_matrices_in_two_thirds_of_72_cases, "chosen too rarely to show it"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    s = draw(st.integers(1, 5))
    width = st.integers(1, 37)
    shape = st.one_of(
        st.tuples(width, width),
        st.tuples(width, st.just(1)),
        st.tuples(st.just(1), width),
        st.tuples(st.integers(1, 6), st.integers(1, 4), st.just(3), st.just(3)),
        st.tuples(width),
    )
    steps = draw(st.integers(1, 20))
    return Case(
        k=draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9])),
        s=s,
        lag=draw(st.integers(0, s)),
        r=draw(st.integers(1, 3 * s)),
        w=draw(st.integers(0, s + 1)),
        schedule=draw(st.sampled_from(["window", "staggered"])),
        adam=draw(st.booleans()),
        cold_lr_scale=draw(st.sampled_from([1.0, 0.5, 2.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        shapes=tuple(draw(st.lists(shape, min_size=1, max_size=4))),
        steps=steps,
        chunk_elements=draw(st.sampled_from([1, 7, 64, 10_000])),
        workers=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
        missing=draw(st.sampled_from([0.0, 0.0, 0.3])),
        flushes=draw(st.frozensets(st.integers(1, steps), max_size=3)),
    )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(cases())
def test_any_case(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("schedule", ["window", "staggered"])
def test_real_workers(workers: int, schedule: str) -> None:
    compare(
        Case(
            s=3,
            lag=2,
            r=3,
            w=2,
            schedule=schedule,
            workers=workers,
            seed=None,
            delay_us=500,
            steps=50,
            missing=0.1,
            flushes=frozenset({7, 31}),
        )
    )


def test_staggered_phases_hold_about_the_same_number_of_elements() -> None:
    sizes = [(40, 30), (10, 30), (20, 20), (30, 30), (8, 8), (25, 31), (12, 19), (16, 40)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in sizes]
    with make_engine(AdamW(params), schedule="staggered", update_interval=3) as engine:
        load = [0, 0, 0]
        for matrix in engine.matrices:
            load[matrix.phase] += matrix.rows * matrix.cols
        assert max(load) < 1.25 * min(load)
