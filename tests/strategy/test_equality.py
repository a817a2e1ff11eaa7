"""The real Trainer with ZenFlow against plain DDP, and what must not disturb a trajectory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from tests.strategy.models import (
    SYNCHRONOUS,
    TOLERANCE,
    WINDOWED,
    At,
    Regression,
    Trace,
    adamw,
    build,
    distance,
    fit,
    isolated,
    loader,
    make_trainer,
    pending,
    running,
    same_bits,
    weights,
    zenflow,
)

# -- modules of the cases ---------------------------------------------------------------------------


def two_groups(module: nn.Module) -> Optimizer:
    """Other rate and decay for vectors, and a group that must not move."""
    named = dict(module.named_parameters())
    still = named.pop("head.weight")
    return AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-4},
            {"params": [still], "lr": 0.0},
        ],
        lr=1e-3,
        betas=(0.8, 0.95),
    )


def adam(module: nn.Module) -> Optimizer:
    return Adam(module.parameters(), lr=1e-3, weight_decay=0.1)


def fused(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-3, fused=True)


def one_cycle(optimizer: Optimizer) -> dict[str, Any]:
    schedule = OneCycleLR(optimizer, max_lr=2e-3, total_steps=24)
    return {"scheduler": schedule, "interval": "step"}


def plateau(optimizer: Optimizer) -> dict[str, Any]:
    # A threshold that no epoch reaches: the rate falls after every epoch but the first.
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.99)
    return {"scheduler": schedule, "monitor": "loss"}


class PartlyTrained(Regression):
    """The convolution is frozen; a branch and an adapter beside it: one unused, one used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)
        self.unused = nn.Linear(5, 4)
        self.adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class Unfreezing(BaseFinetuning):
    """Lightning's way: freeze before training, add a group when an epoch begins."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.conv)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.conv, optimizer, lr=5e-4)


def trainable(module: nn.Module) -> Optimizer:
    return AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)


class Overriding(Regression):
    """Every hook around the step is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        assert isinstance(optimizer, AdamW)
        self.seen.append("optimizer_step")
        for group in optimizer.param_groups:  # a warm-up written by hand, as in Lightning's guide
            group["lr"] = 1e-3 * min(1.0, (self.trainer.global_step + 1) / 6)
        optimizer.step(closure=optimizer_closure)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        assert isinstance(optimizer, AdamW)
        assert optimizer.param_groups[0]["lr"] <= 1e-3
        self.seen.append("on_before_optimizer_step")
        self.head.weight.grad.mul_(0.5)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        self.seen.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.seen.append("on_before_zero_grad")


# -- equality with DDP ------------------------------------------------------------------------------


@dataclass
class Case:
    """One configuration; ``trainer`` and ``module`` are the same for both strategies."""

    settings: dict[str, Any] = field(default_factory=lambda: dict(SYNCHRONOUS))
    kind: Callable[..., Regression] = Regression
    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    ddp: str = "ddp"


