"""``Trainer(strategy="zenflow")``: Lightning's DDP strategy with the engine in the optimizer's place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
    rank_zero_warn,
)
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_zenflow.config import DEFAULT_GAIN, ZenFlowConfig
from lightning_zenflow.device import Device, make_device
from lightning_zenflow.engine import (
    HostMemory,
    StallLedger,
    UnsupportedOptimizerError,
    ZenFlowEngine,
)
from lightning_zenflow.facade import OptimizerFacade
from lightning_zenflow.streaming import (
    BucketStream,
    MergeGate,
    weights_are_watched,
    why_retained,
)

if TYPE_CHECKING:
    from lightning_zenflow.callbacks import GradientSyncCallback

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


class _DefaultInterval(int):
    """The default of ``update_interval``, told apart from a 4 that the user wrote.

    ``GradientSyncCallback(every_n_steps=8)`` may replace the default; beside an explicit 4 it is a
    contradiction.
    """


DEFAULT_INTERVAL = _DefaultInterval(4)


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that nothing takes.

    DDPStrategy keeps them for DistributedDataParallel, which is not built for one rank: a misspelt
    ``update_interval`` would train with the default.
    """
    known = {
        name
        for function in (ZenFlowStrategy, DDPStrategy, DistributedDataParallel)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    } - {"module"}
    for name in given.keys() - known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"
        raise TypeError(
            f"ZenFlowStrategy takes no argument {name!r} (given {given[name]!r}); {hint}"
        )


