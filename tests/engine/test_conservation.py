"""Every column of every gradient enters exactly one update, with weight 1/n.

Gradients encode where they come from. The rows of a matrix take turns (row ``i`` is of kind
``i % 4``), and at step t column j holds

- kind 0: ``2 ** (t - 1)``, so that a mean times n is the set of steps in it, as a bit mask,
- kind 1: the same with the bits in reverse order: both together fit only one set and one n,
- kind 2: a large random power of two, which alone decides the selection,
- kind 3: ``j + 1``, so that the mean tells whose gradient it is (and that weights add up to 1).

Spies stand where gradients are consumed: the device's ``adamw`` kernel, and the Adam update that the lanes'
``ChunkKernels.update`` makes. Both then do the real arithmetic.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper, adam_update_
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.device import Columns, Device, HotState
from lightning_zenflow.device.inline import InlineQueues
from lightning_zenflow.device.torch_kernels import TorchKernels
from lightning_zenflow.engine import ZenFlowEngine
from lightning_zenflow.host import adamw
from lightning_zenflow.host.adamw import ChunkKernels
from lightning_zenflow.host.arena import MeanArrays
from lightning_zenflow.host.commands import Update
from lightning_zenflow.host.layout import Chunk
from tests.support import InlinePool, backward, inline, next_forward, racing_queues

STEP, REVERSED, SCORE, COLUMN = range(4)
RACES = int(os.environ.get("ZENFLOW_RACES", "100"))  # in each mode
MAX_STEPS = 14  # 2 ** 14 times as many gradients is far from the 24 bits of fp32


@dataclass
class HotUse:
    """One hot update: the mean gradient ``[rows, n_hot]`` and the columns it was applied to."""

    state: HotState
    columns: Tensor
    mean: Tensor


@dataclass
class ColdUse:
    """One host update of a matrix, put together from its chunks."""

    columns: Tensor
    mean: Tensor  # [rows, n_cold]
    times: Tensor  # [rows]: how often each row was updated


class SpyDevice(TorchKernels):
    """Records what the hot update consumes."""

    def __init__(self) -> None:
        self.uses: list[HotUse] = []
        self.carried = 0  # promoted columns that brought pending gradients

    def adamw(
        self,
        param: Tensor,
        columns: Columns,
        state: HotState,
        grad: Tensor,
        scale: Tensor | None,
        step: int,
        hyper: AdamHyper,
        decay: float | Tensor,
    ) -> None:
        self.uses.append(HotUse(state, columns.hot.clone(), grad.clone()))
        self.carried += sum(len(decode(mean)) > 1 for mean in grad.T)
        super().adamw(param, columns, state, grad, scale, step, hyper, decay)


Consume = Callable[[Chunk, Update, Tensor], None]


class SpyKernels(ChunkKernels):
    """Records what the host's Adam update consumes: ``accumulator * inverse_count``."""

    def __init__(self, largest: int, consume: Consume) -> None:
        super().__init__(largest)
        self._consume = consume

    def update(self, arrays: MeanArrays, chunk: Chunk, command: Update) -> int:
        def spy(master: Tensor, grad: Tensor, *moments: Tensor, **options: Any) -> None:
            self._consume(chunk, command, grad.clone())
            adam_update_(master, grad, *moments, **options)

        with patch.object(adamw, "adam_update_", spy):
            return super().update(arrays, chunk, command)


@dataclass(frozen=True)
class Run:
    """One drawn training run. ``present[t]`` and ``flushes[t]`` are for step t + 1."""

    shapes: list[tuple[int, int]]
    present: list[list[bool]]
    flushes: list[bool]
    seed: int
    dtype: torch.dtype
    config: dict[str, Any]
    races: bool = False
    streams: bool = False


