"""16-bit parameters: fp32 masters on both sides, and the parameter is their rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zenflow.engine import ZenFlowEngine
from tests.reference.zenflow_reference import GroupHyper, ReferenceConfig, ZenFlowReference
from tests.support import make_engine

STEPS = 400
LR = 2e-5
DECAY = 0.1
# The same, but 1 - LR * EXACT_DECAY is an fp32 number. Any other factor is rounded in fp32, by torch's
# AdamW as by ours, at every step to the same side: over 400 steps 1e-4 of the distance moved.
EXACT_DECAY = 34 * 2.0**-24 / LR
SHAPES = {"linear": (24, 16), "conv": (8, 3, 3, 3), "bias": (24,)}  # the last is dense hot
TOLERANCE = 1e-4  # of the distance moved


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights around 0.02: half a bf16 step there is three times a step of Adam at this lr."""
    gen = torch.Generator().manual_seed(0)
    return {
        name: (0.02 * torch.randn(shape, generator=gen)).to(dtype) for name, shape in SHAPES.items()
    }


def gradients(dtype: torch.dtype, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """A steady direction, which moves the weights, under noise, which re-selects columns."""
    gen = torch.Generator().manual_seed(1)
    steady = {name: torch.randn(shape, generator=gen) for name, shape in SHAPES.items()}
    return [
        {name: (g + torch.randn(g.shape, generator=gen)).to(dtype) for name, g in steady.items()}
        for _ in range(steps)
    ]


def leaves(values: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: v.detach().to(dtype, copy=True).requires_grad_() for n, v in values.items()}


def adamw(
    params: dict[str, Tensor], lr: float = LR, weight_decay: float = DECAY
) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(params.values()), lr=lr, weight_decay=weight_decay)


