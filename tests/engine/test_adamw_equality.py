"""Where no update is late, the engine is torch's AdamW, on a model with every kind of parameter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_zenflow.engine import ZenFlowEngine
from tests.engine.models import TOLERANCE, Kitchen, batches, distance, twins
from tests.support import make_engine, of_each_rule, set_grads

rule = of_each_rule(__name__)

STEPS = 60

SAME_AS_ADAMW = {
    "k=0": {"topk_ratio": 0.0, "update_interval": 1, "update_lag": 0, "select_interval": 1},
    "k=0.1": {"topk_ratio": 0.1, "update_interval": 1, "update_lag": 0, "select_interval": 1},
    "k=0.3": {"topk_ratio": 0.3, "update_interval": 1, "update_lag": 0, "select_interval": 1},
    "k=1": {"topk_ratio": 1.0, "update_interval": 4},
    "warm-up": {"topk_ratio": 0.1, "update_interval": 4, "warmup_steps": STEPS},
}
SETTINGS = pytest.mark.parametrize("settings", SAME_AS_ADAMW.values(), ids=SAME_AS_ADAMW)

MakeOptimizer = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=1e-3, weight_decay=0.1)


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.2, "betas": (0.85, 0.98)},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
    ]
    return AdamW(groups, lr=1e-3, eps=1e-7)


class HotColumns:
    """Counts the choices of hot columns that changed something."""

    def __init__(self, engine: ZenFlowEngine) -> None:
        self._engine = engine
        self._last: dict[str, set[int]] = {}
        self.changes = 0

    def look(self) -> None:
        for matrix in self._engine.matrices:
            now = set(matrix.columns.hot.tolist())
            self.changes += now != self._last.get(matrix.name, now)
            self._last[matrix.name] = now


@SETTINGS
@pytest.mark.parametrize("make", [adamw, adam, two_groups])
def test_same_gradients(settings: dict[str, Any], make: MakeOptimizer) -> None:
    ours, theirs = twins()
    optimizer = make(theirs)
    with make_engine(make(ours), **settings) as engine:
        hot = HotColumns(engine)
        for step in range(1, STEPS + 1):
            for model in (ours, theirs):
                set_grads([p for p in model.parameters() if p.requires_grad], step)
            engine.step()
            optimizer.step()
            hot.look()
            assert distance(ours, theirs) <= TOLERANCE, f"step {step}"
        if 0.0 < settings["topk_ratio"] < 1.0 and "warmup_steps" not in settings:
            assert hot.changes > STEPS, "the hot columns hardly changed: nothing was shown"
        engine.flush()
        assert distance(ours, theirs) <= TOLERANCE


def train(
    model: Kitchen, optimizer: Optimizer, step: Callable[[], Any], steps: int, micro: int
) -> None:
    """``micro`` batches to a step, the last window with one only; OneCycleLR; clipping by norm."""
    scheduler = OneCycleLR(optimizer, max_lr=[2e-3, 4e-3], total_steps=steps + 1)
    data = batches(steps * micro - (micro - 1))
    for index in range(0, len(data), micro):
        optimizer.zero_grad()
        for batch in data[index : index + micro]:
            (model.loss(batch) / micro).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5, "nothing was clipped: nothing was shown"
        step()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        scheduler.step()


@SETTINGS
def test_real_training_with_groups_schedule_clipping_and_accumulation(
    settings: dict[str, Any],
) -> None:
    ours, theirs = twins()
    frozen = ours.frozen.weight.clone()
    optimizer = two_groups(theirs)
    train(theirs, optimizer, optimizer.step, STEPS, micro=3)
    optimizer = two_groups(ours)
    with make_engine(optimizer, **settings) as engine:
        train(ours, optimizer, engine.step, STEPS, micro=3)
        assert distance(ours, theirs) <= TOLERANCE
    assert distance(ours, twins()[0]) > 0.01, "the model hardly moved: nothing was shown"
    assert torch.equal(ours.frozen.weight, frozen)
    assert ours.output.weight is ours.embedding.weight


@pytest.mark.parametrize("name", ["k=0.3", "warm-up"])
def test_same_gradients_with_real_workers(name: str) -> None:
    ours, theirs = twins()
    optimizer = two_groups(theirs)
    with make_engine(two_groups(ours), seed=None, num_workers=2, **SAME_AS_ADAMW[name]) as engine:
        for step in range(1, STEPS + 1):
            for model in (ours, theirs):
                set_grads([p for p in model.parameters() if p.requires_grad], step)
            engine.step()
            optimizer.step()
            assert distance(ours, theirs) <= TOLERANCE, f"step {step}"


def test_a_group_with_lr_zero_does_not_move() -> None:
    model = twins()[0]
    still = [model.conv.weight, model.conv.bias]
    rest = [p for p in model.parameters() if not any(p is q for q in still)]
    optimizer = AdamW([{"params": still, "lr": 0.0}, {"params": rest}], lr=1e-3, weight_decay=0.1)
    before = [p.detach().clone() for p in still]
    with make_engine(optimizer, topk_ratio=0.3, update_interval=2) as engine:
        for step in range(1, 12):
            set_grads([p for p in model.parameters() if p.requires_grad], step)
            engine.step()
        engine.flush()
    assert all(torch.equal(p, q) for p, q in zip(still, before, strict=True))
    assert distance(model, twins()[0]) > 1e-3


def test_a_branch_without_gradient_is_left_alone() -> None:
    """As AdamW does: weights, moments and counters of a parameter without gradient stay."""
    ours, theirs = twins()
    optimizer = adamw(theirs)
    with make_engine(adamw(ours), **SAME_AS_ADAMW["k=0.3"]) as engine:
        for step in range(1, STEPS + 1):
            for model in (ours, theirs):
                set_grads([p for p in model.parameters() if p.requires_grad], step)
                if step % 2:
                    model.conv.weight.grad = None
                    model.norm.bias.grad = None
            engine.step()
            optimizer.step()
            assert distance(ours, theirs) <= TOLERANCE, f"step {step}"
        matrix = engine.matrix_of(ours.conv.weight)
        assert matrix is not None
        assert matrix.steps == matrix.updates == STEPS // 2
        assert engine.dense.states[ours.norm.bias].steps == STEPS // 2


def test_parameters_that_have_no_rows_stay_on_the_device_and_equal_adamw() -> None:
    """Fp64, 0-d, empty, views with gaps, transposes: dense hot, and exact. Channels-last weights are offloaded.

    The gradients are contiguous, as autograd's need not be laid out like the parameter's.
    """
    torch.manual_seed(3)
    values = [
        torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(9, 7, dtype=torch.float64),
        torch.randn(()),
        torch.randn(0, 5),
        torch.randn(8, 10)[:, ::2],
        torch.randn(3, 8).t(),
        torch.randn(8, 5),
    ]
    ours, theirs = ([nn.Parameter(v.detach()) for v in copy.deepcopy(values)] for _ in range(2))
    assert ours[4].stride() == (10, 2)
    optimizer = AdamW(theirs, lr=1e-3)
    with make_engine(AdamW(ours, lr=1e-3), **SAME_AS_ADAMW["k=0.3"]) as engine:
        assert [id(m.param) for m in engine.matrices] == [id(ours[0]), id(ours[-1])]
        assert engine.kept_on_device == {}, "none of them is large"
        for step in range(1, STEPS + 1):
            set_grads(ours, step)
            set_grads(theirs, step)
            engine.step()
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0.0, atol=TOLERANCE)
            assert a.stride() == b.stride()


def test_channels_last_weights_keep_their_layout_and_their_state() -> None:
    """Offloaded by columns in the order of memory; the state is AdamW's in shape, order and strides."""
    value = torch.randn(6, 4, 3, 5).to(memory_format=torch.channels_last)
    ours, theirs = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizer = AdamW([theirs], lr=1e-3)
    settings = {
        "topk_ratio": 0.2,
        "update_interval": 3,
        "select_interval": 3,
        "cold_rule": "replay",
    }
    with make_engine(AdamW([ours], lr=1e-3), **settings) as engine:
        for step in range(1, 8):
            set_grads([ours], step)
            set_grads([theirs], step)
            engine.step()
            optimizer.step()
        saved, expected = engine.state_dict()["state"][0], optimizer.state_dict()["state"][0]
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(saved[key], expected[key], rtol=0.0, atol=TOLERANCE)
            assert saved[key].stride() == expected[key].stride()
        engine.load_state_dict(optimizer.state_dict())
        torch.testing.assert_close(engine.state_dict()["state"][0], expected)
        engine.flush()
    assert ours.stride() == value.stride()


