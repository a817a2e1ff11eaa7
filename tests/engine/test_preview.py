"""The preview is only a view: it stays near AdamW under bad steps, and a flush leaves nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zenflow.engine import engine as engine_module
from tests.support import make_engine, set_grads

SHAPES = [(40, 24), (24, 40), (16, 8)]
SPIKE_AT = 30
STEPS = 45
LIMIT = 3.0  # the spike may move a device weight so many times as far as it moves AdamW's


def trajectory(spike: int, clip: float | None, settings: dict[str, Any] | None) -> list[Tensor]:
    """All weights after every step from the spike on, of AdamW (``settings`` None) or of the engine's device.

    Gradients are noise; at step ``spike`` one row is 1000 times as large.
    """
    gen = torch.Generator().manual_seed(5)
    params = [nn.Parameter(0.02 * torch.randn(shape, generator=gen)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    engine = None if settings is None else make_engine(optimizer, cold_rule="replay", **settings)
    seen = []
    try:
        for step in range(1, STEPS + 1):
            for param in params:
                param.grad = torch.randn(param.shape, generator=gen)
                if step == spike:
                    param.grad[0] *= 1000.0
            if clip is not None:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step() if engine is None else engine.step()
            if step >= SPIKE_AT:
                seen.append(torch.cat([p.detach().flatten() for p in params]))
    finally:
        if engine is not None:
            engine.close()
    return seen


def effect(spike: int, clip: float | None, settings: dict[str, Any] | None) -> list[float]:
    """After each step how far the spike has moved the weight that it has moved furthest, ever so far."""
    pairs = zip(trajectory(spike, clip, settings), trajectory(0, clip, settings), strict=True)
    furthest, moved = [], 0.0
    for spiked, calm in pairs:
        moved = max(moved, float((spiked - calm).abs().max()))
        furthest.append(moved)
    return furthest


SETTINGS = [
    {"update_interval": 4, "topk_ratio": 0.1},
    {"update_interval": 8, "topk_ratio": 0.0},
    {"update_interval": 4, "topk_ratio": 0.1, "update_lag": 4, "schedule": "window"},
    {"update_interval": 1, "update_lag": 1, "topk_ratio": 0.1},
]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("spike", range(SPIKE_AT, SPIKE_AT + 4))  # anywhere in the window
def test_a_spike_moves_no_weight_much_further_than_adamw(
    spike: int, settings: dict[str, Any], clip: float | None
) -> None:
    ours, theirs = effect(spike, clip, settings), effect(spike, clip, None)
    assert theirs[-1] > 5e-4, "the spike must matter"
    assert all(a <= LIMIT * b for a, b in zip(ours, theirs, strict=True)), f"{ours}, {theirs}"


def test_without_the_clamp_a_spike_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREVIEW_LIMIT", torch.inf)
    ours, theirs = effect(SPIKE_AT, None, SETTINGS[0]), effect(SPIKE_AT, None, None)
    assert any(a > LIMIT * b for a, b in zip(ours, theirs, strict=True)), f"{ours}, {theirs}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_flush_leaves_the_masters_on_the_device(steps: int, dtype: torch.dtype) -> None:
    """Also where nothing is pending any more and only the last merge was a preview."""
    gen = torch.Generator().manual_seed(0)
    params = [(0.02 * torch.randn(s, generator=gen)).to(dtype).requires_grad_() for s in SHAPES]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    with make_engine(optimizer, cold_rule="replay", topk_ratio=0.2, update_lag=0) as engine:
        for step in range(1, steps + 1):
            set_grads(params, step)
            engine.step()
        for _ in range(2):  # the second has nothing to do
            engine.flush()
            for matrix in engine.matrices:
                shown = matrix.view[:, matrix.columns.cold]
                assert torch.equal(shown, matrix.arrays.master.to(dtype))
                assert not engine.cold.pending(matrix)


def test_the_preview_moves_no_master() -> None:
    """The same gradients, with and without it: the same masters and moments, to the bit."""
    found = []
    for settings in ({"preview": True, "preview_gain": 2.0}, {"preview": False}):
        gen = torch.Generator().manual_seed(0)
        params = [(0.02 * torch.randn(s, generator=gen)).requires_grad_() for s in SHAPES]
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        with make_engine(optimizer, cold_rule="replay", topk_ratio=0.2, **settings) as engine:
            for step in range(1, 15):
                set_grads(params, step)
                engine.step()
            engine.flush()
            for m in engine.matrices:
                found.append((m.arrays.master.clone(), m.arrays.exp_avg.clone(), m.view.clone()))
    half = len(found) // 2
    for with_preview, without in zip(found[:half], found[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_preview, without, strict=True))


def test_gradients_cannot_stream_while_they_are_needed() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(4, 4, requires_grad=True)])
    with make_engine(optimizer, cold_rule="replay") as engine:
        with pytest.raises(ValueError, match=r"preview_gain=1\.25\); set preview=False"):
            engine.stream_gradients()
        assert not engine.streaming
