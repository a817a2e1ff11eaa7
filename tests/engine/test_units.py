"""The engine's small parts by themselves."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zenflow import _compat
from lightning_zenflow.arithmetic import AdamHyper, adam_update_, moment_rescale
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.engine.columns import (
    apply_swap,
    choose_hot,
    count_hot,
    plan_swap,
    provisional,
)
from lightning_zenflow.engine.hyper import read_hyper
from lightning_zenflow.engine.ledger import CAUSES, StallLedger, StepRecord
from lightning_zenflow.engine.schedule import Schedule, deal_phases
from lightning_zenflow.engine.window import Window

CPU = torch.device("cpu")
exact = settings(derandomize=True, deadline=None)


# -- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topk_ratio", "cols", "expected"),
    [
        (0.0, 10, 0),
        (1.0, 10, 10),
        (0.1, 10, 1),
        (0.1, 1, 1),  # at least one
        (1e-9, 1000, 1),
        (0.1, 14, 1),
        (0.1, 15, 2),  # halves go up
        (0.5, 1, 1),
        (0.5, 3, 2),
        (0.25, 10, 3),
        (0.99, 10, 10),
        (0.94, 10, 9),
        (0.1, 4096, 410),
    ],
)
def test_number_of_hot_columns(topk_ratio: float, cols: int, expected: int) -> None:
    assert count_hot(topk_ratio, cols) == expected


@given(st.floats(0.0, 1.0), st.integers(1, 10_000))
@exact
def test_number_of_hot_columns_is_the_rounded_share(topk_ratio: float, cols: int) -> None:
    n_hot = count_hot(topk_ratio, cols)
    assert 0 <= n_hot <= cols
    if topk_ratio == 0.0:
        assert n_hot == 0
    else:
        assert n_hot >= 1
        assert n_hot == 1 or abs(n_hot - topk_ratio * cols) <= 0.5


@pytest.mark.parametrize(
    ("scores", "n_hot", "expected"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([1.0, 7.0, 2.0, 7.0, 7.0], 2, [1, 3]),
        ([0.0, 0.0, 1.0], 2, [0, 2]),
        ([1.0, 2.0], 0, []),
        ([1.0, 2.0], 2, [0, 1]),
    ],
)
def test_highest_scores_are_hot_and_ties_go_to_the_lower_index(
    scores: list[float], n_hot: int, expected: list[int]
) -> None:
    assert sorted(choose_hot(torch.tensor(scores), n_hot).tolist()) == expected


def test_ties_go_to_the_lower_index_among_many_columns() -> None:
    """More than a sorting network or a small-size special case would handle."""
    scores = torch.zeros(5000)
    scores[1::2] = 1.0
    assert choose_hot(scores, 100).tolist() == list(range(1, 200, 2))
    assert sorted(choose_hot(scores, 2510).tolist()) == sorted(
        [*range(1, 5000, 2), *range(0, 20, 2)]
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
@exact
def test_choice_follows_its_definition(scores: list[int], data: st.DataObject) -> None:
    n_hot = data.draw(st.integers(0, len(scores)))
    ranked = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
    chosen = choose_hot(torch.tensor(scores, dtype=torch.float32), n_hot)
    assert sorted(chosen.tolist()) == sorted(ranked[:n_hot])


def test_the_first_columns_are_hot_provisionally() -> None:
    columns = provisional(2, 5, CPU)
    assert (columns.hot.tolist(), columns.cold.tolist()) == ([0, 1], [2, 3, 4])


@given(st.integers(1, 12), st.data())
@exact
def test_swaps_keep_every_column_once_and_move_only_what_changes(
    cols: int, data: st.DataObject
) -> None:
    n_hot = data.draw(st.integers(0, cols))
    columns = provisional(n_hot, cols, CPU)
    for _ in range(4):
        order = data.draw(st.permutations(range(cols)))
        chosen = set(order[:n_hot])
        hot, cold = columns.hot.tolist(), columns.cold.tolist()
        swap = plan_swap(columns, torch.tensor(order[:n_hot], dtype=torch.int64))
        assert (columns.hot.tolist(), columns.cold.tolist()) == (hot, cold), (
            "planning moves nothing"
        )
        assert set(swap.promoted.tolist()) == chosen - set(hot)
        assert set(swap.demoted.tolist()) == set(hot) - chosen
        assert len(swap) == len(swap.demoted) == len(swap.hot_slots) == len(swap.cold_slots)
        assert [hot[slot] for slot in swap.hot_slots] == swap.demoted.tolist()
        assert [cold[slot] for slot in swap.cold_slots] == swap.promoted.tolist()

        old = columns
        columns = apply_swap(columns, swap)
        assert (old.hot.tolist(), old.cold.tolist()) == (hot, cold), "queues may still read it"
        slots = columns.slots
        assert torch.equal(slots[columns.cold].long(), torch.arange(cols - n_hot))
        assert torch.equal(-1 - slots[columns.hot].long(), torch.arange(n_hot))
        assert set(columns.hot.tolist()) == chosen
        assert sorted(columns.hot.tolist() + columns.cold.tolist()) == list(range(cols))
        for slots, before, after in (
            (swap.hot_slots, hot, columns.hot.tolist()),
            (swap.cold_slots, cold, columns.cold.tolist()),
        ):
            moved = set(slots.tolist())
            assert all((before[s] != after[s]) == (s in moved) for s in range(len(before)))
        # Entry i of all four belongs together: the pair exchange their places.
        assert columns.hot[swap.hot_slots].tolist() == swap.promoted.tolist()
        assert columns.cold[swap.cold_slots].tolist() == swap.demoted.tolist()


# -- schedule -------------------------------------------------------------------------------------


def schedule(**options: Any) -> Schedule:
    return Schedule.from_config(ZenFlowConfig(**options))


def test_schedule_resolves_the_defaults() -> None:
    assert schedule(update_interval=3) == Schedule(interval=3, lag=1, select_every=12, warmup=0)
    paper = schedule(update_interval=3, cold_rule="mean")
    assert paper == Schedule(interval=3, lag=3, select_every=12, warmup=0)
    given_ = {"update_interval": 5, "update_lag": 2, "select_interval": 7, "warmup_steps": 9}
    assert schedule(**given_) == Schedule(interval=5, lag=2, select_every=7, warmup=9)


@pytest.mark.parametrize(
    ("interval", "warmup", "phase", "expected"),
    [
        (4, 0, 0, [4, 8, 12]),
        (4, 0, 1, [3, 7, 11]),
        (4, 0, 3, [1, 5, 9, 13]),
        (4, 3, 0, [7, 11]),
        (4, 3, 3, [4, 8, 12]),
        (3, 1, 2, [2, 5, 8, 11]),
        (1, 2, 0, list(range(3, 14))),
        (20, 0, 0, []),
    ],
)
def test_boundaries(interval: int, warmup: int, phase: int, expected: list[int]) -> None:
    calendar = schedule(update_interval=interval, warmup_steps=warmup)
    assert [step for step in range(1, 14) if calendar.is_boundary(step, phase)] == expected
    assert [step for step in range(1, 14) if calendar.warming_up(step)] == list(
        range(1, warmup + 1)
    )


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_merge_is_due_from_the_lag_on(lag: int) -> None:
    """Also later: the matrix may have had no gradient at the very step."""
    calendar = schedule(update_interval=4, update_lag=lag)
    due = [step for step in range(8, 16) if calendar.merge_due(step, submitted=8)]
    assert due == list(range(8 + lag, 16))


@pytest.mark.parametrize(
    ("interval", "select", "warmup", "phase", "expected"),
    [
        (4, 4, 0, 0, [1, 8, 12, 16, 20]),  # the boundary at 4 is only 3 steps after the first
        (4, 9, 0, 0, [1, 12]),
        (4, 3, 0, 0, [1, 4, 8, 12, 16, 20]),
        (4, 4, 2, 0, [3, 10, 14, 18]),
        (4, 4, 0, 3, [1, 5, 9, 13, 17]),
        (4, 4, 0, 1, [1, 7, 11, 15, 19]),
        (1, 1, 0, 0, list(range(1, 21))),
        (3, 7, 4, 0, [5, 13]),
    ],
)
def test_selections(
    interval: int, select: int, warmup: int, phase: int, expected: list[int]
) -> None:
    calendar = schedule(update_interval=interval, select_interval=select, warmup_steps=warmup)
    last: int | None = None
    seen = []
    for step in range(1, 21):
        if calendar.selection_due(step, phase, last):
            seen.append(step)
            last = step
    assert seen == expected


def test_one_phase_for_all_without_staggering() -> None:
    assert deal_phases([5, 1, 9], 4, staggered=False) == [0, 0, 0]


def test_equal_matrices_are_dealt_out_evenly() -> None:
    assert Counter(deal_phases([100] * 12, 4, staggered=True)) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_large_matrices_go_first() -> None:
    assert deal_phases([1, 1, 8, 1, 1, 4], 2, staggered=True) == [1, 1, 0, 1, 1, 1]


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
@exact
def test_phases_hold_about_the_same_number_of_elements(sizes: list[int], interval: int) -> None:
    phases = deal_phases(sizes, interval, staggered=True)
    assert phases == deal_phases(sizes, interval, staggered=True)
    assert len(phases) == len(sizes)
    load = [0] * interval
    for size, phase in zip(sizes, phases, strict=True):
        assert 0 <= phase < interval
        load[phase] += size
    # No phase is ahead of another by more than its own smallest matrix.
    for phase in set(phases):
        smallest = min(size for size, p in zip(sizes, phases, strict=True) if p == phase)
        assert load[phase] - min(load) <= smallest


# -- window ---------------------------------------------------------------------------------------


def test_a_window_counts_for_all_slots_together() -> None:
    window = Window()
    for factor in (0.5, 0.25):
        window.add(factor)
    assert (window.count, window.decay) == (2, 0.125)
    assert window.counts is None
    window.reset()
    assert window == Window()


def test_nothing_is_taken_from_an_empty_window() -> None:
    window = Window()
    counts, decays = window.take(torch.tensor([2, 0]), n_cold=4)
    assert (counts.tolist(), decays.tolist()) == ([0, 0], [1.0, 1.0])
    assert window == Window()


def test_slots_that_are_taken_start_anew() -> None:
    window = Window()
    window.add(0.5)
    window.add(0.5)
    counts, decays = window.take(torch.tensor([3, 1]), n_cold=4)
    assert (counts.tolist(), decays.tolist()) == ([2, 2], [0.25, 0.25])
    window.add(0.5)
    assert window.count == 3
    assert window.counts is not None
    assert window.decays is not None
    assert window.counts.tolist() == [3, 1, 3, 1]
    assert window.decays.tolist() == [0.125, 0.5, 0.125, 0.5]
    assert (counts.tolist(), decays.tolist()) == ([2, 2], [0.25, 0.25]), "what was taken is a copy"


@given(st.integers(1, 5), st.data())
@exact
def test_a_window_is_a_count_and_a_product_for_each_slot(n_cold: int, data: st.DataObject) -> None:
    window = Window()
    counts, decays = [0] * n_cold, [1.0] * n_cold
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            factor = data.draw(st.sampled_from([1.0, 0.5, 0.25]))  # exact products
            window.add(factor)
            counts, decays = [n + 1 for n in counts], [d * factor for d in decays]
        else:
            taken = data.draw(st.lists(st.integers(0, n_cold - 1), unique=True))
            got = window.take(torch.tensor(taken, dtype=torch.int64), n_cold)
            assert got[0].tolist() == [counts[slot] for slot in taken]
            assert got[1].tolist() == [decays[slot] for slot in taken]
            for slot in taken:
                counts[slot], decays[slot] = 0, 1.0
    expected = window.counts.tolist() if window.counts is not None else [window.count] * n_cold
    assert expected == counts


# -- ledger ---------------------------------------------------------------------------------------


def stalls_of(record: StepRecord | None) -> dict[str, float]:
    assert record is not None
    return record.stall_seconds


def test_ledger_adds_up_by_cause_and_step() -> None:
    ledger = StallLedger()
    ledger.start_clock()
    ledger.add("update", 0.5)
    ledger.add("ring", 0.25)
    ledger.close_step(1, host_busy_seconds=2.0)
    assert stalls_of(ledger.last) == dict.fromkeys(CAUSES, 0.0) | {"update": 0.5, "ring": 0.25}
    ledger.add("update", 1.0)
    ledger.add("update", 1.0)
    ledger.close_step(2, host_busy_seconds=5.0)
    assert stalls_of(ledger.last) == dict.fromkeys(CAUSES, 0.0) | {"update": 2.0}
    assert ledger.last is not None
    assert ledger.last.host_busy_seconds == 3.0
    ledger.add("flush", 0.125)
    ledger.close_flush(2, host_busy_seconds=6.0)
    assert ledger.last.step == 2, "a flush is no step"
    ledger.add("copy", 4.0)  # since then

    total = ledger.summary()
    assert total.steps == 2
    assert total.host_busy_seconds == 6.0
    assert total.stall_seconds == {
        "update": 2.5,
        "ring": 0.25,
        "selection": 0.0,
        "flush": 0.125,
        "copy": 4.0,
    }
    assert ledger.summary() == total, "reading changes nothing"


@given(
    st.lists(st.tuples(st.sampled_from(CAUSES), st.integers(0, 1000), st.booleans()), max_size=30)
)
@exact
def test_steps_and_flushes_add_up_to_the_summary(events: list[tuple[str, int, bool]]) -> None:
    ledger = StallLedger()
    ledger.start_clock()
    by_step, walls, expected = dict.fromkeys(CAUSES, 0.0), 0.0, dict.fromkeys(CAUSES, 0.0)
    steps = 0
    for cause, seconds, close in events:
        ledger.add(cause, float(seconds))
        expected[cause] += seconds
        if close:
            steps += 1
            ledger.close_step(steps, float(steps))
            assert ledger.last is not None
            walls += ledger.last.wall_seconds
            for name, value in ledger.last.stall_seconds.items():
                by_step[name] += value
    total = ledger.summary()
    assert total.stall_seconds == expected
    assert (total.steps, total.host_busy_seconds) == (steps, float(steps))
    assert total.wall_seconds == pytest.approx(walls)
    ledger.close_flush(steps, float(steps))
    assert ledger.summary().stall_seconds == expected


def test_difference_of_summaries_is_what_came_between() -> None:
    ledger = StallLedger()
    ledger.add("update", 1.0)
    ledger.updates = 3
    ledger.close_step(1, 4.0)
    earlier = ledger.summary()
    ledger.add("update", 0.5)
    ledger.updates = 5
    ledger.close_step(2, 5.0)
    part = ledger.summary().since(earlier)
    assert (part.steps, part.updates, part.host_busy_seconds) == (1, 2, 1.0)
    assert part.stall_seconds == dict.fromkeys(CAUSES, 0.0) | {"update": 0.5}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that tests move by hand: ``clock.now += 1.0``."""

    class Clock:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

    hand = Clock()
    monkeypatch.setattr("lightning_zenflow.engine.ledger.time", hand)
    return hand


