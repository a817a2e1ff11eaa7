"""Precision plugins: what runs, what it equals, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_zenflow.host.arena import MeanArrays
from tests.strategy.models import (
    SYNCHRONOUS,
    TOLERANCE,
    WINDOWED,
    At,
    Trace,
    build,
    distance,
    fit,
    isolated,
    loader,
    make_trainer,
    running,
    weights,
    zenflow,
)

MODEL_DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
}


@pytest.mark.parametrize("rule", ["replay", "mean"])
@pytest.mark.parametrize("precision", MODEL_DTYPES)
def test_trains_with_full_windows(precision: Any, rule: str) -> None:
    """Weights keep the precision's dtype, masters and moments are fp32, and the loss falls."""
    dtypes: dict[str, set[torch.dtype]] = {"grad": set(), "state": set(), "staged": set()}

    def note(trainer: pl.Trainer, module: Any) -> None:
        dtypes["grad"] |= {p.grad.dtype for p in module.parameters()}
        for matrix in running(trainer).matrices:
            hot, host = matrix.hot, matrix.arrays
            assert hot is not None
            assert (hot.master is None) == (matrix.param.dtype == torch.float32)
            state = [hot.exp_avg, hot.exp_avg_sq, host.master, host.exp_avg, host.exp_avg_sq]
            state += [] if hot.master is None else [hot.master]
            state += [host.accumulator] if isinstance(host, MeanArrays) else []
            dtypes["state"] |= {tensor.dtype for tensor in state}
            dtypes["staged"] |= {running(trainer).cold.sent(matrix).dtype, host.outgoing.dtype}
        for dense in running(trainer).dense.states.values():
            dtypes["state"] |= {dense.exp_avg.dtype, dense.exp_avg_sq.dtype}

    module = build(optimizer=lambda m: AdamW(m.parameters(), lr=5e-3))
    before = module.state_dict()["hidden.weight"].clone()
    fit(
        module,
        zenflow(**WINDOWED, cold_rule=rule),
        precision=precision,
        max_epochs=5,
        callbacks=[At("on_train_batch_end", note)],
    )
    expected = MODEL_DTYPES[precision]
    assert {p.dtype for p in module.parameters()} == {expected}
    assert dtypes == {"grad": {expected}, "state": {torch.float32}, "staged": {expected}}
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert (module.hidden.weight.float() - before).abs().max() > 1e-3
    assert sum(module.losses[-8:]) < 0.8 * sum(module.losses[:8])


def small_steps(module: torch.nn.Module) -> Optimizer:
    """Below half a unit in the last place of most bf16 weights: plain bf16 would stand still."""
    return AdamW(module.parameters(), lr=1e-4, weight_decay=0.1)


def small_fused_steps(module: torch.nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("optimizer", [small_steps, small_fused_steps])
def test_bf16_mixed_equals_ddp(optimizer: Callable[[torch.nn.Module], Optimizer]) -> None:
    """Clipped; with a fused AdamW too, for which Lightning's plugin refuses to clip under DDP."""
    traces = []
    for strategy, make in (("ddp", small_steps), (zenflow(**SYNCHRONOUS), optimizer)):
        trace = Trace()
        fit(
            build(optimizer=make),
            strategy,
            precision="bf16-mixed",
            max_epochs=3,
            gradient_clip_val=0.5,
            callbacks=[trace],
        )
        traces.append(trace)
    ref, ours = traces
    assert ours.events == ref.events
    for batch, (left, right) in enumerate(zip(ours.weights, ref.weights, strict=True)):
        assert distance(left, right) <= TOLERANCE, f"after batch {batch}"
    assert distance(ref.weights[0], ref.weights[-1]) > 1e-3


def masters(trainer: pl.Trainer) -> dict[str, Tensor]:
    """The fp32 masters of all parameters, put together from both halves."""
    engine, found = running(trainer), {}
    for matrix in engine.matrices:
        assert matrix.hot is not None
        assert matrix.hot.master is not None
        whole = torch.empty(matrix.rows, matrix.cols)
        whole[:, matrix.columns.hot] = matrix.hot.master
        whole[:, matrix.columns.cold] = matrix.arrays.master
        found[matrix.name] = whole.view(matrix.param.shape)
    for param, state in engine.dense.states.items():
        assert state.master is not None
        found[engine.name_of(param)] = state.master.clone()
    return found


def test_bf16_true_keeps_what_bf16_would_round_away() -> None:
    """400 steps of 1e-5: the weights are the rounding of fp32 masters, and those have moved."""
    kept: dict[str, dict[str, Tensor]] = {}
    steps: set[float] = set()

    def note(trainer: pl.Trainer, module: Any) -> None:
        kept["masters"], kept["weights"] = masters(trainer), weights(module)
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
        steps.update(float(entry["step"]) for entry in state.values())
        assert all(entry["exp_avg"].dtype == torch.float32 for entry in state.values())

    module = build(optimizer=lambda m: AdamW(m.parameters(), lr=1e-5, weight_decay=0.0))
    start = {name: value.bfloat16() for name, value in weights(module).items()}
    fit(
        module,
        zenflow(**WINDOWED),
        precision="bf16-true",
        max_epochs=50,
        callbacks=[At("on_train_epoch_end", note)],
    )
    assert steps == set(map(float, range(8, 401, 8)))
    assert kept["masters"].keys() == kept["weights"].keys() == start.keys()
    for name, master in kept["masters"].items():
        assert torch.equal(master.bfloat16(), kept["weights"][name]), name
        # Adam's steps are about lr each; cold columns make one in four.
        moved = (master - start[name].float()).abs()
        assert 2e-4 < moved.max() < 6e-3, name
    ones = kept["masters"]["norm.weight"] - 1.0
    assert 0.0 < ones.abs().min() < 2**-8, "no step of 1e-5 shows in a bf16 number near 1"


@pytest.mark.parametrize(
    ("precision", "plugin"),
    [
        ("16-mixed", lambda: MixedPrecision("16-mixed", "cpu")),
        ("16-true", lambda: HalfPrecision("16-true")),
        ("64-true", lambda: DoublePrecision()),
    ],
)
def test_other_precisions_are_refused(precision: str, plugin: Callable[[], Any]) -> None:
    """By plugin, because Lightning turns the string "16-mixed" into "bf16-mixed" on the CPU."""
    with pytest.raises(ValueError, match=f"^precision='{precision}' is not supported") as caught:
        fit(build(), zenflow(), plugins=[plugin()])
    for remedy in (*MODEL_DTYPES, f"strategy='ddp' for '{precision}'"):
        assert remedy in str(caught.value)


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_refused_by_name_too(precision: Any) -> None:
    with pytest.raises(ValueError, match=f"^precision='{precision}' is not supported"):
        fit(build(), zenflow(), precision=precision)


def test_other_precisions_validate() -> None:
    """Nothing is stepped there, so nothing is refused."""
    trainer = make_trainer(zenflow(), precision="64-true")
    with isolated():
        (result,) = trainer.validate(build(), loader(8), verbose=False)
    assert result["val_loss"] > 0.0