@dataclass
class Watched:
    """An engine with spies, and the gradients it was given."""

    run: Run
    params: list[Tensor] = field(init=False)
    engine: ZenFlowEngine = field(init=False)
    device: SpyDevice = field(default_factory=SpyDevice)
    cold: dict[tuple[int, int], ColdUse] = field(default_factory=dict)  # (matrix, update)
    grads: list[dict[int, Tensor]] = field(init=False)  # of each parameter, by step
    used: list[dict[int, list[int]]] = field(init=False)  # of each parameter: column -> steps
    uneven_updates: int = 0  # host updates whose columns carried different counts

    def __post_init__(self) -> None:
        self.params = [torch.zeros(s, dtype=self.run.dtype) for s in self.run.shapes]
        for param in self.params:
            param.requires_grad_()
        self.grads = [{} for _ in self.params]
        self.used = [defaultdict(list) for _ in self.params]
        config = ZenFlowConfig(cold_rule="mean", min_offload_numel=0, **self.run.config)
        optimizer = torch.optim.AdamW(self.params, lr=1e-3)
        queues = racing_queues(self.run.seed) if self.run.races else InlineQueues()
        self.engine = ZenFlowEngine(
            optimizer,
            config,
            device=Device(queues, self.device, piece_bytes=24, in_flight_bytes=100),
            make_pool=inline(self.run.seed),
        )
        if self.run.streams:
            self.engine.stream_gradients()
        if self.engine.pool is not None:
            largest = max(param.numel() for param in self.params)
            for lane in cast(InlinePool, self.engine.pool).lanes:
                lane.kernels = SpyKernels(largest, self._consume_cold)

    def _consume_cold(self, chunk: Chunk, command: Update, mean: Tensor) -> None:
        matrix = self.engine.matrices[chunk.matrix]
        columns = matrix.columns.cold
        use = self.cold.get((chunk.matrix, command.step))
        if use is None:
            whole = torch.full((matrix.rows, len(columns)), torch.nan)
            use = ColdUse(columns.clone(), whole, torch.zeros(matrix.rows, dtype=torch.int64))
            self.cold[chunk.matrix, command.step] = use
        assert torch.equal(use.columns, columns), "columns moved during a host update"
        use.mean[chunk.start : chunk.stop] = mean
        use.times[chunk.start : chunk.stop] += 1

    def train(self) -> None:
        """All steps, checking after every flush that nothing is pending or lost."""
        gen = torch.Generator().manual_seed(self.run.seed)
        for index, (present, flush) in enumerate(
            zip(self.run.present, self.run.flushes, strict=True)
        ):
            step = index + 1
            for number, (param, here) in enumerate(zip(self.params, present, strict=True)):
                param.grad = None
                if here:
                    grad = encode(step, param.shape[0], param.shape[1], gen)
                    self.grads[number][step] = grad
                    backward(param, grad.to(param.dtype, copy=True))
            self.engine.step()
            next_forward(self.engine)
            if flush:
                self.engine.flush()
                self.check()
        self.engine.flush()
        self.check()

    def _take_uses(self) -> list[tuple[int, Tensor, Tensor]]:
        """(parameter, columns, mean) of the updates since the last call."""
        numbers = {
            id(matrix): i for i, matrix in enumerate(map(self.engine.matrix_of, self.params))
        }
        found = []
        for use in self.device.uses:
            (owner,) = [m for m in self.engine.matrices if m.hot is use.state]
            found.append((numbers[id(owner)], use.columns, use.mean))
        for (index, _), cold in self.cold.items():
            assert torch.equal(cold.times, torch.ones_like(cold.times)), "rows updated not once"
            counts = {len(decode(mean)) for mean in cold.mean.T}
            self.uneven_updates += len(counts) > 1
            found.append((numbers[id(self.engine.matrices[index])], cold.columns, cold.mean))
        self.device.uses.clear()
        self.cold.clear()
        return found

    def check(self) -> None:
        """After a flush: each gradient column so far was consumed exactly once, at weight 1/n."""
        next_forward(self.engine)
        for number, columns, mean in self._take_uses():
            for slot, column in enumerate(columns.tolist()):
                steps = decode(mean[:, slot])
                self.used[number][column] += steps
                self._check_mean(number, column, steps, mean[:, slot])
        for number, param in enumerate(self.params):
            if self.engine.matrix_of(param) is None:
                continue  # dense hot: all columns are updated at every step, on another path
            for column in range(param.shape[1]):
                used = sorted(self.used[number][column])
                assert used == sorted(self.grads[number]), f"matrix {number}, column {column}"

    def _check_mean(self, number: int, column: int, steps: list[int], mean: Tensor) -> None:
        given_ = torch.stack([self.grads[number][step][:, column] for step in steps])
        torch.testing.assert_close(mean, given_.mean(dim=0), rtol=1e-6, atol=0.0)