def test_stopped_time_belongs_to_no_step(clock: Any) -> None:
    ledger = StallLedger()
    clock.now += 50.0  # before training
    ledger.start_clock()
    clock.now += 1.0
    ledger.stop_clock()
    clock.now += 30.0  # validation
    ledger.stop_clock()  # twice is as good as once
    ledger.start_clock()
    clock.now += 2.0
    ledger.start_clock()  # running already
    clock.now += 4.0
    ledger.close_step(1, 0.0)
    assert ledger.last is not None
    assert ledger.last.wall_seconds == 7.0
    clock.now += 8.0  # the clock runs on into the next step
    ledger.close_step(2, 0.0)
    assert ledger.last.wall_seconds == 8.0
    ledger.stop_clock()
    clock.now += 30.0
    ledger.close_step(3, 0.0)
    assert ledger.last.wall_seconds == 0.0
    assert ledger.summary().wall_seconds == 15.0


def test_a_block_is_timed_also_when_it_fails(clock: Any) -> None:
    ledger = StallLedger()

    def fail() -> None:
        with ledger.stall("selection"):
            clock.now += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ledger.summary().stall_seconds["selection"] == 2.0


def test_shares(clock: Any) -> None:
    ledger = StallLedger()
    ledger.start_clock()
    clock.now += 8.0
    ledger.add("update", 1.0)
    ledger.add("copy", 1.0)
    ledger.close_step(1, host_busy_seconds=4.0)
    for record in (ledger.last, ledger.summary()):
        assert record is not None
        assert record.stall_share == 0.25
        assert record.hidden_share == 0.75, "copies are not a wait for the host"


