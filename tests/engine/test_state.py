"""The optimizer's state in AdamW's form, out of the engine and back; and reloading masters."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_zenflow.engine import ZenFlowEngine
from tests.support import make_engine, of_each_rule, set_grads

rule = of_each_rule(__name__)

SHAPES = [(13, 7), (4, 3, 3, 3), (13,), (6, 10)]
SYNCHRONOUS = {"topk_ratio": 0.3, "update_interval": 1, "update_lag": 0, "select_interval": 1}
LATE = {"topk_ratio": 0.3, "update_interval": 4, "select_interval": 4}
TOLERANCE = 2e-6
EARLIER, LATER = 7, 12  # steps before and after the change of hands

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    gen = torch.Generator().manual_seed(2)
    return [(0.02 * torch.randn(s, generator=gen)).to(dtype).requires_grad_() for s in SHAPES]


def copies(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().clone().requires_grad_() for param in params]


def two_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 5e-4}]


def make_adamw(params: list[Tensor]) -> Optimizer:
    return AdamW(two_groups(params), lr=1e-3)


def make_adam(params: list[Tensor]) -> Optimizer:
    return Adam(two_groups(params), lr=1e-3, weight_decay=0.01)


def advance(
    stepper: Optimizer | ZenFlowEngine, params: list[Tensor], first: int, last: int
) -> None:
    for step in range(first, last + 1):
        set_grads(params, step)
        stepper.step()


def assert_params_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0.0, atol=TOLERANCE)


def values(params: list[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for index, state in theirs["state"].items():
        assert sorted(ours["state"][index]) == sorted(state)
        for key, tensor in state.items():
            mine = ours["state"][index][key]
            assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
            torch.testing.assert_close(mine, tensor, rtol=0.0, atol=tolerance)


both_optimizers = pytest.mark.parametrize("make_optimizer", [make_adamw, make_adam])


@both_optimizers
def test_exported_state_is_that_of_adamw(make_optimizer: MakeOptimizer) -> None:
    ours, theirs = make_params(), make_params()
    optimizer = make_optimizer(theirs)
    advance(optimizer, theirs, 1, EARLIER)
    with make_engine(make_optimizer(ours), **SYNCHRONOUS) as engine:
        advance(engine, ours, 1, EARLIER)
        assert_same_state(engine.state_dict(), optimizer.state_dict(), TOLERANCE)


@both_optimizers
def test_adamw_continues_from_the_engine(make_optimizer: MakeOptimizer) -> None:
    ours = make_params()
    with make_engine(make_optimizer(ours), **SYNCHRONOUS) as engine:
        advance(engine, ours, 1, EARLIER)
        theirs, state = copies(ours), engine.state_dict()
        optimizer = make_optimizer(theirs)
        optimizer.load_state_dict(state)
        advance(engine, ours, EARLIER + 1, LATER)
    advance(optimizer, theirs, EARLIER + 1, LATER)
    assert_params_close(ours, theirs)


@both_optimizers
def test_engine_continues_from_adamw(make_optimizer: MakeOptimizer) -> None:
    theirs = make_params()
    optimizer = make_optimizer(theirs)
    advance(optimizer, theirs, 1, EARLIER)
    ours, state = copies(theirs), copy.deepcopy(optimizer.state_dict())
    advance(optimizer, theirs, EARLIER + 1, LATER)
    with make_engine(make_optimizer(ours), **SYNCHRONOUS) as engine:
        engine.load_state_dict(state)
        assert engine.steps == EARLIER
        advance(engine, ours, EARLIER + 1, LATER)
    assert_params_close(ours, theirs)


def test_saved_parameters_are_matched_by_group_and_not_by_number() -> None:
    """As torch does: the numbers in a state only tie its parts together."""
    theirs = make_params()
    optimizer = make_adamw(theirs)
    advance(optimizer, theirs, 1, EARLIER)
    state = copy.deepcopy(optimizer.state_dict())
    numbers = {0: 30, 1: 2, 2: 1, 3: 0}
    state["state"] = {numbers[number]: kept for number, kept in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [numbers[number] for number in group["params"]]
    ours = copies(theirs)
    with make_engine(make_adamw(ours), **SYNCHRONOUS) as engine:
        engine.load_state_dict(state)
        assert_same_state(engine.state_dict(), optimizer.state_dict(), TOLERANCE)


def test_a_used_engine_continues_from_adamw_as_a_fresh_one_does() -> None:
    """What the engine held before, pending gradients included, leaves no trace."""
    theirs = make_params()
    optimizer = make_adamw(theirs)
    advance(optimizer, theirs, 1, EARLIER)
    state, start = copy.deepcopy(optimizer.state_dict()), values(theirs)
    results = []
    for used in (False, True):
        ours = make_params()
        with make_engine(make_adamw(ours), **LATE) as engine:
            if used:
                advance(engine, ours, 100, 105)
                assert any(m.window.count + len(m.kept.gradients) for m in engine.matrices)
            with torch.no_grad():
                for param, value in zip(ours, start, strict=True):
                    param.copy_(value)
            engine.load_state_dict(state)
            advance(engine, ours, EARLIER + 1, LATER)
            engine.flush()
        results.append(values(ours))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=TOLERANCE)


def test_parameters_without_saved_state_start_anew() -> None:
    """As with AdamW: a state that does not mention a parameter clears what was kept about it."""
    theirs = make_params()
    optimizer = make_adamw(theirs)
    advance(optimizer, theirs, 1, EARLIER)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0], state["state"][2]  # a matrix and a dense parameter
    ours = copies(theirs)
    with make_engine(make_adamw(ours), **SYNCHRONOUS) as engine:
        advance(engine, ours, 100, 103)
        with torch.no_grad():
            for param, value in zip(ours, theirs, strict=True):
                param.copy_(value)
        engine.load_state_dict(state)
        optimizer.load_state_dict(state)
        advance(engine, ours, 20, 25)
    advance(optimizer, theirs, 20, 25)
    assert_params_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_survives_a_round_trip_with_late_updates(dtype: torch.dtype) -> None:
    """Bit for bit, although the two halves count their updates differently."""
    params = make_params(dtype)
    with make_engine(make_adamw(params), **LATE) as engine:
        advance(engine, params, 1, 10)
        engine.flush()
        assert all(matrix.updates != matrix.steps for matrix in engine.matrices)
        saved = engine.state_dict()
    again = copies(params)
    with make_engine(make_adamw(again), **LATE) as engine:
        engine.load_state_dict(saved)
        assert_same_state(engine.state_dict(), saved, 0.0)
        assert_same_bits(values(again), values(params))


def test_exported_moments_are_fp32_copies() -> None:
    """Also of bf16 parameters; later steps must not change a state that was handed out."""
    params = make_params(torch.bfloat16)
    with make_engine(make_adamw(params), **SYNCHRONOUS) as engine:
        advance(engine, params, 1, 3)
        saved = engine.state_dict()
        before = copy.deepcopy(saved)
        advance(engine, params, 4, 6)
        assert_same_state(saved, before, 0.0)
    moments = [state[key] for state in saved["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(moment.dtype == torch.float32 for moment in moments)


def test_parameters_that_never_had_a_gradient_have_no_state() -> None:
    params = make_params()
    with make_engine(make_adamw(params), **LATE) as engine:
        assert engine.state_dict()["state"] == {}
        set_grads(params, 1)
        params[1].grad = params[2].grad = None
        engine.step()
        assert sorted(engine.state_dict()["state"]) == [0, 3]


@pytest.mark.parametrize("lag", [0, 2, 4])
@pytest.mark.parametrize("schedule", ["window", "staggered"])
@pytest.mark.parametrize("pool_seed", [0, 1])
def test_saving_changes_no_bit_of_the_trajectory(lag: int, schedule: str, pool_seed: int) -> None:
    """At every step: in the middle of a window, and while an update is outstanding."""
    trajectories = []
    outstanding = pending = 0
    for saving in (False, True):
        params, seen = make_params(), []
        options = {**LATE, "update_lag": lag, "schedule": schedule, "num_workers": 2}
        with make_engine(make_adamw(params), seed=pool_seed, **options) as engine:
            for step in range(1, 15):
                advance(engine, params, step, step)
                if saving:
                    outstanding += any(m.outstanding is not None for m in engine.matrices)
                    pending += any(m.window.count + len(m.kept.gradients) for m in engine.matrices)
                    engine.state_dict()
                seen += values(params)
            engine.flush()
            seen += values(params)
        trajectories.append(seen)
    assert pending
    assert outstanding or lag == 0
    assert_same_bits(*trajectories)


def wrong_shape(state: dict[int, Any]) -> None:
    state[3]["exp_avg_sq"] = torch.zeros(10, 6)


def wrong_shape_dense(state: dict[int, Any]) -> None:
    state[2]["exp_avg"] = torch.zeros(5)


def missing_moment(state: dict[int, Any]) -> None:
    del state[3]["exp_avg"]


def missing_step(state: dict[int, Any]) -> None:
    del state[1]["step"]


def of_sgd(state: dict[int, Any]) -> None:
    state[0] = {"momentum_buffer": torch.zeros(SHAPES[0])}


DAMAGES = [
    (wrong_shape, "head", ("exp_avg_sq", "(10, 6)", "(6, 10)")),
    (wrong_shape_dense, "bias", ("exp_avg", "(5,)", "(13,)")),
    (missing_moment, "head", ("exp_avg", "Load the weights only")),
    (missing_step, "conv", ("'step'", "Load the weights only")),
    (of_sgd, "linear", ("momentum_buffer", "Load the weights only")),
]


def snapshot(engine: ZenFlowEngine, params: list[Tensor]) -> list[Any]:
    """All that a failed load might have changed, without flushing anything."""
    state = engine.state_dict()
    found: list[Any] = [copy.deepcopy(state["param_groups"]), engine.steps]
    found += [(m.steps, m.updates, m.last_selection, m.window.count) for m in engine.matrices]
    found += [(m.outstanding, m.columns.hot.tolist()) for m in engine.matrices]
    tensors = [*params, *(m.arrays.master for m in engine.matrices)]
    tensors += [
        state["state"][i][k] for i in state["state"] for k in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [*found, [tensor.detach().clone().tolist() for tensor in tensors]]


@pytest.mark.parametrize(
    ("damage", "name", "texts"), DAMAGES, ids=[damage.__name__ for damage, _, _ in DAMAGES]
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    damage: Callable[[dict[int, Any]], None], name: str, texts: tuple[str, ...]
) -> None:
    theirs = make_params()
    optimizer = AdamW(two_groups(theirs), lr=0.123, betas=(0.5, 0.6))
    advance(optimizer, theirs, 1, 3)
    state = copy.deepcopy(optimizer.state_dict())
    damage(state["state"])
    params = make_params()
    names = dict(zip(params, ["linear", "conv", "bias", "head"], strict=True))
    with make_engine(make_adamw(params), names=names, **LATE) as engine:
        advance(engine, params, 1, 6)  # a gradient is pending and an update outstanding
        before = snapshot(engine, params)
        with pytest.raises(ValueError, match=f"parameter {name}") as refusal:
            engine.load_state_dict(state)
        assert all(text in str(refusal.value) for text in texts)
        assert snapshot(engine, params) == before


def test_a_state_with_other_groups_is_refused_and_changes_nothing() -> None:
    theirs = make_params()
    optimizer = AdamW(theirs, lr=0.123)
    advance(optimizer, theirs, 1, 3)
    params = make_params()
    with make_engine(make_adamw(params), **LATE) as engine:
        advance(engine, params, 1, 6)
        before = snapshot(engine, params)
        with pytest.raises(ValueError, match="group"):
            engine.load_state_dict(optimizer.state_dict())
        assert snapshot(engine, params) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reload_makes_new_values_the_masters_and_drops_what_is_pending(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    with make_engine(make_adamw(params), **LATE) as engine:
        advance(engine, params, 1, 6)
        assert any(m.outstanding is not None for m in engine.matrices)
        assert any(m.window.count + len(m.kept.gradients) for m in engine.matrices)
        with torch.no_grad():
            for param in params:
                param.fill_(0.375)
        engine.reload_masters()
        engine.flush()
        assert all(bool((param == 0.375).all()) for param in params), "something was still pending"
        for matrix in engine.matrices:
            assert bool((matrix.arrays.master == 0.375).all())
            assert matrix.hot is not None
            if matrix.hot.master is not None:
                assert bool((matrix.hot.master == 0.375).all())
        advance(engine, params, 7, 14)
        engine.flush()
    # 8 steps of Adam at this lr move a weight by less than 0.02 from where it was put.
    assert all(bool(((param - 0.375).abs() < 0.02).all()) for param in params)
    assert all(bool((param != 0.375).any()) for param in params)


def test_training_goes_on_from_reloaded_masters_as_adamw_would() -> None:
    ours, theirs = make_params(), make_params()
    optimizer = make_adamw(theirs)
    with make_engine(make_adamw(ours), **SYNCHRONOUS) as engine:
        for first, last in ((1, EARLIER), (EARLIER + 1, LATER)):
            advance(engine, ours, first, last)
            advance(optimizer, theirs, first, last)
            with torch.no_grad():
                for mine, other in zip(ours, theirs, strict=True):
                    mine.mul_(-0.5)
                    other.mul_(-0.5)
            engine.reload_masters()
        advance(engine, ours, LATER + 1, LATER + 4)
        advance(optimizer, theirs, LATER + 1, LATER + 4)
    assert_params_close(ours, theirs)


@pytest.mark.parametrize("steps", range(1, 11))
def test_replayed_moments_are_complete_at_any_step(steps: int) -> None:
    """Under replay a state saved inside a window has AdamW's moments: kept gradients are in them."""
    ours, theirs = make_params(), make_params()
    optimizer = make_adamw(theirs)
    with make_engine(make_adamw(ours), **{**LATE, "cold_rule": "replay"}) as engine:
        for step in range(1, steps + 1):
            for params, stepper in ((ours, engine), (theirs, optimizer)):
                advance(stepper, params, step, step)
        assert_same_state(engine.state_dict(), optimizer.state_dict(), TOLERANCE)


