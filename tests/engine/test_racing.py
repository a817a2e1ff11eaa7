"""The engine on queues that really run apart: late, and with poison in all memory that is free.

Every trajectory must be that of the CPU device. Then each event wait is taken out in turn, and the
trajectory must break: what no test can miss is not needed.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.device import WAITS, Device, Event, Queue
from lightning_zenflow.device.inline import InlineQueues
from lightning_zenflow.device.torch_kernels import TorchKernels
from lightning_zenflow.engine import ZenFlowEngine
from tests.support import InlinePool, inline, next_forward, racing_queues

SEEDS = int(os.environ.get("ZENFLOW_SEEDS", "200"))
PER_TEST = 20
MUTANT_SEEDS = 60
STEPS = 11
SHAPES = ((6, 10), (3, 4, 3), (5, 8), (7,))
CLIP = 2.0


def settings(seed: int, preview: bool) -> dict[str, Any]:
    """A different corner of the settings for each seed; all have windows, merges and migrations."""
    interval = 1 + seed % 3
    rule = ("replay", "mean")[seed // 3 % 2]
    return {
        "cold_rule": rule,
        "preview": preview and seed % 7 > 0,
        "topk_ratio": (0.3, 0.5, 0.2)[seed % 3],
        "update_interval": interval,
        "update_lag": (interval, interval, 1, 0)[seed % 4],
        "select_interval": 1 + seed % 4,
        "warmup_steps": (0, 0, 2)[seed % 3],
        "schedule": ("window", "staggered")[seed // 2 % 2],
        "chunk_elements": 9,
        "num_workers": 1 + seed % 2,
        "min_offload_numel": 0,
    }


def gradients(seed: int, dtype: torch.dtype) -> list[list[Tensor | None]]:
    """For each step one gradient a parameter, now and then none."""
    gen = torch.Generator().manual_seed(seed)
    steps: list[list[Tensor | None]] = []
    for _ in range(STEPS):
        grads = [torch.randn(shape, generator=gen).to(dtype) for shape in SHAPES]
        absent = torch.rand(len(SHAPES), generator=gen) < 0.1
        steps.append([None if a else g for g, a in zip(grads, absent.tolist(), strict=True)])
    return steps


class WithoutWait(Device):
    """The device with one of its event waits taken out."""

    missing = ""

    def _order(self, queue: Queue, event: Event, why: str) -> None:
        assert why in WAITS
        if why != self.missing:
            super()._order(queue, event, why)


def train(
    seed: int,
    dtype: torch.dtype,
    *,
    races: bool,
    streams: bool = False,
    preview: bool = True,
    clip: bool = False,
    missing: str = "",
) -> list[Tensor]:
    """The parameters after every step and at the end, in one list.

    ``preview=False`` wherever gradients stream: the eager step reads them at the step.
    """
    gen = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in SHAPES]
    queues = racing_queues(seed) if races else InlineQueues()
    device = WithoutWait(queues, TorchKernels(), piece_bytes=40, in_flight_bytes=150)
    device.missing = missing
    optimizer = torch.optim.AdamW(params, lr=0.05)
    config = ZenFlowConfig(**settings(seed, preview))
    seen: list[Tensor] = []
    with ZenFlowEngine(optimizer, config, device=device, make_pool=inline(seed)) as engine:
        if streams:
            engine.stream_gradients(clip_norm=CLIP if clip else None)
        for step, grads in enumerate(gradients(seed, dtype)):
            engine.release_gradients()
            for param, grad in zip(params, grads, strict=True):
                param.grad = None
                device.on_compute(partial(read, param, seen))
                if grad is not None:
                    backward(device, param, grad)
            if clip and not streams:
                nn.utils.clip_grad_norm_(params, CLIP)
            engine.step()
            if seed % 3 == 0:
                workers_go_on(engine)
            if step == 6:
                engine.flush()
            next_forward(engine)
        engine.flush()
        next_forward(engine)
        seen += [param.detach().clone() for param in params]
    return seen


def read(param: Tensor, seen: list[Tensor]) -> None:
    """What backward does with a parameter: it uses the values of the forward, on compute."""
    seen.append(param.detach().clone())


def backward(device: Device, param: Tensor, grad: Tensor) -> None:
    """Make the gradient on compute, where it is ready only later, and call the parameter's hooks."""
    param.grad = torch.full_like(param, torch.nan, requires_grad=False)
    device.on_compute(partial(param.grad.data.copy_, grad))
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def workers_go_on(engine: ZenFlowEngine) -> None:
    """Workers that are fast: they do what is rung as soon as it is."""
    assert isinstance(engine.pool, InlinePool)
    for _ in range(8):
        for lane in engine.pool.lanes:
            lane.pass_once()
        time.sleep(1e-4)


def same(left: list[Tensor], right: list[Tensor], tolerance: float = 0.0) -> bool:
    """Equal to ``tolerance``; NaN is never equal to anything."""
    return all(bool(((a - b).abs() <= tolerance).all()) for a, b in zip(left, right, strict=True))


BLOCKS = range(0, SEEDS, PER_TEST)


@pytest.mark.parametrize("first", BLOCKS)
def test_retained_gradients(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        dtype = torch.bfloat16 if seed % 5 == 0 else torch.float32
        assert same(train(seed, dtype, races=True), train(seed, dtype, races=False)), f"seed {seed}"


@pytest.mark.parametrize("first", BLOCKS)
def test_streamed_gradients(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        dtype = torch.bfloat16 if seed % 5 == 0 else torch.float32
        clip = seed % 2 == 0 and dtype == torch.float32
        retained = train(seed, dtype, races=False, preview=False, clip=clip)
        streamed = train(seed, dtype, races=True, streams=True, preview=False, clip=clip)
        assert same(streamed, retained, 2e-6 if clip else 0.0), f"seed {seed}"


@pytest.mark.parametrize("missing", WAITS)
def test_no_wait_can_be_taken_out(missing: str) -> None:
    """A mutant that survives them all would mean a wait that is not needed, or not tested."""
    for seed in range(MUTANT_SEEDS):
        streams = missing == "factor ready" or (seed % 2 == 0 and missing != "preview ready")
        clip = streams  # retained gradients are clipped by torch, which would wait for them
        how: dict[str, Any] = {"preview": not streams, "clip": clip}
        expected = train(seed, torch.float32, races=False, **how)
        mutant = train(seed, torch.float32, races=True, streams=streams, missing=missing, **how)
        if not same(mutant, expected, 2e-6):
            return
    pytest.fail(f"without the wait {missing!r} nothing goes wrong")