def test_hidden_share_without_host_work_is_nan_and_never_negative() -> None:
    ledger = StallLedger()
    assert math.isnan(ledger.summary().hidden_share)
    assert ledger.summary().stall_share == 0.0
    ledger.close_step(1, 0.0)
    assert ledger.last is not None
    assert math.isnan(ledger.last.hidden_share)
    ledger.add("update", 9.0)  # waiting also for workers that were not running
    ledger.close_step(2, 1.0)
    assert ledger.last.hidden_share == 0.0


def test_new_workers_count_from_zero() -> None:
    ledger = StallLedger()
    ledger.close_step(1, 5.0)
    ledger.forget_workers()
    ledger.close_step(2, 2.0)
    assert ledger.last is not None
    assert ledger.last.host_busy_seconds == 2.0
    assert ledger.summary().host_busy_seconds == 7.0


# -- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(0, 5), (5, 0), (0, 0), (7, 7)])
def test_moments_are_not_rescaled_without_counts_or_change(source: int, target: int) -> None:
    assert moment_rescale(0.9, source, target) == 1.0


@given(st.floats(0.0, 0.9999), st.integers(1, 10_000), st.integers(1, 10_000))
@exact
def test_rescaling_keeps_the_bias_corrected_moment(beta: float, source: int, target: int) -> None:
    moment = 0.7
    rescaled = moment * moment_rescale(beta, source, target)
    before, after = moment / (1.0 - beta**source), rescaled / (1.0 - beta**target)
    assert after == pytest.approx(before, rel=1e-12)


