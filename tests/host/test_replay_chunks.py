"""The replay of a chunk, against torch.optim and against itself with other blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host import adamw
from lightning_zenflow.host.adamw import ChunkKernels, read_kept
from lightning_zenflow.host.arena import Arena, ReplayArrays
from lightning_zenflow.host.blocks import plan_blocks
from lightning_zenflow.host.commands import GradientScalars, Replay
from lightning_zenflow.host.layout import Chunk, HostMatrix, HostSpec, dtype_name

ROWS, COLS, WINDOW = 11, 13, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HYPERS = {
    "AdamW": AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True),
    "AdamW without decay": AdamHyper(3e-3, 0.8, 0.95, 1e-6, 0.0, True),
    "Adam": AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False),
}
CLOSE = {"rtol": 2e-6, "atol": 2e-7}


class Host:
    """One matrix in an arena of its own, and its gradients."""

    def __init__(self, dtype: torch.dtype, chunk_elements: int, looks_ahead: bool) -> None:
        matrix = HostMatrix(ROWS, COLS, dtype_name(dtype))
        plan = plan_blocks([matrix], [0], interval=WINDOW, lag=1, chunk_elements=chunk_elements)
        spec = HostSpec(
            [matrix],
            1,
            1,
            chunk_elements,
            rule="replay",
            window=WINDOW,
            block_bytes=plan.nbytes,
            blocks=plan.count,
            looks_ahead=looks_ahead,
        )
        self.arena = Arena.create(spec)
        arrays = self.arena.matrices[0]
        assert isinstance(arrays, ReplayArrays)
        self.arrays = arrays
        self.arrays.master.copy_(draw(0))
        self.dtype = dtype

    def keep(self, slot: int, grad: Tensor, scalars: GradientScalars) -> None:
        chunks = self.arrays.chunks
        first = slot % WINDOW * len(chunks)
        self.arrays.blocks[slot] = range(first, first + len(chunks))
        self.arrays.records[slot] = scalars.record()
        for number, (start, stop) in enumerate(chunks):
            self.arrays.block(first + number, stop - start).copy_(grad[start:stop])

    def replay(self, command: Replay) -> int:
        kernels = ChunkKernels(ROWS * COLS)
        kept = read_kept(self.arrays, command, self.arena.factors)
        return sum(
            kernels.replay(self.arrays, Chunk(0, start, stop, number), command, kept)
            for number, (start, stop) in enumerate(self.arrays.chunks)
        )

    def state(self) -> list[Tensor]:
        return [self.arrays.master, self.arrays.exp_avg, self.arrays.exp_avg_sq]


@contextmanager
def host(
    dtype: torch.dtype = torch.float32, chunk_elements: int = 10**6, looks_ahead: bool = True
) -> Iterator[Host]:
    made = Host(dtype, chunk_elements, looks_ahead)
    try:
        yield made
    finally:
        made.arena.close()


def draw(seed: int) -> Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed))


def torch_steps(grads: Sequence[Tensor], hyper: AdamHyper) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and moments of torch's own optimizer, whose learning rate falls at each step."""
    master = draw(0).requires_grad_()
    kind: Callable[..., torch.optim.Optimizer] = (
        torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    )
    optimizer = kind(
        [master],
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )
    for number, grad in enumerate(grads):
        optimizer.param_groups[0]["lr"] = hyper.lr / (1 + number)
        master.grad = grad.to(torch.float32)
        optimizer.step()
    state = optimizer.state[master]
    return master.detach(), state["exp_avg"], state["exp_avg_sq"]


def at_step(hyper: AdamHyper, number: int, factor_slot: int = -1) -> GradientScalars:
    lr = hyper.lr / (1 + number)
    changed = AdamHyper(
        lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.decoupled
    )
    return GradientScalars(changed, number + 1, factor_slot)


@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_elements", [1, 30, 10**6])
def test_windows_equal_torch(hyper: AdamHyper, dtype: torch.dtype, chunk_elements: int) -> None:
    """Two windows around the ring of slots; state equal, and sent back rounded."""
    grads = [draw(1 + i).to(dtype) for i in range(6)]
    with host(dtype, chunk_elements) as h:
        for first, count in ((0, 4), (4, 2)):
            for number in range(first, first + count):
                h.keep(number, grads[number], at_step(hyper, number))
            h.replay(Replay(first, count))
        for got, expected in zip(h.state(), torch_steps(grads, hyper), strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)
        assert torch.equal(h.arrays.outgoing, h.arrays.master.to(dtype))


def test_the_ring_of_slots_wraps() -> None:
    grads = [draw(1 + i) for i in range(3)]
    hyper = HYPERS["AdamW"]
    with host() as h:
        for number, slot in enumerate((6, 7, 0)):
            h.keep(slot, grads[number], at_step(hyper, number))
        h.replay(Replay(6, 3))
        torch.testing.assert_close(h.arrays.master, torch_steps(grads, hyper)[0], **CLOSE)


