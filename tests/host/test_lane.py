"""A lane's order of work: each matrix's commands in order, gradients before updates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.host.arena import Arena
from lightning_zenflow.host.commands import Accumulate, Command, Update
from lightning_zenflow.host.layout import QUEUE_DEPTH, HostMatrix, HostSpec, assign_chunks
from lightning_zenflow.host.pool import NOT_AN_OWNER
from lightning_zenflow.host.worker import BUSY_NS, Lane

HYPER = AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, True)
ACC, ADD = Accumulate(first=True), Accumulate(first=False)


def update(step: int = 1, count: int = 1, decay: float = 0.9) -> Update:
    return Update(HYPER, step, decay, 1.0 / count, per_slot=False)


class Bench:
    """An arena and its lanes, driven by hand: no pool, no process, no thread."""

    def __init__(self, spec: HostSpec) -> None:
        self.arena = Arena.create(spec)
        self.completed = os.eventfd(0, os.EFD_NONBLOCK)
        self.wakes = [os.eventfd(0) for _ in range(spec.lanes)]
        self.lanes = [Lane(self.arena, i, self.wakes[i], self.completed) for i in range(spec.lanes)]
        for lane, owned in enumerate(assign_chunks(spec)):
            for matrix in range(len(spec.matrices)):
                if matrix not in owned:
                    self.arena.done[lane][matrix] = NOT_AN_OWNER

    def post(self, matrix: int, command: Command) -> int:
        number = int(self.arena.posted[matrix]) + 1
        assert self.done(matrix) > number - 1 - QUEUE_DEPTH, "the queue is full"
        self.arena.commands[matrix, (number - 1) % QUEUE_DEPTH] = command.record()
        self.arena.posted[matrix] = number
        return number

    def done(self, matrix: int) -> int:
        """Number of the newest command that all owners have done."""
        return min(int(done[matrix]) for done in self.arena.done)

    def drain(self) -> None:
        while sum(lane.pass_once() for lane in self.lanes):
            pass

    def close(self) -> None:
        self.lanes.clear()
        for fd in (self.completed, *self.wakes):
            os.close(fd)
        self.arena.close()


@contextmanager
def bench(
    *shapes: tuple[int, int], workers: int = 1, threads: int = 1, chunk_elements: int = 1
) -> Iterator[Bench]:
    """By default one lane, and each row is a chunk."""
    matrices = [HostMatrix(rows, cols, "float32") for rows, cols in shapes]
    made = Bench(HostSpec(matrices, workers, threads, chunk_elements))
    try:
        yield made
    finally:
        made.close()


def updated_rows(b: Bench, matrix: int) -> list[int]:
    """Rows that an update has reached (masters start at zero, gradients are not zero)."""
    return b.arena.matrices[matrix].exp_avg.any(dim=1).nonzero().flatten().tolist()


def stage(b: Bench, matrix: int, value: float = 1.0) -> None:
    b.arena.matrices[matrix].staging.fill_(value)


def test_nothing_posted_is_no_work() -> None:
    with bench((3, 2)) as b:
        (lane,) = b.lanes
        assert lane.pass_once() is False
        assert lane.words[BUSY_NS] == 0
        stage(b, 0)
        b.post(0, ACC)
        assert lane.pass_once() is True
        assert lane.words[BUSY_NS] > 0
        assert lane.pass_once() is False


def test_an_accumulation_is_done_in_one_pass_and_announced() -> None:
    with bench((3, 2)) as b:
        stage(b, 0, 2.0)
        number = b.post(0, ACC)
        assert b.done(0) == 0
        b.lanes[0].pass_once()
        assert b.done(0) == number
        assert bool((b.arena.matrices[0].accumulator == 2.0).all())
        assert os.eventfd_read(b.completed) == 1


def test_an_update_takes_one_chunk_a_pass_and_is_announced_at_its_end() -> None:
    with bench((3, 2)) as b:
        stage(b, 0)
        b.post(0, ACC)
        number = b.post(0, update())
        b.lanes[0].pass_once()
        assert os.eventfd_read(b.completed) == 1  # the accumulation
        for rows in range(1, 4):
            assert b.done(0) < number
            assert b.lanes[0].pass_once() is True
            assert updated_rows(b, 0) == list(range(rows))
        assert b.done(0) == number
        assert os.eventfd_read(b.completed) == 1
        assert b.lanes[0].pass_once() is False


def test_gradients_come_before_updates() -> None:
    """An update that is open, and one posted earlier, both let a gradient pass."""
    with bench((3, 2), (2, 2)) as b:
        (lane,) = b.lanes
        stage(b, 0)
        stage(b, 1)
        b.post(0, ACC)
        b.drain()
        number = b.post(0, update())
        b.post(1, ACC)
        lane.pass_once()
        assert b.done(1) == 1
        assert updated_rows(b, 0) == [0]
        b.post(1, ADD)  # in the middle of the update
        lane.pass_once()
        assert b.done(1) == 2
        assert bool((b.arena.matrices[1].accumulator == 2.0).all())
        assert updated_rows(b, 0) == [0, 1], "the update went on, by one chunk"
        lane.pass_once()
        assert b.done(0) == number


def test_a_gradient_of_the_same_matrix_waits_for_its_update() -> None:
    with bench((3, 2)) as b:
        (lane,) = b.lanes
        stage(b, 0)
        b.post(0, ACC)
        b.post(0, update())
        lane.pass_once()
        stage(b, 0, 5.0)  # free again: its accumulation is done
        number = b.post(0, ACC)
        for _ in range(3):
            lane.pass_once()
            assert bool((b.arena.matrices[0].accumulator == 1.0).all())
        lane.pass_once()
        assert b.done(0) == number
        assert bool((b.arena.matrices[0].accumulator == 5.0).all())
        torch.testing.assert_close(b.arena.matrices[0].exp_avg, torch.full((3, 2), 0.1))


@pytest.mark.parametrize("first", [0, 1])
def test_the_oldest_update_is_finished_first(first: int) -> None:
    second = 1 - first
    with bench((3, 2), (3, 2)) as b:
        (lane,) = b.lanes
        for matrix in (0, 1):
            stage(b, matrix)
            b.post(matrix, ACC)
        b.drain()
        b.post(first, update())
        lane.pass_once()
        b.post(second, update())
        lane.pass_once()
        assert updated_rows(b, first) == [0, 1]
        assert updated_rows(b, second) == []
        lane.pass_once()
        lane.pass_once()
        assert updated_rows(b, first) == [0, 1, 2]
        assert updated_rows(b, second) == [0]


def test_a_lane_does_only_its_own_chunks() -> None:
    with bench((4, 2), workers=2) as b:
        one, two = b.lanes
        stage(b, 0)
        number = b.post(0, ACC)
        rows = [c.start for c in one.owned[0]]
        while one.pass_once():
            pass
        assert b.arena.matrices[0].accumulator.any(dim=1).nonzero().flatten().tolist() == rows
        assert 0 < len(rows) < 4
        assert b.done(0) < number, "not done before every owner has done its part"
        two.pass_once()
        assert b.done(0) == number


def test_a_lane_without_chunks_has_no_work() -> None:
    with bench((1, 2), workers=2) as b:
        owner, other = b.lanes
        stage(b, 0)
        number = b.post(0, ACC)
        assert other.owned == {}
        assert other.pass_once() is False
        assert owner.pass_once() is True
        assert b.done(0) == number


def test_the_queue_goes_round() -> None:
    with bench((2, 2)) as b:
        stage(b, 0)
        for number in range(1, 3 * QUEUE_DEPTH + 2):
            # Every command differs, so that a stale record would show.
            step = number // 2
            assert b.post(0, ACC if number % 2 else update(step)) == number
            b.drain()
            assert b.done(0) == number
        torch.testing.assert_close(
            b.arena.matrices[0].exp_avg, torch.full((2, 2), 1 - 0.9 ** (number // 2))
        )


class Model:
    """What the commands of one matrix mean, one after the other, in float64."""

    def __init__(self, master: Tensor) -> None:
        self.master = master.double()
        self.m, self.v, self.acc = (torch.zeros_like(self.master) for _ in range(3))

    def accumulate(self, grad: Tensor, first: bool) -> None:
        self.acc = grad.double() if first else self.acc + grad.double()

    def update(self, command: Update) -> None:
        h, grad = command.hyper, self.acc * command.inverse_count
        self.master = self.master * command.decay
        self.m = h.beta1 * self.m + (1 - h.beta1) * grad
        self.v = h.beta2 * self.v + (1 - h.beta2) * grad**2
        m_hat = self.m / (1 - h.beta1**command.step)
        v_hat = self.v / (1 - h.beta2**command.step)
        self.master = self.master - h.lr * m_hat / (v_hat.sqrt() + h.eps)


class Driver:
    """Sends a drawn sequence to the lanes as the engine would, and to the model."""

    def __init__(self, b: Bench) -> None:
        self.b = b
        self.gen = torch.Generator().manual_seed(0)
        for arrays in b.arena.matrices:
            arrays.master.copy_(self.draw(arrays.master))
        self.models = [Model(arrays.master) for arrays in b.arena.matrices]
        self.pending = [0] * len(self.models)  # gradients in the window
        self.updates = [0] * len(self.models)
        self.staged = [0] * len(self.models)  # number of the newest accumulation
        self.seen = [[0] * len(self.models) for _ in b.lanes]

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.gen)

    def lane_pass(self, lane: int) -> None:
        self.b.lanes[lane % len(self.b.lanes)].pass_once()
        for index, done in enumerate(self.b.arena.done):
            for matrix in self.b.lanes[index].owned:
                assert self.seen[index][matrix] <= done[matrix] <= self.b.arena.posted[matrix]
                self.seen[index][matrix] = int(done[matrix])

    def until(self, matrix: int, number: int) -> None:
        """What the trainer's back-pressure does: others work until ``number`` is done."""
        passes = 0
        while self.b.done(matrix) < number:
            self.lane_pass(passes)
            passes += 1
            assert passes < 10_000, "the lanes do not get on"

    def gradient(self, matrix: int) -> None:
        self.until(matrix, max(self.staged[matrix], self.next(matrix) - QUEUE_DEPTH))
        staging = self.b.arena.matrices[matrix].staging
        staging.copy_(self.draw(staging))
        first = self.pending[matrix] == 0
        self.models[matrix].accumulate(staging, first)
        self.staged[matrix] = self.b.post(matrix, Accumulate(first))
        self.pending[matrix] += 1

    def boundary(self, matrix: int) -> None:
        if not self.pending[matrix]:
            return
        self.until(matrix, self.next(matrix) - QUEUE_DEPTH)
        self.updates[matrix] += 1
        step = self.updates[matrix]
        command = update(step, self.pending[matrix], decay=1.0 - 0.01 * step)
        self.models[matrix].update(command)
        self.b.post(matrix, command)
        self.pending[matrix] = 0

    def next(self, matrix: int) -> int:
        return int(self.b.arena.posted[matrix]) + 1

    def check(self) -> None:
        for matrix, (model, arrays) in enumerate(
            zip(self.models, self.b.arena.matrices, strict=True)
        ):
            self.until(matrix, int(self.b.arena.posted[matrix]))
            for ours, theirs in (
                (arrays.master, model.master),
                (arrays.exp_avg, model.m),
                (arrays.exp_avg_sq, model.v),
                (arrays.accumulator, model.acc),
            ):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


actions = st.tuples(st.sampled_from(["gradient", "boundary", "lane_pass"]), st.integers(0, 2))


@settings(derandomize=True, deadline=None, max_examples=120)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=3, max_size=3),
    workers=st.integers(1, 3),
    threads=st.integers(1, 2),
    chunk_elements=st.integers(1, 12),
    sequence=st.lists(actions, max_size=60),
)
def test_any_interleaving_equals_the_commands_in_order(
    shapes: list[tuple[int, int]],
    workers: int,
    threads: int,
    chunk_elements: int,
    sequence: list[tuple[str, int]],
) -> None:
    with bench(*shapes, workers=workers, threads=threads, chunk_elements=chunk_elements) as b:
        driver = Driver(b)
        for action, number in sequence:
            getattr(driver, action)(number)
        driver.check()