def hyper_of(optimizer: torch.optim.Optimizer) -> AdamHyper:
    return read_hyper(optimizer.param_groups[0])


OPTIONS = [
    {"lr": 1e-3, "weight_decay": 0.1},
    {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 1e-3, "betas": (0.0, 0.5), "eps": 1e-6, "weight_decay": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 7), (64, 129)])
def test_update_is_that_of_torch(
    kind: type[torch.optim.Adam], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    gen = torch.Generator().manual_seed(4)
    theirs = (0.1 * torch.randn(shape, generator=gen)).requires_grad_()
    optimizer = kind([theirs], **options)
    hyper = hyper_of(optimizer)
    ours, m, v = theirs.detach().clone(), torch.zeros(shape), torch.zeros(shape)
    for step in range(1, 21):
        grad = torch.randn(shape, generator=gen)
        given_ = grad.clone()
        adam_update_(ours, given_, m, v, step=step, hyper=hyper, decay=hyper.step_decay)
        assert torch.equal(given_, grad), "the gradient is not changed"
        theirs.grad = grad
        optimizer.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=0.0, atol=2e-6)
    torch.testing.assert_close(m, optimizer.state[theirs]["exp_avg"])
    torch.testing.assert_close(v, optimizer.state[theirs]["exp_avg_sq"])