def test_factors_multiply_gradients() -> None:
    grads, hyper = [draw(1), draw(2)], HYPERS["AdamW"]
    with host() as h:
        h.arena.factors[5] = 0.25
        h.keep(0, grads[0], at_step(hyper, 0, factor_slot=5))
        h.keep(1, grads[1], at_step(hyper, 1))
        h.replay(Replay(0, 2))
        expected = torch_steps([0.25 * grads[0], grads[1]], hyper)
        for got, value in zip(h.state(), expected, strict=True):
            torch.testing.assert_close(got, value, **CLOSE)


@pytest.mark.parametrize("late_from", [1, 2, 3])
def test_columns_that_came_late_take_only_their_own_gradients(late_from: int) -> None:
    grads, hyper, late = [draw(1 + i) for i in range(4)], HYPERS["AdamW"], [2, 7, 12]
    with host(chunk_elements=40) as h, host(chunk_elements=40) as other:
        h.arrays.late[: len(late)] = torch.tensor(late)
        for each in (h, other):
            for number, grad in enumerate(grads):
                each.keep(number, grad, at_step(hyper, number))
        h.replay(Replay(0, 4, late=len(late), late_from=late_from))
        other.replay(Replay(late_from, 4 - late_from))
        rest = [j for j in range(COLS) if j not in late]
        for got, alone, expected in zip(
            h.state(), other.state(), torch_steps(grads, hyper), strict=True
        ):
            assert torch.equal(got[:, late], alone[:, late])
            torch.testing.assert_close(got[:, rest], expected[:, rest], **CLOSE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_back_looks_ahead(dtype: torch.dtype) -> None:
    """``w - reach * mhat / (sqrt(vhat) + eps)``; the state does not know of it."""
    grads, hyper, reach = [draw(1).to(dtype), draw(2).to(dtype)], HYPERS["AdamW"], 0.03
    with host(dtype) as h, host(dtype) as plain:
        for each in (h, plain):
            for number, grad in enumerate(grads):
                each.keep(number, grad, at_step(hyper, number))
        h.replay(Replay(0, 2, reach=reach))
        plain.replay(Replay(0, 2))
        assert all(torch.equal(a, b) for a, b in zip(h.state(), plain.state(), strict=True))
        master, exp_avg, exp_avg_sq = (t.double() for t in h.state())
        m_hat, v_hat = exp_avg / (1 - hyper.beta1**2), exp_avg_sq / (1 - hyper.beta2**2)
        expected = master - reach * m_hat / (v_hat.sqrt() + hyper.eps)
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(h.arrays.outgoing.double(), expected, rtol=tolerance, atol=1e-6)


def test_without_gradients_the_masters_are_sent_back() -> None:
    with host(torch.bfloat16) as h:
        h.replay(Replay(0, 0, reach=1.0))
        assert torch.equal(h.arrays.outgoing, draw(0).to(torch.bfloat16))
        assert not h.arrays.exp_avg.any()


def test_fp32_without_a_preview_has_no_copy_to_send() -> None:
    with host(looks_ahead=False) as h:
        assert h.arrays.outgoing is h.arrays.master


@pytest.mark.parametrize("block", [1, 40, 10**6])
def test_blocks_change_rounding_only(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grads, hyper = [draw(1 + i) for i in range(4)], HYPERS["Adam"]
    monkeypatch.setattr(adamw, "BLOCK_ELEMENTS", block)
    with host() as h:
        for number, grad in enumerate(grads):
            h.keep(number, grad, at_step(hyper, number))
        h.replay(Replay(0, 4))
        torch.testing.assert_close(h.arrays.master, torch_steps(grads, hyper)[0], **CLOSE)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_passes_through_as_in_torch(bad: float) -> None:
    grads, hyper = [draw(1), draw(2)], HYPERS["AdamW"]
    grads[0][3, 4] = bad
    with host() as h:
        for number, grad in enumerate(grads):
            h.keep(number, grad, at_step(hyper, number))
        h.replay(Replay(0, 2, reach=0.1))
        for got, expected in zip(h.state(), torch_steps(grads, hyper), strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True, **CLOSE)


def test_bytes_are_counted() -> None:
    """Master and moments once each way, the gradients and the copy in the parameter's dtype."""
    with host(torch.bfloat16, chunk_elements=40) as h:
        for number in range(4):
            h.keep(number, draw(number), at_step(HYPERS["AdamW"], number))
        assert h.replay(Replay(0, 4)) == ROWS * COLS * (24 + 4 * 2 + 2)
        assert h.replay(Replay(0, 0)) == ROWS * COLS * (4 + 2)
