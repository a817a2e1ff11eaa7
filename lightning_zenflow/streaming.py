"""When gradients may leave during backward under Lightning, and when weights must be whole.

Streaming needs that nobody else looks at ``.grad`` between backward and the step. A merge may overlap the
next forward only if nobody looks at the weights in between. Both are decided here, before fit, from
what the module and the callbacks override.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.hooks import RemovableHandle

from lightning_zenflow.engine import ZenFlowEngine

if TYPE_CHECKING:
    from lightning_zenflow.engine.matrix import Matrix

# Hooks that are given gradients, or may change or need them.
_MODULE_GRADIENT_HOOKS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
)
_CALLBACK_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# Hooks between a step and the next forward, which may read weights.
_WEIGHT_HOOKS = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
_MODULE_WEIGHT_HOOKS = (*_WEIGHT_HOOKS, "optimizer_step", "lr_scheduler_step")
# Lightning's callbacks that read weights nowhere, or only through the strategy (saving).
_BLIND_CALLBACKS = (
    pl_callbacks.DeviceStatsMonitor,
    pl_callbacks.EarlyStopping,
    pl_callbacks.GradientAccumulationScheduler,
    pl_callbacks.LearningRateMonitor,
    pl_callbacks.ModelCheckpoint,
    pl_callbacks.ModelSummary,
    pl_callbacks.RichModelSummary,
    pl_callbacks.RichProgressBar,
    pl_callbacks.TQDMProgressBar,
    pl_callbacks.ThroughputMonitor,
    pl_callbacks.Timer,
)


def _ours(callback: Callback) -> bool:
    return type(callback).__module__.startswith("lightning_zenflow.")


def why_retained(trainer: pl.Trainer, ddp_arguments: dict[str, Any] | None) -> str | None:
    """Why gradients have to stay in ``.grad`` until the step; None if they may leave during backward.

    ``ddp_arguments`` are those of DistributedDataParallel, None with one rank.
    """
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(c, pl_callbacks.GradientAccumulationScheduler) for c in callbacks):
        return "a GradientAccumulationScheduler is used"
    if trainer.gradient_clip_val and _algorithm(trainer) == "value":
        return "gradient_clip_algorithm='value' needs whole gradients"
    if getattr(trainer.strategy.precision_plugin, "scaler", None) is not None:
        return "the gradient scaler needs whole gradients"
    module = trainer.lightning_module
    for hook in _MODULE_GRADIENT_HOOKS:
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook} may need gradients"
    for callback in callbacks:
        for hook in _CALLBACK_GRADIENT_HOOKS:
            if not _ours(callback) and is_overridden(hook, callback, parent=Callback):
                return f"{type(callback).__name__}.{hook} may need gradients"
    for option in ("find_unused_parameters", "static_graph"):
        if ddp_arguments and ddp_arguments.get(option):
            return f"{option}=True hides which parameters had no gradient"
    return None


def _algorithm(trainer: pl.Trainer) -> str:
    return str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm))


def weights_are_watched(trainer: pl.Trainer) -> bool:
    """Whether module or callbacks may read weights between a step and the next forward."""
    if any(is_overridden(hook, trainer.lightning_module) for hook in _MODULE_WEIGHT_HOOKS):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        is_overridden(hook, callback, parent=Callback)
        for callback in callbacks
        if not _ours(callback) and type(callback) not in _BLIND_CALLBACKS
        for hook in _WEIGHT_HOOKS
    )


def find_units(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks whose parameters are used by their own forward only: elements of module lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        elif isinstance(child, nn.ModuleDict):
            yield from child.values()
        else:
            yield from find_units(child)


class MergeGate:
    """Lets a merge overlap the next forward, up to the block that uses the parameter.

    Blocks are the elements of ModuleLists and Sequentials: each waits for its own parameters right
    before its forward. All other parameters are waited for when the training step begins, because
    their use cannot be seen (a tied output layer, a functional call).
    """

    def __init__(self, engine: ZenFlowEngine, module: nn.Module) -> None:
        self._engine = engine
        self._handles: list[RemovableHandle] = []
        units = [(unit, _matrices(engine, unit.parameters())) for unit in find_units(module)]
        within = {id(param) for unit, _ in units for param in unit.parameters()}
        # named_parameters leaves repetitions out: a shared parameter must not be missed outside.
        outside = _owned_outside(module, {id(unit) for unit, _ in units})
        self._early = [
            m for m in engine.matrices if id(m.param) not in within or id(m.param) in outside
        ]
        for unit, matrices in units:
            if matrices:
                hook = _gate(engine, matrices)
                self._handles.append(unit.register_forward_pre_hook(hook))

    def open(self) -> None:
        """The training step begins."""
        self._engine.await_merges(self._early)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _gate(engine: ZenFlowEngine, matrices: Sequence[Matrix]) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        engine.await_merges(matrices)

    return hook


def _matrices(engine: ZenFlowEngine, params: Iterator[nn.Parameter]) -> list[Matrix]:
    found = (engine.matrix_of(param) for param in params)
    return [matrix for matrix in found if matrix is not None]


def _owned_outside(module: nn.Module, units: set[int]) -> set[int]:
    """Parameters that a module outside of the units holds itself."""
    if id(module) in units:
        return set()
    own = {id(param) for param in module.parameters(recurse=False)}
    return own.union(*(_owned_outside(child, units) for child in module.children()))


class BucketStream:
    """DDP's communication hook: reduces a bucket, then hands its gradients to the engine.

    Everything is done in the thread that runs backward. A bucket is taken at the next bucket's turn, or
    by :meth:`finish`, so that its reduction has the time of a bucket to end.
    """

    def __init__(self) -> None:
        self.engine: ZenFlowEngine | None = None
        self._open: list[tuple[list[Tensor], list[Tensor], torch.futures.Future[Tensor]]] = []

    def reduce(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """For ``DistributedDataParallel.register_comm_hook``."""
        self._take(wait=False)
        future = default_hooks.allreduce_hook(state, bucket)
        self._open.append((bucket.parameters(), bucket.gradients(), future))
        return future

    def discard(self) -> None:
        """Forget buckets of a backward that has not ended."""
        self._open.clear()

    def finish(self) -> None:
        """Take what is left; backward has ended."""
        self._take(wait=True)

    def _take(self, wait: bool) -> None:
        while self._open:
            params, grads, future = self._open[0]
            # On CUDA wait() only orders the current stream behind the reduction.
            if not (wait or grads[0].is_cuda or future.done()):
                return
            future.wait()
            del self._open[0]
            if self.engine is not None:
                for param, grad in zip(params, grads, strict=True):
                    self.engine.take_gradient(param, grad)