class ZenFlowStrategy(DDPStrategy):
    """Trains with AdamW whose state lies in host memory, without waiting for it.

    Args:
        *args: positional arguments of :class:`~lightning.pytorch.strategies.DDPStrategy`.
        topk_ratio: k, share of each matrix's columns that is hot: updated on the device every step.
        update_interval: S, optimizer steps in a window of the cold columns.
        update_lag: L, steps from a window's end to its merge, 0 to S; None means 1 (0 if S = 1) under
            "replay" and S under "mean".
        select_interval: R, least number of steps between two choices of hot columns; "auto" is 4 S.
        warmup_steps: W, first steps that update everything synchronously, as plain AdamW.
        schedule: "window" ends all windows at the same step, "staggered" spreads them; "auto" is
            staggered under "replay".
        cold_rule: "replay" makes AdamW's own step of each cold gradient, later; "mean", the paper's,
            makes one step of a window's mean.
        preview: under "replay", let the device's cold weights run ahead of what it has been sent.
        preview_gain: how strongly they react to each gradient at once; 1 is as AdamW, 0 not at all.
        min_offload_numel: smaller parameters stay on the device whole.
        cold_lr_scale: factor on the learning rate of host updates (only under "mean").
        num_workers: updater processes of each rank; "auto" is one a physical core, less one.
        threads_per_worker: threads in each; "auto" is 1.
        kernels: device operations: "torch", or "auto" for the best that is available.
        stream_gradients: let gradients leave the device during backward instead of keeping them in
            ``.grad`` until the step: "auto" wherever nothing needs them there, True (an error where
            something does), or False.
        **kwargs: keyword arguments of DDPStrategy and DistributedDataParallel.

    Attributes:
        config: the settings, checked.
        engine: the running engine, None outside of fit.
        ledger: stall times; stays readable after fit.
        host_memory: what the host half took; stays readable after fit.

    Raises:
        TypeError, ValueError: a setting is wrong (named, with value and remedy).
    """

    def __init__(
        self,
        *args: Any,
        topk_ratio: float = 0.1,
        update_interval: int = DEFAULT_INTERVAL,
        update_lag: int | None = None,
        select_interval: int | Literal["auto"] = "auto",
        warmup_steps: int = 0,
        schedule: Literal["auto", "window", "staggered"] = "auto",
        cold_rule: Literal["replay", "mean"] = "replay",
        preview: bool = True,
        preview_gain: float = DEFAULT_GAIN,
        min_offload_numel: int = 65536,
        cold_lr_scale: float = 1.0,
        num_workers: int | Literal["auto"] = "auto",
        threads_per_worker: int | Literal["auto"] = "auto",
        kernels: Literal["auto", "cupy", "torch"] = "auto",
        stream_gradients: Literal["auto"] | bool = False,
        **kwargs: Any,
    ) -> None:
        _check_arguments(kwargs)
        self._interval_is_default = isinstance(update_interval, _DefaultInterval)
        self.config = ZenFlowConfig(
            topk_ratio=topk_ratio,
            update_interval=int(update_interval) if self._interval_is_default else update_interval,
            update_lag=update_lag,
            select_interval=select_interval,
            warmup_steps=warmup_steps,
            schedule=schedule,
            cold_rule=cold_rule,
            preview=preview,
            preview_gain=preview_gain,
            min_offload_numel=min_offload_numel,
            cold_lr_scale=cold_lr_scale,
            num_workers=num_workers,
            threads_per_worker=threads_per_worker,
            kernels=kernels,
            stream_gradients=stream_gradients,
        )
        # DDP's buckets and the gradients share memory: one copy of the gradients instead of two.
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(*args, **kwargs)
        if self._model_averaging_period is not None:
            raise ValueError(
                f"model_averaging_period={self._model_averaging_period!r}: averaging the weights over "
                "ranks behind the engine's back would leave its fp32 masters behind; remove it, or "
                "use strategy='ddp'"
            )
        self.engine: ZenFlowEngine | None = None
        self.ledger = StallLedger()
        self.host_memory = HostMemory(0, 0, 0, {})
        self.retained_because: str | None = None
        self._watched = True
        self._buckets: BucketStream | None = None
        self._gate: MergeGate | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Lightning calls this for its own strategies only; see ``registration.py`` for ours."""

    # -- set-up and end ---------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == "fit":
            self._check_run()
            self._arrange_callbacks(trainer)
            self._decide_streaming(trainer)
        super().setup(trainer)

    def _decide_streaming(self, trainer: pl.Trainer) -> None:
        wanted = self.config.stream_gradients
        ddp_arguments = self._ddp_kwargs if self.world_size > 1 else None
        reason = why_retained(trainer, ddp_arguments)
        if reason is None and self.config.eager_gain > 0.0:
            reason = "the preview's eager step reads them; preview=False does without"
        if reason is None and ddp_arguments is not None and self._ddp_comm_hook is not None:
            reason = "ddp_comm_hook is the user's own"
        if wanted is True and reason is not None:
            raise ValueError(
                f"stream_gradients=True is not possible here: {reason}. Use 'auto' to keep gradients "
                "until the step in such a case, or remove what needs them."
            )
        self.retained_because = "stream_gradients=False" if wanted is False else reason
        self._watched = weights_are_watched(trainer)
        self._buckets = None
        if self.retained_because is None and self.world_size > 1:
            self._buckets = BucketStream()

    def make_device(self) -> Device:
        """The device half of this run; a strategy for another accelerator overrides it."""
        return make_device(self.root_device)

    def configure_ddp(self) -> None:
        """Wrap the model only where there is something to reduce."""
        if self.world_size > 1:
            super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        if self._buckets is None:
            super()._register_ddp_hooks()
            return
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, self._buckets.reduce)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._close_engine()
        self.ledger = StallLedger()
        optimizers = [opt for opt in self.optimizers if opt.param_groups]
        if not optimizers:
            return  # configure_optimizers returned None: nothing will be stepped
        if len(optimizers) > 1:
            raise UnsupportedOptimizerError(
                f"configure_optimizers returned {len(optimizers)} optimizers; strategy='zenflow' "
                "trains with one. Put the parameters into groups of one AdamW, or use strategy='ddp'."
            )
        module = self.lightning_module
        assert module is not None
        self.engine = ZenFlowEngine(
            optimizers[0],
            self.config,
            names={param: name for name, param in module.named_parameters()},
            ledger=self.ledger,
            device=self.make_device(),
            local_rank=self.local_rank,
            local_ranks=self.num_processes,
        )
        self.host_memory = self.engine.host_memory
        if self._buckets is not None:
            self._buckets.engine = self.engine
        if not self.engine.device.queues.direct:
            self._gate = MergeGate(self.engine, module)
        self._stream(self._clip_norm(trainer))
        rank_zero_info(self._describe(self.engine))

    @staticmethod
    def _clip_norm(trainer: pl.Trainer) -> float | None:
        """The norm that the engine has to clip to while streaming; Lightning takes 0 for none, too."""
        value = trainer.gradient_clip_val
        return float(value) if value is not None and value > 0.0 else None

    def _stream(self, clip_norm: float | None) -> None:
        if self.engine is not None and self.retained_because is None:
            self.engine.stream_gradients(clip_norm=clip_norm, free=self._buckets is None)

    def _describe(self, engine: ZenFlowEngine) -> str:
        memory = engine.host_memory
        if engine.pool is None:
            return (
                f"ZenFlow: nothing is offloaded, all {memory.hot_parameters:,} parameters are updated on "
                f"the device (min_offload_numel={self.config.min_offload_numel}, "
                f"topk_ratio={self.config.topk_ratio})"
            )
        return (
            f"ZenFlow: {self.config.describe_rule()}; {memory.cold_parameters:,} cold parameters in {memory.total_bytes / 1e6:,.1f} MB of "
            f"host memory, {memory.hot_parameters:,} hot on the device, "
            f"updater processes: {len(engine.pool.pids)}; gradients "
            + (
                "leave during backward"
                if engine.streaming
                else f"stay until the step ({self.retained_because})"
            )
        )

    def _check_run(self) -> None:
        """Refuse what this version does not do exactly, before anything is built."""
        module = self.lightning_module
        assert module is not None
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not supported by strategy='zenflow' yet; use one of "
                f"{', '.join(PRECISIONS)}, or strategy='ddp' for {precision!r}"
            )
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} sets automatic_optimization=False; strategy='zenflow' does "
                "not support manual optimization yet. Use automatic optimization, or strategy='ddp'."
            )
        for name, child in module.named_modules():
            if isinstance(child, Embedding | EmbeddingBag) and child.weight.requires_grad:
                self._check_embedding(name, child)

    def _check_embedding(self, name: str, child: Embedding | EmbeddingBag) -> None:
        kind = type(child).__name__
        if child.sparse:
            raise UnsupportedOptimizerError(
                f"{kind} {name!r} has sparse=True: AdamW needs dense gradients. "
                "Create it with sparse=False."
            )
        if child.max_norm is not None and child.weight.numel() >= self.config.min_offload_numel:
            raise ValueError(
                f"{kind} {name!r} has max_norm={child.max_norm!r}: its forward pass changes the weight "
                "in place, behind the masters on the host. Set max_norm=None, or keep it on the device "
                f"whole with min_offload_numel={child.weight.numel() + 1}."
            )

    def _arrange_callbacks(self, trainer: pl.Trainer) -> None:
        """One GradientSyncCallback, first of all; one StallMonitor."""
        from lightning_zenflow.callbacks import GradientSyncCallback, StallMonitor  # they import us

        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        syncs = [c for c in callbacks if isinstance(c, GradientSyncCallback)]
        if len(syncs) > 1:
            raise ValueError(
                f"{len(syncs)} GradientSyncCallbacks were given; one decides the update interval: "
                "keep one"
            )
        sync = syncs[0] if syncs else GradientSyncCallback()
        self._adopt_interval(sync)
        # First, so that every other callback's on_train_epoch_end sees flushed weights.
        callbacks[:] = [sync, *(c for c in callbacks if c is not sync)]
        if not any(isinstance(c, StallMonitor) for c in callbacks):
            callbacks.insert(1, StallMonitor())

    def _adopt_interval(self, sync: GradientSyncCallback) -> None:
        every = sync.every_n_steps
        if every is None or every == self.config.update_interval:
            return
        if not self._interval_is_default:
            raise ValueError(
                f"GradientSyncCallback(every_n_steps={every}) contradicts "
                f"update_interval={self.config.update_interval} of ZenFlowStrategy: both set the steps "
                "between two merges. Remove one of them, or give both the same value."
            )
        self.config = self.config.with_update_interval(every)

    def _close_engine(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def teardown(self) -> None:
        """The optimizer gets its state, as DDP leaves it, unless fit was interrupted with work pending."""
        engine = self.engine
        if engine is not None and not engine.pending and not (engine.pool and engine.pool.closed):
            engine.hand_over()
        self._close_engine()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine: processes and shared memory stay where they are (spawn, deepcopy)."""
        return {**self.__dict__, "engine": None, "_gate": None, "_buckets": None}

    # -- the step ---------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.engine is None or optimizer is not self.engine.optimizer:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # Only the precision plugin sees the facade: schedulers, tuners and callbacks that look at
        # trainer.optimizers keep the user's own AdamW.
        facade: Any = OptimizerFacade(self.engine, self._before_step)
        with self._clipping_by_engine(self.engine):
            result = super().optimizer_step(facade, closure, model, **kwargs)
        if self._watched:
            self.engine.await_merges()
        return result

    def _before_step(self) -> None:
        if self._buckets is not None:
            self._buckets.finish()

    @contextmanager
    def _clipping_by_engine(self, engine: ZenFlowEngine) -> Iterator[None]:
        """While gradients stream, Lightning would clip what is left of them: keep it from doing so."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not engine.streaming:
            yield
            return
        given, clip_norm = trainer.gradient_clip_val, self._clip_norm(trainer)
        if clip_norm != engine.clip_norm:  # a callback has changed it
            self._stream(clip_norm)
        trainer.gradient_clip_val = None
        try:
            yield
        finally:
            trainer.gradient_clip_val = given

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._gate is not None:
            self._gate.open()
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.engine is None:
            return
        if self._buckets is not None:
            self._buckets.discard()
        # zero_grad comes before each backward that is not one of several in a step.
        self.engine.discard_gradients()
        if not self.engine.streaming or self._buckets is not None:
            self.engine.release_gradients()

    def release_gradients(self) -> None:
        """Gradients are about to be zeroed or freed: see :meth:`ZenFlowEngine.release_gradients`."""
        if self.engine is not None and not self.engine.streaming:
            self.engine.release_gradients()

    def await_merges(self) -> None:
        """Weights are about to be read: see :meth:`ZenFlowEngine.await_merges`."""
        if self.engine is not None:
            self.engine.await_merges()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.await_merges()
        return super().lightning_module_state_dict()

    def flush(self) -> None:
        """Apply every pending gradient. Does nothing outside of fit."""
        if self.engine is not None:
            self.engine.flush()

    def on_train_start(self) -> None:
        super().on_train_start()
        self.ledger.start_clock()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.await_merges()
        self.ledger.stop_clock()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.engine is not None and self.engine.steps:
            self.ledger.start_clock()

    def on_train_end(self) -> None:
        self.flush()  # also where a tuner has replaced the callbacks
        self.ledger.stop_clock()
        super().on_train_end()

    # -- state ------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that plain AdamW would have; gradients of an open window are not in it."""
        if self.engine is not None and optimizer is self.engine.optimizer:
            return self.engine.state_dict()
        if optimizer.param_groups and not optimizer.state:
            rank_zero_warn(
                "fit ended in the middle of a window and took the optimizer's moments with it: this "
                "checkpoint holds the weights and no optimizer state. Save during fit, e.g. "
                "ModelCheckpoint(save_last=True) or OnExceptionCheckpoint."
            )
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.engine is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers, this run has one: it was "
                "saved by another training setup. Load the weights only "
                "(LightningModule.load_from_checkpoint)."
            )
        self.engine.load_state_dict(states[0])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        if self.engine is not None:  # in the middle of fit, e.g. by a tuner
            self.engine.reload_masters()