def encode(step: int, rows: int, cols: int, gen: torch.Generator) -> Tensor:
    """The gradient of ``step``, as the module's docstring says; all values are exact in bf16."""
    grad = torch.empty(rows, cols)
    grad[STEP::4] = 2.0 ** (step - 1)
    grad[REVERSED::4] = 2.0 ** (MAX_STEPS - step)
    # Above the step code, so that the sum of squares follows this row and not the others.
    strength = torch.randint(0, 6, (cols,), generator=gen)
    grad[SCORE::4] = 2.0 ** (MAX_STEPS + strength)
    grad[COLUMN::4] = torch.arange(1.0, cols + 1.0)
    return grad


def decode(mean: Tensor) -> list[int]:
    """The steps whose gradients are in ``mean`` ``[rows]``, each with weight 1/n.

    n is not given: a window is longer than S if there was no gradient at its boundary. No set of up
    to 14 steps fits for two values of n.
    """
    fits = []
    for count in range(1, MAX_STEPS + 1):
        bits, reverse = (_mask(float(mean[row]) * count, count) for row in (STEP, REVERSED))
        if bits is not None and reverse is not None and bits == reverse[::-1]:
            fits.append([step + 1 for step, bit in enumerate(reversed(bits)) if bit == "1"])
    assert len(fits) == 1, f"{mean.tolist()} is not the mean of distinct steps: {fits}"
    return fits[0]


def _mask(total: float, count: int) -> str | None:
    """``total`` in binary if it is a sum of ``count`` distinct step codes."""
    code = round(total)
    if abs(total - code) > 0.05 or not 0 < code < 2**MAX_STEPS or code.bit_count() != count:
        return None
    return format(code, f"0{MAX_STEPS}b")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    steps = draw(st.integers(1, MAX_STEPS))
    shapes = draw(st.lists(st.tuples(st.integers(4, 9), st.integers(1, 9)), min_size=1, max_size=3))
    interval = draw(st.integers(1, 5))
    # Mostly present, so that windows fill up.
    flags = st.lists(st.integers(0, 5).map(bool), min_size=len(shapes), max_size=len(shapes))
    return Run(
        shapes=shapes,
        present=draw(st.lists(flags, min_size=steps, max_size=steps)),
        flushes=draw(
            st.lists(st.integers(0, 6).map(lambda x: x == 6), min_size=steps, max_size=steps)
        ),
        seed=draw(st.integers(0, 2**16)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        config={
            "topk_ratio": draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8])),
            "update_interval": interval,
            "update_lag": draw(st.integers(0, interval)),
            "select_interval": draw(st.integers(1, 2 * interval + 1)),
            "warmup_steps": draw(st.integers(0, interval + 1)),
            "schedule": draw(st.sampled_from(["window", "staggered"])),
            "num_workers": draw(st.integers(1, 3)),
            "chunk_elements": draw(st.integers(1, 40)),
        },
    )


@given(runs())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_every_gradient_column_enters_exactly_one_update(run: Run) -> None:
    watched = Watched(run)
    with watched.engine:
        watched.train()


@pytest.mark.parametrize("streams", [False, True])
@given(runs())
@settings(derandomize=True, deadline=None, max_examples=RACES)
def test_conservation_on_the_racing_device(streams: bool, run: Run) -> None:
    watched = Watched(replace(run, races=True, streams=streams))
    with watched.engine:
        watched.train()


@pytest.mark.parametrize("schedule", ["window", "staggered"])
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_conservation_holds_while_columns_migrate_with_pending_gradients(
    schedule: str, lag: int
) -> None:
    """The case that is easiest to get wrong, long enough that it certainly happens."""
    interval = 4
    run = Run(
        shapes=[(6, 11), (4, 7), (9, 5)],
        present=[[True] * 3] * MAX_STEPS,
        flushes=[step == 9 for step in range(MAX_STEPS)],
        seed=5,
        dtype=torch.float32,
        config={
            "topk_ratio": 0.4,
            "update_interval": interval,
            "update_lag": lag,
            "select_interval": interval,
            "warmup_steps": 0,
            "schedule": schedule,
            "num_workers": 2,
            "chunk_elements": 11,
        },
    )
    watched = Watched(run)
    with watched.engine:
        watched.train()
    assert watched.device.carried >= 3, "no promoted column brought pending gradients: vacuous"
    assert watched.uneven_updates >= 2, "no update had columns with different counts: vacuous"
