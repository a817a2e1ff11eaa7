"""The optimizer's state in the form that plain AdamW has it, out of both halves and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.engine.cold import ColdHalf
from lightning_zenflow.engine.hyper import read_hyper
from lightning_zenflow.engine.matrix import Matrix

if TYPE_CHECKING:
    from lightning_zenflow.engine.engine import ZenFlowEngine


def export_state(engine: ZenFlowEngine) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` would hold had plain AdamW trained the model.

    Moments are fp32, those of cold columns as :meth:`~.cold.ColdHalf.moments` says. Nothing is flushed:
    under ``mean`` the gradients of an open window are not in it.
    """
    engine.synchronize()
    exported: dict[str, Any] = engine.optimizer.state_dict()
    index = 0
    for group in engine.optimizer.param_groups:
        hyper = read_hyper(group)
        for param in group["params"]:
            state = _export_param(engine, param, hyper)
            if state is not None:
                exported["state"][index] = state
            index += 1
    return exported


def hand_over(engine: ZenFlowEngine) -> None:
    """Put the state into the optimizer itself, as plain AdamW would hold it, matrix by matrix.

    The arena's pages go as they are read, so this takes no more than one matrix on top of them.
    """
    engine.synchronize()
    for group in engine.optimizer.param_groups:
        hyper = read_hyper(group)
        for param in group["params"]:
            state = _export_param(engine, param, hyper)
            if state is not None:
                engine.optimizer.state[param] = state
            matrix = engine.matrix_of(param)
            if matrix is not None and engine.pool is not None:
                engine.pool.arena.discard(matrix.index)


def _export_param(
    engine: ZenFlowEngine, param: Tensor, hyper: AdamHyper
) -> dict[str, Tensor] | None:
    matrix = engine.matrix_of(param)
    if matrix is not None:
        if matrix.steps == 0:
            return None
        steps = matrix.steps
        moments = _join_moments(matrix, engine.cold, matrix.hyper or hyper)
    else:
        dense = engine.dense.states.get(param)
        if dense is None:
            return None
        steps, moments = dense.steps, (dense.exp_avg.clone(), dense.exp_avg_sq.clone())
    step = torch.tensor(float(steps), dtype=torch.float32)
    return {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}


def _join_moments(matrix: Matrix, cold: ColdHalf, hyper: AdamHyper) -> tuple[Tensor, Tensor]:
    hot = matrix.hot
    joined = []
    for hot_side, cold_side in zip(
        (None, None) if hot is None else (hot.exp_avg, hot.exp_avg_sq),
        cold.moments(matrix, hyper),
        strict=True,
    ):
        whole = torch.empty(matrix.rows, matrix.cols, dtype=torch.float32)
        whole[:, matrix.columns.cold.cpu()] = cold_side
        if hot_side is not None:
            whole[:, matrix.columns.hot.cpu()] = hot_side.cpu()
        joined.append(matrix.shaped(whole))
    return joined[0], joined[1]


def import_state(engine: ZenFlowEngine, state_dict: dict[str, Any]) -> None:
    """Continue from what plain AdamW, or :func:`export_state`, has saved.

    Hyperparameters of the groups are restored, moments split over the halves, counters set; what was
    there before is forgotten, and hot columns are chosen anew at the next step.

    Raises:
        ValueError: the state does not fit the optimizer's parameters; names the parameter. Nothing has
            been changed then.
    """
    params = [p for group in engine.optimizer.param_groups for p in group["params"]]
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    states = {
        param: state_dict["state"][number]
        for param, number in zip(params, saved, strict=False)  # torch refuses unequal groups below
        if number in state_dict["state"]
    }
    for param, state in states.items():
        _check_shapes(engine.name_of(param), param, state)
    # Groups only: loading the state itself would cast it to 16 bits and put it on the device.
    engine.optimizer.load_state_dict({**state_dict, "state": {}})
    engine.reload_masters()
    _forget(engine)
    for param, state in states.items():
        _import_param(engine, param, state)


def _forget(engine: ZenFlowEngine) -> None:
    """No steps taken, no moments: a parameter that the state does not mention starts anew."""
    engine.steps = 0
    engine.dense.states.clear()
    for matrix in engine.matrices:
        if matrix.steps == 0:
            continue  # all zero already; do not touch pages that nothing has needed yet
        matrix.steps = matrix.updates = 0
        matrix.last_selection = None
        for side in (matrix.arrays, matrix.hot):
            if side is not None:
                side.exp_avg.zero_()
                side.exp_avg_sq.zero_()
        if matrix.mean_squares is not None:
            matrix.mean_squares.zero_()


def _check_shapes(name: str, param: Tensor, state: dict[str, Any]) -> None:
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if key not in state:
            raise ValueError(
                f"the saved optimizer state of parameter {name} has no {key!r} (it has "
                f"{sorted(state)}): it was not saved by Adam or AdamW. Load the weights only."
            )
    for key in ("exp_avg", "exp_avg_sq"):
        if state[key].shape != param.shape:
            raise ValueError(
                f"the saved {key} of parameter {name} has shape {tuple(state[key].shape)}, the "
                f"parameter {tuple(param.shape)}: the checkpoint is of another model."
            )


def _import_param(engine: ZenFlowEngine, param: Tensor, state: dict[str, Any]) -> None:
    steps = int(state["step"])
    engine.steps = max(engine.steps, steps)
    matrix = engine.matrix_of(param)
    if matrix is None:
        dense = engine.dense.state(param)
        dense.steps = steps
        dense.exp_avg.copy_(state["exp_avg"])
        dense.exp_avg_sq.copy_(state["exp_avg_sq"])
        return
    matrix.steps = matrix.updates = steps  # one count for both sides: no rescaling needed
    for key in ("exp_avg", "exp_avg_sq"):
        whole = matrix.table(state[key].to("cpu", torch.float32))
        getattr(matrix.arrays, key).copy_(whole.index_select(1, matrix.columns.cold.cpu()))
        if matrix.hot is not None:
            getattr(matrix.hot, key).copy_(whole.index_select(1, matrix.columns.hot.cpu()))
    if matrix.mean_squares is not None:
        # The second moment is the same moving average, element by element.
        matrix.mean_squares.copy_(whole.mean(dim=0))
