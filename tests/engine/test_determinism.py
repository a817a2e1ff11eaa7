"""The same seed gives the same bits; how the host half's work is shared out changes rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import make_engine, set_grads

STEPS = 11
SHAPES = [(13, 7), (5, 3, 3, 3), (13,), (6, 10)]
TOLERANCE = 2e-6


def train(
    pool_seed: int | None = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Every parameter after every step, then masters and moments of both halves at the end.

    Migrations with pending gradients (R = S), a flush inside a window and lags are all in it.
    """
    gen = torch.Generator().manual_seed(3)
    params = [(0.02 * torch.randn(s, generator=gen)).to(dtype).requires_grad_() for s in SHAPES]
    options = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 3, **options}
    seen: list[Tensor] = []
    with make_engine(torch.optim.AdamW(params, lr=1e-3), seed=pool_seed, **options) as engine:
        chosen = set()
        for step in range(1, STEPS + 1):
            set_grads(params, step)
            engine.step()
            chosen.add(tuple(sorted(engine.matrices[1].columns.hot.tolist())))
            if step == 8:
                engine.flush()
            seen += [param.detach().clone() for param in params]
        assert len(chosen) > 2, "columns must migrate in this run"
        engine.flush()
        for matrix in engine.matrices:
            assert matrix.hot is not None
            host = matrix.arrays
            seen += [t.clone() for t in (host.master, host.exp_avg, host.exp_avg_sq)]
            seen += [matrix.hot.exp_avg.clone(), matrix.hot.exp_avg_sq.clone()]
            seen += [matrix.columns.hot.clone(), matrix.columns.cold.clone()]
    return seen


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=["replay", "mean"])
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def baseline(rule: str) -> list[Tensor]:
    """One lane, one chunk for each matrix."""
    return train(cold_rule=rule)


@pytest.fixture(scope="module")
def two_real_workers(rule: str) -> list[Tensor]:
    return train(None, cold_rule=rule, num_workers=2, chunk_elements=20)


@pytest.mark.parametrize("schedule", ["window", "staggered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_twice_the_same_bits(rule: str, schedule: str, dtype: torch.dtype, lag: int) -> None:
    options = {
        "cold_rule": rule,
        "schedule": schedule,
        "update_lag": lag,
        "num_workers": 2,
        "chunk_elements": 20,
    }
    assert_same_bits(train(1, dtype, **options), train(1, dtype, **options))


def test_twice_the_same_bits_with_real_workers(rule: str, two_real_workers: list[Tensor]) -> None:
    assert_same_bits(
        train(None, cold_rule=rule, num_workers=2, chunk_elements=20), two_real_workers
    )


@pytest.mark.parametrize("schedule", ["window", "staggered"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_interleaving_of_lanes_and_trainer_changes_no_bit(
    rule: str, schedule: str, lag: int
) -> None:
    options = {
        "cold_rule": rule,
        "schedule": schedule,
        "update_lag": lag,
        "num_workers": 3,
        "chunk_elements": 30,
    }
    first = train(0, **options)
    for pool_seed in range(1, 5):
        assert_same_bits(train(pool_seed, **options), first)


def test_inline_lanes_and_real_workers_give_the_same_bits(
    rule: str, two_real_workers: list[Tensor]
) -> None:
    """What the other tests show with inline lanes holds for processes too."""
    assert_same_bits(train(7, cold_rule=rule, num_workers=2, chunk_elements=20), two_real_workers)


def test_random_sleeps_in_workers_change_no_bit(rule: str, two_real_workers: list[Tensor]) -> None:
    delayed = train(None, cold_rule=rule, num_workers=2, chunk_elements=20, delay_us=2000)
    assert_same_bits(delayed, two_real_workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_elements", [1, 12, 37, 10**6])
def test_workers_threads_and_chunks_change_rounding_only(
    rule: str, baseline: list[Tensor], workers: int, threads: int, chunk_elements: int
) -> None:
    """From one row a chunk (1 element asked for) to whole matrices."""
    options = {"cold_rule": rule, "num_workers": workers, "threads_per_worker": threads}
    assert_close(train(0, chunk_elements=chunk_elements, **options), baseline)


@pytest.mark.parametrize(("workers", "threads"), [(1, 2), (3, 1)])
def test_real_workers_and_threads_change_rounding_only(
    rule: str, baseline: list[Tensor], workers: int, threads: int
) -> None:
    options = {"cold_rule": rule, "num_workers": workers, "threads_per_worker": threads}
    assert_close(train(None, chunk_elements=12, **options), baseline)
