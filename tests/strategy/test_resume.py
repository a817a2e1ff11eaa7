"""Checkpoints: their form, what they hold, and resuming from them under either strategy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from lightning_zenflow import ZenFlowStrategy
from tests.strategy.models import (
    SYNCHRONOUS,
    TOLERANCE,
    WINDOWED,
    At,
    Regression,
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

STRATEGIES = ("ddp", "zenflow")


class Grouped(Regression):
    """Two groups, a schedule of three epochs, a frozen layer and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__(optimizer=two_groups, scheduler=one_cycle)
        self.conv.bias.requires_grad_(False)
        self.unused = nn.Linear(5, 4)


def two_groups(module: nn.Module) -> Optimizer:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-4}], lr=1e-3
    )


def one_cycle(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": OneCycleLR(optimizer, 2e-3, total_steps=24), "interval": "step"}


def strategy(name: str, settings: dict[str, Any] = SYNCHRONOUS) -> Any:
    if name == "zenflow":
        return zenflow(**settings, find_unused_parameters=True)
    return "ddp_find_unused_parameters_true"


@dataclass
class Source:
    """An uninterrupted run of three epochs, and what it saved at the end of its first."""

    path: Path
    saved: dict[str, Any]
    at_save: dict[str, Tensor]
    end: dict[str, Tensor]
    losses: list[float]


def run_and_save(folder: Path, kind: Any, name: str, settings: dict[str, Any]) -> Source:
    path, at_save = folder / f"{name}.ckpt", {}

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            at_save.update(weights(module))
            trainer.save_checkpoint(path)

    module = build(kind)
    callbacks = [At("on_train_epoch_end", save)]
    fit(module, strategy(name, settings), max_epochs=3, callbacks=callbacks)
    saved = torch.load(path, weights_only=True)
    return Source(path, saved, at_save, weights(module), module.losses)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The same run under either strategy."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: run_and_save(folder, Grouped, name, SYNCHRONOUS) for name in STRATEGIES}


def form(value: Any) -> Any:
    """A checkpoint's structure: keys, types, shapes, dtypes and devices, but no numbers."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [form(item) for item in value]
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.is_contiguous()
    return type(value)


# -- the form ---------------------------------------------------------------------------------------


def test_has_the_form_of_ddps_checkpoint(sources: dict[str, Source]) -> None:
    """Read with ``weights_only=True``; key by key the same, in the same order."""
    ours, ref = (sources[name].saved for name in ("zenflow", "ddp"))
    assert form(ours) == form(ref)
    state, expected = ours["optimizer_states"][0]["state"], ref["optimizer_states"][0]["state"]
    assert list(state) == list(expected)
    assert len(state) == 8, "without the frozen bias and the unused layer"
    assert ours["optimizer_states"][0]["param_groups"] == ref["optimizer_states"][0]["param_groups"]
    assert ours["global_step"] == ref["global_step"] == 8
    for index, entry in state.items():
        assert entry["step"] == expected[index]["step"] == 8
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(entry[key], expected[index][key], rtol=1e-4, atol=1e-6)


def test_weights_equal_the_live_ones_and_load_into_a_bare_module(
    sources: dict[str, Source],
) -> None:
    source = sources["zenflow"]
    assert same_bits(source.saved["state_dict"], source.at_save)
    bare = build(Grouped, seed=5)
    assert not same_bits(weights(bare), source.at_save)
    bare.load_state_dict(source.saved["state_dict"], strict=True)
    by_lightning = Grouped.load_from_checkpoint(source.path, weights_only=True)
    live = build(Grouped)
    live.load_state_dict(source.at_save)
    x = loader().dataset[:4][0]
    assert torch.equal(bare(x), live(x))
    assert torch.equal(by_lightning(x), live(x))


def test_plain_adamw_takes_the_state(sources: dict[str, Source]) -> None:
    """Outside of Lightning, for an export."""
    module = build(Grouped)
    optimizer = two_groups(module)
    optimizer.load_state_dict(sources["zenflow"].saved["optimizer_states"][0])
    first = optimizer.state[module.conv.weight]
    assert first["exp_avg"].shape == module.conv.weight.shape
    assert first["step"] == 8


# -- resuming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"), [("zenflow", "zenflow"), ("ddp", "zenflow"), ("zenflow", "ddp")]
)
def test_resumed_run_equals_the_uninterrupted_one(
    sources: dict[str, Source], saved_by: str, resumed_by: str
) -> None:
    module = build(Grouped, seed=9)
    trainer = fit(module, strategy(resumed_by), ckpt_path=sources[saved_by].path, max_epochs=3)
    assert trainer.global_step == 24
    assert len(module.losses) == 16
    for name in STRATEGIES:
        assert distance(weights(module), sources[name].end) <= TOLERANCE
    assert distance(sources["ddp"].end, sources["ddp"].at_save) > 1e-3


def test_counters_and_moments_are_restored(sources: dict[str, Source]) -> None:
    """Steps of both halves, of the dense parameters and of the engine; state on the CPU."""
    source, seen = sources["zenflow"], []

    def check(trainer: pl.Trainer, module: Any) -> None:
        engine = running(trainer)
        assert engine.steps == trainer.global_step == 8
        params = [p for group in engine.optimizer.param_groups for p in group["params"]]
        for index, entry in source.saved["optimizer_states"][0]["state"].items():
            matrix = engine.matrix_of(params[index])
            if matrix is None:
                dense = engine.dense.states[params[index]]
                assert dense.steps == 8
                assert torch.equal(dense.exp_avg, entry["exp_avg"])
            else:
                assert (matrix.steps, matrix.updates) == (8, 8)
                assert matrix.hot is not None
                whole = entry["exp_avg_sq"].view(matrix.rows, matrix.cols)
                assert torch.equal(matrix.arrays.exp_avg_sq, whole[:, matrix.columns.cold])
                assert torch.equal(matrix.hot.exp_avg_sq, whole[:, matrix.columns.hot])
                live = source.at_save[matrix.name].view(matrix.rows, matrix.cols)
                assert torch.equal(matrix.arrays.master, live[:, matrix.columns.cold])
            seen.append(index)
        assert not engine.optimizer.state

    fit(
        build(Grouped, seed=9),
        strategy("zenflow", WINDOWED | {"warmup_steps": 4}),
        ckpt_path=source.path,
        max_epochs=2,
        limit_train_batches=8,
        callbacks=[At("on_train_start", check)],
    )
    assert len(seen) == 8


def test_full_windows_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """From the same weights, then close.

    Not equal: hot columns are chosen anew, and the cold half goes on with the hot half's step count
    (AdamW's form has one), which weighs new gradients less than its own small count did.
    """
    source = run_and_save(tmp_path, Regression, "zenflow", WINDOWED)
    module = build(seed=9)
    fit(module, zenflow(**WINDOWED), ckpt_path=source.path, max_epochs=3)
    assert module.losses[0] == pytest.approx(source.losses[8], rel=1e-6)
    assert module.losses == pytest.approx(source.losses[8:], rel=0.1)
    assert sum(module.losses[-8:]) < sum(source.losses[:8])


def test_resume_from_inside_a_window_continues_the_loss(tmp_path: Path) -> None:
    """Saved after step 7, with two windows open; validation before and after gives one number."""
    path, before, val = tmp_path / "seven.ckpt", [], loader(8, seed=2)

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 7:
            assert pending(running(trainer))
            trainer.save_checkpoint(path)
            with torch.no_grad():
                before.extend(float(module.loss(batch)) for batch in val)

    whole = build()
    callbacks = [At("on_train_batch_end", save)]
    fit(whole, zenflow(**WINDOWED), max_epochs=3, callbacks=callbacks)
    resumed, after = build(seed=9), []

    def evaluate(trainer: pl.Trainer, module: Any) -> None:
        assert running(trainer).steps == trainer.global_step == 7
        with torch.no_grad():
            after.extend(float(module.loss(batch)) for batch in val)

    fit(
        resumed,
        zenflow(**WINDOWED),
        ckpt_path=path,
        max_epochs=3,
        callbacks=[At("on_train_start", evaluate)],
    )
    assert after == before != []
    assert len(resumed.losses) == 24 - 7
    # The first loss is of another batch: Lightning starts a plain DataLoader from its beginning.
    assert resumed.losses[1:] == pytest.approx(whole.losses[8:], rel=0.1)


# -- other ways to save and load ----------------------------------------------------------------------


def test_weights_only_saving_and_loading(sources: dict[str, Source], tmp_path: Path) -> None:
    """Saved without optimizer inside a window; loaded by the Trainer's own safe unpickler."""
    live: dict[str, Tensor] = {}

    def save(trainer: pl.Trainer, module: Any) -> None:
        live.update(weights(module))
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    fit(
        build(Grouped),
        strategy("zenflow", WINDOWED),
        max_steps=3,
        callbacks=[At("on_train_batch_end", save)],
    )
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in saved
    assert same_bits(saved["state_dict"], live)

    module, trainer = build(Grouped, seed=9), make_trainer(strategy("zenflow"), max_epochs=3)
    with isolated():
        trainer.fit(module, loader(), ckpt_path=sources["zenflow"].path, weights_only=True)
    assert distance(weights(module), sources["zenflow"].end) <= TOLERANCE


def test_saving_after_fit_is_as_complete_as_with_ddp(tmp_path: Path) -> None:
    """The workers and the arena are gone, the optimizer has its state, and training can go on from it."""
    states = {}
    for name in STRATEGIES:
        module = build()
        trainer = fit(module, zenflow(**SYNCHRONOUS) if name == "zenflow" else name, max_steps=5)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert same_bits(saved["state_dict"], weights(module))
        states[name] = saved["optimizer_states"][0]["state"]
    ours, theirs = states["zenflow"], states["ddp"]
    assert form(ours) == form(theirs)
    for index, entry in theirs.items():
        for key, value in entry.items():
            torch.testing.assert_close(ours[index][key], value, rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["replay", "mean"])
def test_saving_after_fit_equals_saving_at_its_end(tmp_path: Path, rule: str) -> None:
    settings = {**WINDOWED, "cold_rule": rule}
    last = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    trainer = fit(
        build(), zenflow(**settings), max_epochs=1, enable_checkpointing=True, callbacks=[last]
    )
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    end, after = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("last", "after")
    )
    assert same_bits(end["state_dict"], after["state_dict"])
    torch.testing.assert_close(
        after["optimizer_states"][0]["state"], end["optimizer_states"][0]["state"], rtol=0, atol=0
    )


def test_saving_after_an_interrupted_fit_says_that_it_holds_weights_only(tmp_path: Path) -> None:
    def fail(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 2:
            raise ZeroDivisionError("from the user's callback")

    trainer = make_trainer(zenflow(**WINDOWED), callbacks=[At("on_train_batch_start", fail)])
    with isolated(), pytest.raises(ZeroDivisionError):
        trainer.fit(build(), loader())
    with pytest.warns(UserWarning, match=r"weights and no optimizer state.*ModelCheckpoint"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["state"] == {}


def test_saved_on_an_exception_and_resumed(tmp_path: Path) -> None:
    """Epochs of one batch, because Lightning starts a plain DataLoader from its beginning."""

    def fail(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 5:
            raise ZeroDivisionError("from the user's callback")

    module, data = build(), loader(4)
    with pytest.raises(ZeroDivisionError):
        fit(
            module,
            zenflow(**SYNCHRONOUS),
            data=data,
            max_epochs=8,
            enable_checkpointing=True,
            callbacks=[At("on_train_batch_start", fail), OnExceptionCheckpoint(tmp_path, "last")],
        )
    resumed, whole = build(seed=9), build()
    path = tmp_path / "last.ckpt"
    fit(resumed, zenflow(**SYNCHRONOUS), data=data, max_epochs=8, ckpt_path=path)
    fit(whole, "ddp", data=data, max_epochs=8)
    assert (len(module.losses), len(resumed.losses)) == (5, 3)
    assert distance(weights(resumed), weights(whole)) <= TOLERANCE


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Weights of another shape torch refuses itself: cut a saved moment."""
    fit(build(), "ddp", callbacks=[At("on_train_end", lambda t, m: t.save_checkpoint("ref.ckpt"))])
    saved = torch.load("ref.ckpt", weights_only=True)
    state = saved["optimizer_states"][0]["state"][0]
    state["exp_avg"] = state["exp_avg"][:, :1]
    torch.save(saved, tmp_path / "cut.ckpt")
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter conv\.weight has shape \(6, 1, 3\)"
    ):
        fit(build(), zenflow(), ckpt_path=tmp_path / "cut.ckpt", max_epochs=2)


class Tunable(Regression):
    """Takes its learning rate from the finder."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.lr)


def test_a_tuner_restores_weights_and_masters() -> None:
    """The finder trains, then loads its checkpoint back; the fit after it starts from there."""
    suggestions, ends = [], []
    for name in STRATEGIES:
        module = build(Tunable)
        start = weights(module)
        trainer = make_trainer("ddp" if name == "ddp" else zenflow(**SYNCHRONOUS))
        with isolated(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finder = Tuner(trainer).lr_find(module, loader(), num_training=20, update_attr=False)
            assert finder is not None
            suggestions.append(finder.results["loss"])
            assert same_bits(weights(module), start)
            trainer.fit(module, loader())
        ends.append(weights(module))
    assert suggestions[0] == pytest.approx(suggestions[1], rel=1e-3)
    assert distance(*ends) <= TOLERANCE


def test_a_finder_inside_fit_leaves_no_trace() -> None:
    """It trains and restores within the fit that goes on.

    No moment, count or master of its eight steps may stay.
    """
    ends, steps = [], []
    for name in STRATEGIES:
        module, first = build(Tunable), {}

        def note(trainer: pl.Trainer, module: Any, first: dict[str, Tensor] = first) -> None:
            first.update(weights(module))
            if isinstance(trainer.strategy, ZenFlowStrategy):
                engine = running(trainer)
                steps.append((engine.steps, {m.steps for m in engine.matrices}))

        finder = LearningRateFinder(num_training_steps=8, update_attr=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = fit(
                module,
                "ddp" if name == "ddp" else zenflow(**SYNCHRONOUS),
                callbacks=[finder, At("on_train_start", note)],
            )
        assert trainer.global_step == 8
        assert same_bits(first, weights(build(Tunable)))
        ends.append(weights(module))
    assert steps[-1] == (0, {0})
    assert distance(*ends) <= TOLERANCE


@pytest.mark.parametrize("settings", [SYNCHRONOUS, {**WINDOWED, "warmup_steps": 5}])
def test_weights_loaded_during_fit_become_the_masters(settings: dict[str, Any]) -> None:
    """A callback goes back to earlier weights before step 6; the moments stay, as under DDP."""
    start = weights(build())
    loaded = {"state_dict": {name: value * 0.5 for name, value in start.items()}}

    def go_back(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 5:
            trainer.strategy.load_model_state_dict(loaded)

    ends = []
    for chosen in ("ddp", zenflow(**settings)):
        module = build()
        callbacks = [At("on_train_batch_start", go_back)]
        fit(module, chosen, limit_train_batches=6, callbacks=callbacks)
        ends.append(weights(module))
    # With windows the sixth step is one partial window: AdamW's first host update after warm-up.
    assert distance(*ends) <= TOLERANCE
