"""The work on a chunk, against torch.optim and against itself with other chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host.adamw import ChunkKernels
from lightning_zenflow.host.arena import Arena, MatrixArrays
from lightning_zenflow.host.commands import Accumulate, Update
from lightning_zenflow.host.layout import Chunk, HostMatrix, HostSpec, dtype_name

ROWS, COLS = 11, 13
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HYPERS = {
    "AdamW": AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True),
    "AdamW without decay": AdamHyper(3e-3, 0.8, 0.95, 1e-6, 0.0, True),
    "Adam": AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False),
}
CLOSE = {"rtol": 2e-6, "atol": 2e-7}


@contextmanager
def matrix_arrays(
    dtype: torch.dtype = torch.float32, rows: int = ROWS, cols: int = COLS
) -> Iterator[MatrixArrays]:
    """The arrays of one matrix in an arena of its own; random masters."""
    arena = Arena.create(HostSpec([HostMatrix(rows, cols, dtype_name(dtype))], 1, 1, rows * cols))
    arrays = arena.matrices[0]
    arrays.master.copy_(draw(rows, cols, 0))
    try:
        yield arrays
    finally:
        arena.close()


def draw(rows: int, cols: int, seed: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def whole(rows: int = ROWS) -> list[Chunk]:
    return [Chunk(0, 0, rows)]


def reference(master: Tensor, hyper: AdamHyper) -> torch.optim.Optimizer:
    """torch's own unfused optimizer of ``master``."""
    kind: Callable[..., torch.optim.Optimizer] = (
        torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    )
    return kind(
        [master],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        foreach=False,
        fused=False,
    )


def window(
    arrays: MatrixArrays, grads: list[Tensor], hyper: AdamHyper, step: int, chunks: list[Chunk]
) -> None:
    """Accumulate ``grads`` and make update number ``step``, each command on all ``chunks``."""
    kernels = ChunkKernels(max(c.stop - c.start for c in chunks) * arrays.master.shape[1])
    for number, grad in enumerate(grads):
        arrays.staging.copy_(grad)
        for chunk in chunks:
            kernels.accumulate(arrays, chunk, Accumulate(first=number == 0))
    update = Update(hyper, step, hyper.step_decay, 1.0 / len(grads), per_slot=False)
    for chunk in chunks:
        kernels.update(arrays, chunk, update)


@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_equal_torch(dtype: torch.dtype, hyper: str) -> None:
    """Six windows of three gradients against torch.optim with their mean."""
    h = HYPERS[hyper]
    with matrix_arrays(dtype) as arrays:
        master = arrays.master.clone().requires_grad_()
        optimizer = reference(master, h)
        for step in range(1, 7):
            grads = [draw(ROWS, COLS, 100 * step + i).to(dtype) for i in range(3)]
            window(arrays, grads, h, step, [Chunk(0, 0, 4), Chunk(0, 4, ROWS)])
            master.grad = torch.stack([g.float() for g in grads]).mean(0)
            optimizer.step()
            torch.testing.assert_close(arrays.master, master.detach(), **CLOSE)
        state = optimizer.state[master]
        torch.testing.assert_close(arrays.exp_avg, state["exp_avg"], **CLOSE)
        torch.testing.assert_close(arrays.exp_avg_sq, state["exp_avg_sq"], **CLOSE)
        assert torch.equal(arrays.outgoing, arrays.master.to(dtype)), "rounded to the parameter's"
        assert (arrays.outgoing is arrays.master) == (dtype == torch.float32)


@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_may_have_their_own_counts_and_decays(dtype: torch.dtype, hyper: str) -> None:
    h = HYPERS[hyper]
    with matrix_arrays(dtype) as arrays:
        arrays.accumulator.copy_(draw(ROWS, COLS, 1))
        arrays.inverse_count.copy_(1.0 / torch.arange(1, COLS + 1))
        arrays.decay.copy_(torch.linspace(0.2, 1.0, COLS))
        columns = [arrays.master[:, j].clone().requires_grad_() for j in range(COLS)]
        # The scalars of a per-slot command mean nothing: they must not be used.
        command = Update(h, 1, float("nan"), float("nan"), per_slot=True)
        ChunkKernels(ROWS * COLS).update(arrays, Chunk(0, 0, ROWS), command)
        for j, column in enumerate(columns):
            with torch.no_grad():
                column.mul_(arrays.decay[j])
            column.grad = arrays.accumulator[:, j] / (j + 1)
            optimizer = reference(column, h)
            if h.decoupled:  # it is in `decay`
                optimizer.param_groups[0]["weight_decay"] = 0.0
            optimizer.step()
            torch.testing.assert_close(arrays.master[:, j], column.detach(), **CLOSE)