def set_grads(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    for name, param in params.items():
        param.grad = grads[name].to(param.dtype, copy=True)


def train_adamw(dtype: torch.dtype, grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """torch's AdamW on parameters of ``dtype``, from the bf16 start and with the bf16 gradients."""
    params = leaves(start(torch.bfloat16), dtype)
    optimizer = adamw(params)
    for step_grads in grads:
        set_grads(params, step_grads)
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def masters(engine: ZenFlowEngine, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """For each parameter and side (hot, cold, dense): a full-size fp32 tensor, NaN elsewhere."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in params.items():
        matrix = engine.matrix_of(param)
        if matrix is None:
            dense = engine.dense.states[param].master
            assert dense is not None
            found[name] = {"dense": dense.clone()}
            continue
        engine.synchronize()
        halves = {"cold": (matrix.columns.cold, matrix.arrays.master)}
        if matrix.hot is not None:
            assert matrix.hot.master is not None
            halves["hot"] = (matrix.columns.hot, matrix.hot.master)
        found[name] = {}
        for side, (columns, master) in halves.items():
            assert master.dtype == torch.float32
            whole = torch.full((matrix.rows, matrix.cols), torch.nan)
            whole[:, columns] = master
            found[name][side] = whole.view(param.shape)
    return found


def error(ours: Tensor, reference: Tensor, origin: Tensor) -> float:
    """Largest difference relative to the largest distance moved, over the entries of ``ours``."""
    here = ~ours.isnan()
    reference, origin = reference.float()[here], origin.float()[here]
    moved = (reference - origin).abs().max()
    return float((ours[here] - reference).abs().max() / moved)


@dataclass
class Trained:
    """What is left of a run of ours after its flush."""

    params: dict[str, Tensor]
    masters: dict[str, dict[str, Tensor]]
    hot: dict[str, list[int]]
    phases: dict[str, int]
    selections: int  # different sets of hot columns of the linear layer


def train_ours(
    grads: list[dict[str, Tensor]], weight_decay: float = DECAY, **settings: Any
) -> Trained:
    params = leaves(start(torch.bfloat16), torch.bfloat16)
    seen = set()
    optimizer = adamw(params, weight_decay=weight_decay)
    with make_engine(optimizer, **{"topk_ratio": 0.3, **settings}) as engine:
        for step_grads in grads:
            set_grads(params, step_grads)
            engine.step()
            linear = engine.matrix_of(params["linear"])
            if linear is not None:
                seen.add(tuple(sorted(linear.columns.hot.tolist())))
        engine.flush()
        matrices = {name: engine.matrix_of(param) for name, param in params.items()}
        return Trained(
            params={name: param.detach().clone() for name, param in params.items()},
            masters=masters(engine, params),
            hot={n: sorted(m.columns.hot.tolist()) for n, m in matrices.items() if m is not None},
            phases={n: m.phase for n, m in matrices.items() if m is not None},
            selections=len(seen),
        )


@pytest.fixture(scope="module")
def bf16_gradients() -> list[dict[str, Tensor]]:
    return gradients(torch.bfloat16)


@pytest.fixture(scope="module")
def fp32_adamw(bf16_gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return train_adamw(torch.float32, bf16_gradients)


@pytest.fixture(scope="module")
def synchronous(bf16_gradients: list[dict[str, Tensor]]) -> Trained:
    """S = 1, L = 0: the trajectory of AdamW in exact arithmetic, with a selection at every step."""
    return train_ours(bf16_gradients, update_interval=1, update_lag=0, select_interval=1)


def assert_follows(sides: dict[str, dict[str, Tensor]], reference: dict[str, Tensor]) -> None:
    """Every master, of each side, within :data:`TOLERANCE` of the distance moved."""
    origin = start(torch.bfloat16)
    for name, masters_of in sides.items():
        for side, master in masters_of.items():
            relative = error(master, reference[name], origin[name])
            assert relative <= TOLERANCE, f"{name}, {side}: {relative:.1e}"


def test_masters_follow_fp32_adamw(synchronous: Trained, fp32_adamw: dict[str, Tensor]) -> None:
    assert synchronous.selections > 20, "columns must change side in this run"
    assert {"hot", "cold", "dense"} == {s for sides in synchronous.masters.values() for s in sides}
    assert_follows(synchronous.masters, fp32_adamw)


@pytest.mark.parametrize("topk_ratio", [0.0, 1.0])
def test_masters_follow_fp32_adamw_when_all_are_cold_or_all_hot(
    topk_ratio: float, fp32_adamw: dict[str, Tensor], bf16_gradients: list[dict[str, Tensor]]
) -> None:
    ours = train_ours(bf16_gradients, topk_ratio=topk_ratio, update_interval=1, update_lag=0)
    assert_follows(ours.masters, fp32_adamw)
    assert_rounded(ours.params, ours.masters)


def test_plain_bf16_adamw_is_at_least_100_times_worse(
    synchronous: Trained,
    fp32_adamw: dict[str, Tensor],
    bf16_gradients: list[dict[str, Tensor]],
) -> None:
    """Or else the test above could not tell fp32 masters from none."""
    origin, plain = start(torch.bfloat16), train_adamw(torch.bfloat16, bf16_gradients)
    for name, sides in synchronous.masters.items():
        ours = max(error(master, fp32_adamw[name], origin[name]) for master in sides.values())
        theirs = error(plain[name].float(), fp32_adamw[name], origin[name])
        assert theirs >= 100 * max(ours, TOLERANCE), f"{name}: {theirs:.1e} against {ours:.1e}"


@pytest.mark.parametrize("schedule", ["window", "staggered"])
def test_masters_follow_the_fp64_reference_with_late_updates(
    bf16_gradients: list[dict[str, Tensor]], schedule: str
) -> None:
    settings = {"update_interval": 4, "select_interval": 4, "schedule": schedule}
    ours = train_ours(bf16_gradients, EXACT_DECAY, **settings)
    assert ours.selections > 20, "columns must change side in this run"
    config = ReferenceConfig(0.3, 4, 4, 4, warmup_steps=0, min_offload_numel=0)
    reference = ZenFlowReference(start(torch.bfloat16), config, ours.phases, dtype=torch.float64)
    hyper = {name: GroupHyper(LR, 0.9, 0.999, 1e-8, EXACT_DECAY, decoupled=True) for name in SHAPES}
    for step_grads in bf16_gradients:
        reference.step(step_grads, hyper)
    reference.flush()
    for name, columns in ours.hot.items():
        assert columns == reference.hot_columns()[name]
    assert_follows(ours.masters, reference.masters())
    assert_rounded(ours.params, ours.masters)


def assert_rounded(params: dict[str, Tensor], sides: dict[str, dict[str, Tensor]]) -> None:
    """Bit for bit: every parameter is its master, rounded."""
    for name, param in params.items():
        whole = torch.full(param.shape, torch.nan)
        for master in sides[name].values():
            whole = torch.where(master.isnan(), whole, master)
        assert not whole.isnan().any()
        assert torch.equal(param, whole.to(param.dtype)), name


def test_parameters_are_their_rounded_masters_after_400_steps(synchronous: Trained) -> None:
    assert_rounded(synchronous.params, synchronous.masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_parameters_are_their_rounded_masters_after_every_step(
    dtype: torch.dtype, lag: int
) -> None:
    """Hot and dense ones at every step; cold ones whenever nothing is outstanding."""
    params = leaves(start(dtype), dtype)
    compared = 0
    settings = {"update_interval": 3, "update_lag": lag, "select_interval": 3}
    with make_engine(adamw(params, lr=1e-3), topk_ratio=0.3, **settings) as engine:
        for step, step_grads in enumerate(gradients(dtype, 13), 1):
            set_grads(params, step_grads)
            engine.step()
            if step == 8:
                engine.flush()
            for name, sides in masters(engine, params).items():
                matrix = engine.matrix_of(params[name])
                if matrix is not None and matrix.outstanding is not None:
                    del sides["cold"]
                for master in sides.values():
                    here = ~master.isnan()
                    assert torch.equal(params[name].detach()[here], master[here].to(dtype))
                    compared += 1
    assert compared >= 13 * 3