CASES = {
    "reselect": Case(),
    "offload_all": Case({**SYNCHRONOUS, "topk_ratio": 0.0}),
    "all_hot": Case({"topk_ratio": 1.0, "update_interval": 4}),
    "warmup_longer_than_run": Case({**WINDOWED, "warmup_steps": 24}),
    "adam": Case(module={"optimizer": adam}),
    "clip_value": Case(
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "one_cycle": Case(module={"scheduler": one_cycle}),
    "clip_norm_fused": Case(module={"optimizer": fused}, trainer={"gradient_clip_val": 0.1}),
    "frozen_and_unused": Case(
        {**SYNCHRONOUS, "find_unused_parameters": True},
        kind=PartlyTrained,
        ddp="ddp_find_unused_parameters_true",
    ),
    "unfrozen_later": Case(
        module={"optimizer": trainable},
        trainer={"callbacks": [Unfreezing()]},
    ),
    "overridden_hooks": Case(kind=Overriding),
    "groups_plateau_accumulation_and_clipping": Case(
        module={"optimizer": two_groups, "scheduler": plateau},
        trainer={
            "accumulate_grad_batches": 3,
            "gradient_clip_val": 0.1,
            "gradient_clip_algorithm": "norm",
        },
    ),
}


def run(case: Case, strategy: Any, *more: Callback) -> tuple[Regression, pl.Trainer, Trace]:
    """Train three epochs of eight batches, recording everything."""
    trace = Trace()
    module = build(case.kind, **case.module)
    settings = {"max_epochs": 3, **case.trainer}
    callbacks = [trace, *deepcopy(settings.pop("callbacks", [])), *more]
    trainer = fit(module, strategy, callbacks=callbacks, **settings)
    return module, trainer, trace


def assert_same_run(ours: Trace, ref: Trace) -> None:
    """Same hooks in the same order, same steps and rates, and equal weights after every batch."""
    assert ours.events == ref.events
    assert ours.global_steps == ref.global_steps
    assert ours.rates == ref.rates
    assert len(ours.weights) == len(ref.weights)
    for batch, (left, right) in enumerate(zip(ours.weights, ref.weights, strict=True)):
        assert distance(left, right) <= TOLERANCE, f"after batch {batch}"


@pytest.mark.parametrize("name", CASES)
def test_equals_ddp_after_every_batch(name: str) -> None:
    case = CASES[name]
    reference, ref_trainer, ref = run(case, case.ddp)
    hot: list[list[list[int]]] = []

    def note_hot(trainer: pl.Trainer, module: Any) -> None:
        hot.append([sorted(m.columns.hot.tolist()) for m in running(trainer).matrices])

    with warnings.catch_warnings():
        # Among them: "lr_scheduler.step() before optimizer.step()".
        warnings.filterwarnings("error", ".*lr_scheduler.*")
        module, trainer, ours = run(
            case, zenflow(**case.settings), At("on_train_batch_end", note_hot)
        )
    assert_same_run(ours, ref)
    assert trainer.global_step == ref_trainer.global_step
    assert distance(weights(module), ref.weights[0]) > 1e-3, "training did not move the weights"
    for mine, theirs in zip(
        trainer.lr_scheduler_configs, ref_trainer.lr_scheduler_configs, strict=True
    ):
        assert mine.scheduler.state_dict().keys() == theirs.scheduler.state_dict().keys()
        assert mine.scheduler.last_epoch == theirs.scheduler.last_epoch
    if case.settings.get("select_interval") == 1 and case.settings["topk_ratio"] > 0:
        assert len({str(columns) for columns in hot}) > 2, "hot columns never changed"
    if isinstance(reference, Overriding):
        assert module.seen == reference.seen
        assert set(module.seen) == {
            "optimizer_step",
            "on_before_optimizer_step",
            "configure_gradient_clipping",
            "on_before_zero_grad",
        }


def test_accumulation_steps_on_the_last_micro_batch_only() -> None:
    """8 batches in groups of 3 are 3 steps an epoch, the last from 2 batches, for both halves."""
    counts: list[tuple[int, int, int]] = []

    def note(trainer: pl.Trainer, module: Any) -> None:
        matrix = running(trainer).matrices[0]
        counts.append((running(trainer).steps, matrix.steps, matrix.updates))

    fit(
        build(),
        zenflow(**SYNCHRONOUS),
        accumulate_grad_batches=3,
        callbacks=[At("on_train_batch_end", note)],
    )
    assert counts == [(n, n, n) for n in (0, 0, 1, 1, 1, 2, 2, 3)]


def test_frozen_and_unused_parameters_take_no_memory_and_do_not_move() -> None:
    offloaded: list[str] = []
    stepped: dict[str, int] = {}

    def note(trainer: pl.Trainer, module: Any) -> None:
        offloaded[:] = [m.name for m in running(trainer).matrices]
        stepped.update({m.name: m.steps for m in running(trainer).matrices})

    module = build(PartlyTrained)
    before = weights(module)
    fit(module, zenflow(**WINDOWED), callbacks=[At("on_train_batch_end", note)])
    after = weights(module)
    assert not any(name.startswith("conv") for name in offloaded)
    assert stepped["unused.weight"] == 0
    assert stepped["adapter.0.weight"] == 8
    for name in before:
        moved = not torch.equal(before[name], after[name])
        assert moved == (not name.startswith(("conv", "unused"))), name


# -- the Trainer's own counting ---------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 11, "max_epochs": -1, "accumulate_grad_batches": 2},
    "limit_batches": {"limit_train_batches": 0.5, "limit_val_batches": 1, "max_epochs": 2},
    "fast_dev_run": {"fast_dev_run": 2},
    "max_epochs": {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 0.5},
    "min_steps": {"max_epochs": 1, "min_steps": 10},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_counts_equal_ddp(limits: dict[str, Any]) -> None:
    """Steps, hooks (saving included), validation runs and scheduler steps."""
    traces, trainers = [], []
    for strategy in ("ddp", zenflow(**SYNCHRONOUS)):
        trace = Trace()
        module = build(scheduler=one_cycle)
        trainer = fit(module, strategy, val=loader(8, seed=2), callbacks=[trace], **limits)
        traces.append(trace)
        trainers.append(trainer)
    ref, ours = traces
    assert_same_run(ours, ref)
    assert trainers[0].global_step == trainers[1].global_step > 0
    assert trainers[0].current_epoch == trainers[1].current_epoch
    steps = [t.lr_scheduler_configs[0].scheduler.last_epoch for t in trainers]
    assert steps[0] == steps[1] == trainers[0].global_step


@pytest.mark.parametrize("limits", [{"max_steps": 0}, {"limit_train_batches": 0}])
def test_no_step_changes_nothing(limits: dict[str, Any]) -> None:
    module = build()
    before = weights(module)
    trainer = fit(module, zenflow(**WINDOWED), **limits)
    assert trainer.global_step == 0
    assert same_bits(before, weights(module))


def test_validate_and_fit_twice_with_one_trainer() -> None:
    """validate, fit, validate, fit, validate: as DDP, with the second fit's fresh optimizer."""
    results: list[list[float]] = []
    ends: list[dict[str, Tensor]] = []
    steps: list[list[int]] = []
    for strategy in ("ddp", zenflow(**SYNCHRONOUS)):
        module, val = build(), loader(8, seed=2)
        trainer = make_trainer(strategy)
        losses, counts = [], []
        with isolated():
            losses += [trainer.validate(module, val, verbose=False)[0]["val_loss"]]
            for epochs in (1, 2):
                trainer.fit_loop.max_epochs = epochs
                trainer.fit(module, loader())
                counts.append(trainer.global_step)
                losses += [trainer.validate(module, val, verbose=False)[0]["val_loss"]]
        results.append(losses)
        ends.append(weights(module))
        steps.append(counts)
    assert steps[0] == steps[1] == [8, 16]
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    assert results[1][0] > results[1][1] > results[1][2]
    assert distance(ends[0], ends[1]) <= TOLERANCE


# -- what must not disturb the trajectory -----------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Trace]:
    """Two epochs with S = L = 4 and nothing else going on."""
    trace = Trace()
    fit(build(), zenflow(**WINDOWED), max_epochs=2, callbacks=[trace])
    return trace


def save(trainer: pl.Trainer, module: Any) -> None:
    if trainer.global_step % 4 != 0:
        assert pending(running(trainer))
    trainer.save_checkpoint(f"step{trainer.global_step}.ckpt")
    module.saved = getattr(module, "saved", 0) + 1


class Evaluate(Callback):
    """Counts the validation runs in which gradients were pending."""

    inside = 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        engine = running(trainer)
        self.inside += pending(engine) and not trainer.sanity_checking


def test_saving_inside_a_window_changes_no_bit(undisturbed: Trace) -> None:
    trace, module = Trace(), build()
    callbacks = [trace, At("on_train_batch_end", save)]
    fit(module, zenflow(**WINDOWED), max_epochs=2, callbacks=callbacks)
    assert module.saved == 16
    assert len(trace.weights) == len(undisturbed.weights) == 16
    for batch, (left, right) in enumerate(zip(trace.weights, undisturbed.weights, strict=True)):
        assert same_bits(left, right), f"after batch {batch}"


def test_validation_and_sanity_check_change_no_bit(undisturbed: Trace) -> None:
    trace, evaluate = Trace(), Evaluate()
    fit(
        build(),
        zenflow(**WINDOWED),
        val=loader(8, seed=2),
        max_epochs=2,
        val_check_interval=3,
        num_sanity_val_steps=2,
        callbacks=[trace, evaluate],
    )
    assert trace.events.count("on_sanity_check_end") == 1
    assert evaluate.inside == 4
    for batch, (left, right) in enumerate(zip(trace.weights, undisturbed.weights, strict=True)):
        assert same_bits(left, right), f"after batch {batch}"


# -- batches of any kind ----------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless, without length; the strongest inputs wander, and the hot columns with them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        gen = torch.Generator().manual_seed(3)
        for index in range(10**6):
            x = 0.1 * torch.randn(16, generator=gen)
            x[(index // 24) % 16] += 3.0
            yield x, x[:3].clone()


class Normalised(pl.LightningModule):
    """BatchNorm between two Linears."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before BatchNorm: its gradient is zero but for rounding, which Adam magnifies.
        before = nn.Linear(16, 12, bias=False)
        self.net = nn.Sequential(before, nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return adamw(self)


def test_selects_every_r_steps_of_a_loader_without_length() -> None:
    """S = 2, R = 5: at step 1, then at the first boundary that is at least 5 steps later."""
    selected: list[int] = []
    hot: set[str] = set()

    def note(trainer: pl.Trainer, module: Any) -> None:
        engine = running(trainer)
        for matrix in engine.matrices:
            if matrix.last_selection == engine.steps and matrix.name == "net.0.weight":
                selected.append(engine.steps)
                hot.add(str(sorted(matrix.columns.hot.tolist())))

    module = build(Normalised)
    fit(
        module,
        zenflow(topk_ratio=0.1, update_interval=2, select_interval=5),
        data=DataLoader(Stream(), batch_size=8),
        max_steps=30,
        max_epochs=-1,
        callbacks=[At("on_train_batch_end", note)],
    )
    assert selected == [1, 6, 12, 18, 24, 30]
    assert len(hot) > 2
    assert int(module.net[1].num_batches_tracked) == 30


def test_batchnorm_buffers_equal_ddp() -> None:
    ends = []
    for strategy in ("ddp", zenflow(**SYNCHRONOUS)):
        module = build(Normalised)
        fit(module, strategy, max_epochs=3)
        ends.append(weights(module))
    assert "net.1.running_var" in ends[0]
    assert distance(ends[0], ends[1]) <= TOLERANCE


@pytest.mark.parametrize("schedule", ["window", "staggered"])
def test_fifty_steps_of_full_windows_fall_and_stay_finite(schedule: str) -> None:
    module = build(optimizer=lambda m: AdamW(m.parameters(), lr=5e-3))
    trace = Trace()
    trainer = fit(
        module,
        zenflow(**WINDOWED, schedule=schedule),
        max_steps=50,
        max_epochs=-1,
        callbacks=[trace],
    )
    assert trainer.global_step == 50 == len(module.losses)
    assert all(math.isfinite(loss) for loss in module.losses)
    assert all(value.isfinite().all() for step in trace.weights for value in step.values())
    rounds = [sum(module.losses[i : i + 8]) / 8 for i in range(0, 48, 8)]  # all batches once each
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] < 0.7 * rounds[0]
