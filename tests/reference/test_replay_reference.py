"""Sanity of the replay reference: torch's AdamW behind it, and a preview computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from .replay_reference import ReplayReference
from .test_reference import (
    ADAMW,
    BOTH,
    hyper_at,
    make_config,
    random_grads,
    random_params,
    torch_trajectory,
)
from .zenflow_reference import GroupHyper, ReferenceConfig

CONFIGS = [
    make_config(k=0.0, s=4, lag=1, r=4),
    make_config(k=0.3, s=4, lag=4, r=4),
    make_config(k=0.3, s=3, lag=1, r=1, w=3),
    make_config(k=1.0, s=4, r=4),
]


def train(ref: ReplayReference, base: GroupHyper, steps: int) -> ReplayReference:
    for t in range(1, steps + 1):
        ref.step(random_grads(t), hyper_at(t, base))
    return ref


@BOTH
@pytest.mark.parametrize("steps", [1, 7, 16])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_flush_shows_adamw(config: ReferenceConfig, steps: int, base: GroupHyper) -> None:
    ref = train(ReplayReference(random_params(torch.float64), config), base, steps)
    ref.flush()
    for name, expected in torch_trajectory(base, steps, torch.float64).items():
        torch.testing.assert_close(ref.params[name], expected, rtol=0, atol=1e-12)


def test_without_lateness_every_step_is_adamws() -> None:
    config = make_config(k=0.3, s=1, lag=0, r=1)
    for steps in range(1, 9):
        ref = train(ReplayReference(random_params(torch.float64), config), ADAMW, steps)
        for name, expected in torch_trajectory(ADAMW, steps, torch.float64).items():
            torch.testing.assert_close(ref.params[name], expected, rtol=0, atol=1e-12)


def scalar_run(grads: list[float], gain: float, extrapolate: bool) -> list[float]:
    """A 1x1 matrix, S = 2, L = 1, beta = (.5, .75), lr 1, eps 0, no decay: the device's values."""
    h = GroupHyper(lr=1.0, beta1=0.5, beta2=0.75, eps=0.0, weight_decay=0.0, decoupled=True)
    config = ReferenceConfig(0.0, 2, 1, 2, 0, 0)
    params = {"w": torch.zeros(1, 1, dtype=torch.float64)}
    ref = ReplayReference(params, config, gain=gain, extrapolate=extrapolate)
    seen = []
    for grad in grads:
        ref.step({"w": torch.tensor([[grad]], dtype=torch.float64)}, {"w": h})
        seen.append(float(ref.params["w"]))
    return seen


def test_the_eager_step_by_hand() -> None:
    # s is sqrt(q / (1 - beta2^c)): first g = 2 gives q = 1, s = 2; then g = -4, q = 4.75, s^2 = 4.75 / 0.4375
    second = -4.0 / math.sqrt(4.75 / 0.4375)
    seen = scalar_run([2.0, -4.0], gain=1.0, extrapolate=False)
    assert seen == pytest.approx([-0.5, -0.5 - 0.5 * second])


def test_the_eager_step_is_clamped() -> None:
    # With beta2 = 0.75 a lone spike gives at most 1 / sqrt(0.25); a clamp of 10 is reached by the eps of a
    # smaller scale only, so the column's mean is diluted by many quiet rows here.
    h = GroupHyper(lr=1.0, beta1=0.0, beta2=0.75, eps=1e-9, weight_decay=0.0, decoupled=True)
    ref = ReplayReference({"w": torch.zeros(400, 1)}, ReferenceConfig(0.0, 2, 1, 2, 0, 0))
    grad = torch.zeros(400, 1)
    grad[0] = 1.0  # s = sqrt(1 / 400) = 0.05: the reaction would be 20
    ref.step({"w": grad}, {"w": h})
    assert ref.params["w"][0].item() == pytest.approx(-10.0)


def test_the_extrapolation_by_hand() -> None:
    # g = 2, 2: m-hat = 2 and v-hat = 4 throughout, each step moves by 1; h = L + S // 2 = 2 steps ahead
    # add 0.5 + 0.25. The update of steps 1 and 2 is merged at step 3.
    seen = scalar_run([2.0, 2.0, 2.0], gain=0.0, extrapolate=True)
    assert seen == pytest.approx([0.0, 0.0, -2.75])


def test_a_boundary_without_gradient_submits_what_is_kept() -> None:
    h = GroupHyper(lr=1.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, decoupled=True)
    ref = ReplayReference({"w": torch.zeros(1, 1)}, ReferenceConfig(0.0, 2, 1, 2, 0, 0), gain=0.0)
    grad: Tensor = torch.ones(1, 1)
    for g in (grad, None, None, grad):  # kept at 1, submitted at 2, merged when it next takes part
        ref.step({"w": g}, {"w": h})
    assert ref.params["w"].item() == -1.0
    ref.flush()
    assert ref.params["w"].item() == -2.0