def test_each_column_has_its_own_decay() -> None:
    """A tensor of factors does to each column what a single one does to all."""
    hyper = AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True)
    gen = torch.Generator().manual_seed(5)
    start, grad = torch.randn(4, 3, generator=gen), torch.randn(4, 3, generator=gen)

    def updated(decay: float | Tensor) -> Tensor:
        master = start.clone()
        moments = torch.zeros(4, 3), torch.zeros(4, 3)
        adam_update_(master, grad, *moments, step=1, hyper=hyper, decay=decay)
        return master

    factors = [1.0, 0.5, 0.25]
    together = updated(torch.tensor(factors))
    for column, factor in enumerate(factors):
        torch.testing.assert_close(together[:, column], updated(factor)[:, column], rtol=0, atol=0)
    assert not torch.equal(updated(0.5), updated(1.0))


def test_decay_of_a_step() -> None:
    assert AdamHyper(0.5, 0.9, 0.999, 1e-8, 0.25, decoupled=True).step_decay == 0.875
    assert AdamHyper(0.5, 0.9, 0.999, 1e-8, 0.25, decoupled=False).step_decay == 1.0


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_hyperparameters_are_read_as_they_are_now(kind: type[torch.optim.Adam]) -> None:
    optimizer = kind([torch.zeros(1, requires_grad=True)], lr=0.5, betas=(0.6, 0.7), eps=0.25)
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = (
        torch.tensor(0.125),
        2,
    )  # a scheduler's, or a loaded state's
    decoupled = kind is torch.optim.AdamW
    assert read_hyper(group) == AdamHyper(0.125, 0.6, 0.7, 0.25, 2.0, decoupled)