class Unusual(nn.Module):
    """Large parameters that cannot be offloaded, and one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(64, 80, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(80, 64).t())
        self.gaps = nn.Parameter(torch.randn(64, 160)[:, ::2])
        self.single = nn.Parameter(torch.randn(5000, 1))
        self.small = nn.Parameter(torch.randn(8, 6).t())
        self.plain = nn.Parameter(torch.randn(64, 80))


def test_large_parameters_that_are_not_offloaded_are_named_with_the_reason_once() -> None:
    module = Unusual()
    names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_engine(AdamW(module.parameters()), names=names) as engine:
            assert [m.name for m in engine.matrices] == ["plain"]
            kept = engine.kept_on_device
    assert sorted(kept) == ["gaps", "single", "turned", "wide"]
    assert "torch.float64 is wider than the fp32 masters" in kept["wide"]
    assert "strides (1, 64); .contiguous() before" in kept["turned"]
    assert "strides (160, 2); .contiguous() before" in kept["gaps"]
    assert "all of its 1 columns are hot at topk_ratio=0.1" in kept["single"]
    [message] = [str(w.message) for w in caught]
    assert all(f"{name}: {reason}" in message for name, reason in kept.items())


def test_nothing_is_said_where_all_was_to_stay_on_the_device() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(AdamW(Unusual().parameters()), topk_ratio=1.0).close()