@pytest.mark.parametrize("hyper", HYPERS)
def test_a_scalar_command_ignores_the_vectors(hyper: str) -> None:
    with matrix_arrays() as arrays:
        arrays.inverse_count.fill_(float("nan"))
        arrays.decay.fill_(float("nan"))
        window(arrays, [draw(ROWS, COLS, 1)], HYPERS[hyper], 1, whole())
        assert bool(arrays.master.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_gradient_overwrites_and_the_others_add(dtype: torch.dtype) -> None:
    kernels = ChunkKernels(ROWS * COLS)
    grads = [draw(ROWS, COLS, i).to(dtype) for i in range(4)]
    expected = torch.zeros(ROWS, COLS)
    with matrix_arrays(dtype) as arrays:
        arrays.accumulator.fill_(float("nan"))  # whatever the window before has left
        for number, grad in enumerate(grads):
            arrays.staging.copy_(grad)
            kernels.accumulate(arrays, Chunk(0, 0, ROWS), Accumulate(first=number == 0))
            expected += grad.float()
            assert torch.equal(arrays.accumulator, expected)
            assert torch.equal(arrays.staging, grad)


def test_16_bit_gradients_are_added_in_fp32() -> None:
    """512 ones: a bf16 sum would stop at 256."""
    kernels = ChunkKernels(ROWS * COLS)
    with matrix_arrays(torch.bfloat16) as arrays:
        arrays.staging.fill_(1.0)
        for number in range(512):
            kernels.accumulate(arrays, Chunk(0, 0, ROWS), Accumulate(first=number == 0))
        assert bool((arrays.accumulator == 512.0).all())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_outside_of_the_chunk_are_not_touched(dtype: torch.dtype, first: bool) -> None:
    chunk, kernels = Chunk(0, 3, 7), ChunkKernels(4 * COLS)
    outside = [0, 1, 2, 7, 8, 9, 10]
    names = ("master", "exp_avg", "exp_avg_sq", "accumulator", "staging", "outgoing")
    with matrix_arrays(dtype) as arrays:
        for seed, name in enumerate(names):
            getattr(arrays, name).copy_(draw(ROWS, COLS, seed).square())
        before = {name: getattr(arrays, name).clone() for name in names}
        kernels.accumulate(arrays, chunk, Accumulate(first=first))
        assert not torch.equal(arrays.accumulator[3:7], before["accumulator"][3:7])
        summed = arrays.accumulator.clone()
        kernels.update(arrays, chunk, Update(HYPERS["AdamW"], 1, 0.9, 0.5, per_slot=False))
        assert not torch.equal(arrays.master[3:7], before["master"][3:7])
        assert torch.equal(arrays.accumulator, summed), "an update only reads the accumulator"
        assert torch.equal(arrays.staging, before["staging"])
        for name in names:
            assert torch.equal(getattr(arrays, name)[outside], before[name][outside]), name


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 39), max_size=8),
    dtype=st.sampled_from(DTYPES),
    hyper=st.sampled_from(sorted(HYPERS)),
    order=st.randoms(use_true_random=False),
)
def test_chunks_do_not_change_the_result(
    rows: int, cols: int, cuts: list[int], dtype: torch.dtype, hyper: str, order: object
) -> None:
    """Any cut into rows, in any order, gives what the whole matrix gives."""
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    chunks = [Chunk(0, a, b) for a, b in itertools.pairwise(bounds)]
    order.shuffle(chunks)  # type: ignore[attr-defined]
    with matrix_arrays(dtype, rows, cols) as cut, matrix_arrays(dtype, rows, cols) as uncut:
        for step in (1, 2, 3):
            grads = [draw(rows, cols, 10 * step + i).to(dtype) for i in range(2)]
            window(cut, grads, HYPERS[hyper], step, chunks)
            window(uncut, grads, HYPERS[hyper], step, whole(rows))
        assert torch.equal(cut.accumulator, uncut.accumulator)
        # Vectorized and scalar code round differently, and a cut decides which element gets which.
        for name in ("master", "exp_avg", "exp_avg_sq"):
            one, other = getattr(cut, name), getattr(uncut, name)
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(cut.outgoing, cut.master.to(dtype))