# -- private names of torch -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_update_takes_several_tensors_with_their_own_counts(
    dtype: torch.dtype, decoupled: bool
) -> None:
    """The name exists, and does what AdamW (Adam) does."""
    gen = torch.Generator().manual_seed(6)
    shapes, starts = [(3, 5), (17,), (2, 2, 2)], [1, 4, 9]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = [torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in shapes]
    optimizer = kind(theirs, lr=1e-2, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.1)
    for param, start in zip(theirs, starts, strict=True):
        optimizer.state[param] = {
            "step": torch.tensor(float(start - 1)),
            "exp_avg": torch.randn(param.shape, generator=gen).to(dtype),
            "exp_avg_sq": torch.rand(param.shape, generator=gen).to(dtype),
        }
        param.grad = torch.randn(param.shape, generator=gen).to(dtype)
    ours = [param.detach().clone() for param in theirs]
    firsts = [optimizer.state[param]["exp_avg"].clone() for param in theirs]
    seconds = [optimizer.state[param]["exp_avg_sq"].clone() for param in theirs]
    _compat.fused_adam_(
        ours,
        [param.grad for param in theirs if param.grad is not None],
        firsts,
        seconds,
        [torch.tensor(float(start)) for start in starts],
        lr=1e-2,
        beta1=0.7,
        beta2=0.9,
        eps=1e-6,
        weight_decay=0.1,
        decoupled=decoupled,
    )
    optimizer.step()
    for mine, param, m, v in zip(ours, theirs, firsts, seconds, strict=True):
        torch.testing.assert_close(mine, param.detach(), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(m, optimizer.state[param]["exp_avg"])
        torch.testing.assert_close(v, optimizer.state[param]["exp_avg_sq"])


def test_foreach_copy_casts_each_pair() -> None:
    sources = [torch.full((3,), 1.0 + 2.0**-9), torch.tensor([[2.5, -1.0]])]
    targets = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16)]
    _compat.foreach_copy_(targets, sources)
    assert [t.tolist() for t in targets] == [s.to(torch.bfloat16).tolist() for s in sources]


@pytest.mark.parametrize("marked", [True, False])
def test_marking_keeps_torch_from_warning_about_the_order(marked: bool) -> None:
    """Without the mark it does warn: the attribute still means what it did."""
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if marked:
        _compat.mark_stepped(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    order = [w for w in caught if "lr_scheduler.step()" in str(w.message)]
    assert bool(order) != marked
