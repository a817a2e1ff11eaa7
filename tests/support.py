"""Shared by the tests: an engine on a small model, and a pool whose lanes run in this thread."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.device.emulated import EmulatedQueues
from lightning_zenflow.engine import ZenFlowEngine
from lightning_zenflow.host.arena import Arena
from lightning_zenflow.host.layout import HostSpec
from lightning_zenflow.host.pool import UpdaterPool
from lightning_zenflow.host.worker import READY, Lane


class InlinePool(UpdaterPool):
    """The real arena, protocol and lanes, but no processes: lanes run when the trainer wakes or waits.

    It starts in milliseconds, so that hypothesis can build hundreds, and ``seed`` decides how the
    lanes interleave with the trainer: from "nothing is done before it is waited for" to "all is done
    at once", and everything between.
    """

    def __init__(self, spec: HostSpec, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.lanes: list[Lane] = []
        super().__init__(spec)

    def _start(self) -> None:
        for index in range(self.spec.lanes):
            arena = Arena.attach(os.dup(self.arena.fd))
            lane = Lane(arena, index, self._wake[index], self._completed)
            lane.words[READY] = 1
            self.lanes.append(lane)

    def close(self) -> None:
        super().close()
        for lane in self.lanes:
            lane.arena.close()

    def wake(self) -> None:
        for lane in self._random.sample(self.lanes, len(self.lanes)):
            for _ in range(self._random.randrange(4)):
                lane.pass_once()

    def _sleep(self, milliseconds: int) -> None:
        if self.closed:
            raise RuntimeError("the updater pool is closed")
        if milliseconds and not self._random.choice(self.lanes).pass_once():
            time.sleep(0)  # the doorbell may be on its way in another thread


def inline(seed: int = 0) -> Callable[[HostSpec], UpdaterPool]:
    """For ``ZenFlowEngine(make_pool=...)``."""
    return lambda spec: InlinePool(spec, seed)


def make_engine(optimizer: Optimizer, *, seed: int | None = 0, **settings: Any) -> ZenFlowEngine:
    """An engine that offloads every matrix; ``seed=None`` uses real worker processes.

    ``settings`` are ZenFlowConfig's, with ``min_offload_numel=0``, ``num_workers=1`` and
    ``cold_rule="mean"`` by default; ``delay_us`` and ``names`` go to the engine.
    """
    extra = {key: settings.pop(key) for key in ("delay_us", "names") if key in settings}
    config = ZenFlowConfig(
        **{"min_offload_numel": 0, "num_workers": 1, "cold_rule": "mean", **settings}
    )
    pool = UpdaterPool if seed is None else inline(seed)
    return ZenFlowEngine(optimizer, config, make_pool=pool, **extra)


def of_each_rule(module: str) -> Any:
    """An autouse fixture for a test module: every test runs under both rules of the cold half."""

    @pytest.fixture(autouse=True, params=["replay", "mean"])
    def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        default = partial(make_engine, cold_rule=request.param)
        monkeypatch.setattr(sys.modules[module], "make_engine", default)
        return str(request.param)

    return rule


def racing_queues(seed: int) -> EmulatedQueues:
    """Three threads that do everything late, and poison what is not needed any more."""
    return EmulatedQueues(seed=seed, compute_thread=True)


def backward(param: torch.Tensor, grad: torch.Tensor) -> None:
    """What autograd does at the end of the chain: add ``grad`` to ``.grad`` and call the hooks."""
    torch.autograd.backward([param], [grad])


def next_forward(engine: ZenFlowEngine) -> None:
    """What the next forward does: it uses all parameters, behind everything issued to compute."""
    engine.await_merges()
    engine.device.queues.compute.synchronize()


def set_grads(params: list[torch.Tensor], step: int, seed: int = 0) -> None:
    """Random gradients of ``step`` (1-based), the same for the same seed, in each parameter's dtype."""
    gen = torch.Generator().manual_seed(1_000_003 * seed + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=gen).to(param.dtype)


def children() -> list[int]:
    """Process ids of this process's children, zombies included."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue  # a thread that has ended meanwhile
    return found


def open_descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they are."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the one that listed the directory
    return found