def test_handing_over_leaves_the_optimizer_as_adamw_would(rule: str) -> None:
    """The optimizer goes on by itself from there; the engine is closed."""
    ours, theirs = make_params(), make_params()
    mine, optimizer = make_adamw(ours), make_adamw(theirs)
    engine = make_engine(mine, **SYNCHRONOUS)
    advance(engine, ours, 1, EARLIER)
    engine.hand_over()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
    advance(optimizer, theirs, 1, EARLIER)
    assert_same_state(mine.state_dict(), optimizer.state_dict(), TOLERANCE)
    advance(mine, ours, EARLIER + 1, LATER)
    advance(optimizer, theirs, EARLIER + 1, LATER)
    assert_params_close(ours, theirs)


def test_nothing_is_handed_over_with_work_pending(rule: str) -> None:
    params = make_params()
    with make_engine(make_adamw(params), **LATE) as engine:
        advance(engine, params, 1, 2)
        with pytest.raises(RuntimeError, match=r"call flush\(\) before hand_over"):
            engine.hand_over()
        engine.flush()
        engine.hand_over()


def test_handing_over_gives_memory_back_as_it_goes(rule: str) -> None:
    """At its end the pages of all matrices are gone, before the arena is."""
    params = [torch.randn(512, 512).requires_grad_() for _ in range(3)]
    optimizer = AdamW(params)
    with make_engine(optimizer, **SYNCHRONOUS) as engine:
        advance(engine, params, 1, 2)
        assert engine.pool is not None
        arena = engine.pool.arena
        before = os.fstat(arena.fd).st_blocks * 512
        for matrix in engine.matrices:
            arena.discard(matrix.index)
        assert os.fstat(arena.fd).st_blocks * 512 < 0.45 * before
