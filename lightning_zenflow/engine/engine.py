"""One optimizer step in order: merge, select, hot update, send, preview, submit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.device import Device, EagerStep, Event, make_device
from lightning_zenflow.engine.cold import ColdHalf
from lightning_zenflow.engine.columns import apply_swap
from lightning_zenflow.engine.dense import DenseHot
from lightning_zenflow.engine.hot import update_hot
from lightning_zenflow.engine.hyper import (
    check_gradient,
    check_optimizer,
    read_hyper,
    refuse_direct_step,
)
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import Matrix, build_matrix
from lightning_zenflow.engine.migration import migrate, plan
from lightning_zenflow.engine.schedule import Schedule, deal_phases
from lightning_zenflow.engine.setup import (
    find_matrices,
    host_spec,
    make_cold,
    measure_memory,
    warn_of_kept,
)
from lightning_zenflow.engine.state import export_state, hand_over, import_state
from lightning_zenflow.engine.stream import Arrival, GradientStream
from lightning_zenflow.host.layout import HostSpec
from lightning_zenflow.host.pool import UpdaterPool
from lightning_zenflow.host.topology import place_workers

PREVIEW_LIMIT = 10.0  # an eager step is at most so many times the gradient's usual size


class ZenFlowEngine:
    """Replaces ``optimizer.step()`` of an Adam or AdamW by the two halves of ZenFlow.

    The optimizer object keeps its role: learning rates and other hyperparameters are read from its
    ``param_groups`` at every step. Its ``state`` stays empty, and its own ``step`` is refused until
    the engine is closed.

    Args:
        optimizer: ``torch.optim.AdamW`` or ``Adam``; its parameters are on their final device.
        config: the settings.
        names: names of parameters, for messages; unnamed ones are numbered.
        ledger: where stalls are written; a new one by default.
        device: the device half; by default the one for the parameters' device. Closed with the engine.
        local_rank, local_ranks: this rank among those that share the machine's cores.
        make_pool: what runs the host half; worker processes by default.
        delay_us: upper bound of random sleeps in the workers, for tests of the protocol.

    Raises:
        UnsupportedOptimizerError: an optimizer, option or parameter that cannot be offloaded.
        OSError: the host arena could not be made.
        WorkerDied: a worker did not start; from ``step`` and ``flush``: a worker has died.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: ZenFlowConfig,
        *,
        names: Mapping[Tensor, str] | None = None,
        ledger: StallLedger | None = None,
        device: Device | None = None,
        local_rank: int = 0,
        local_ranks: int = 1,
        make_pool: Callable[[HostSpec], UpdaterPool] = UpdaterPool,
        delay_us: int = 0,
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.config = config
        self.ledger = ledger if ledger is not None else StallLedger()
        self.schedule = Schedule.from_config(config)
        self.steps = 0
        self._closed = False
        self.dense = DenseHot()
        self._names = dict(names or {})
        self._hypers: list[AdamHyper] = []
        self.pool: UpdaterPool | None = None
        self._cold: ColdHalf | None = None
        self.matrices: list[Matrix] = []
        params = self._trainable()
        for number, param in enumerate(params):
            self._names.setdefault(param, f"#{number}")
        shapes, self.kept_on_device = find_matrices({p: self._names[p] for p in params}, config)
        if local_rank == 0:
            warn_of_kept(self.kept_on_device)
        self.device = device if device is not None else self._make_device()
        self._stream: GradientStream | None = None
        if shapes:
            phases = deal_phases(
                [s.rows * s.n_cold for s in shapes], config.update_interval, config.staggered
            )
            placement = place_workers(
                config.num_workers,
                config.threads_per_worker,
                local_rank=local_rank,
                local_ranks=local_ranks,
            )
            self.pool = make_pool(host_spec(config, shapes, phases, placement, delay_us))
            self.device.queues.pin(self.pool.arena.address, self.pool.arena.layout.total_bytes)
            self._cold = make_cold(config, self.pool, self.device, self.ledger)
            self.matrices = [
                build_matrix(shape, index, phases[index], arrays, eager=config.eager_gain > 0.0)
                for index, (shape, arrays) in enumerate(
                    zip(shapes, self.pool.arena.matrices, strict=True)
                )
            ]
        self._by_param: dict[Tensor, Matrix] = {m.param: m for m in self.matrices}
        self.host_memory = measure_memory(self.pool, sum(p.numel() for p in params))
        self._guard = optimizer.register_step_pre_hook(refuse_direct_step)

    # -- set-up -----------------------------------------------------------------------------------

    def _trainable(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _make_device(self) -> Device:
        devices = sorted({str(p.device) for p in self._trainable()}) or ["cpu"]
        if len(devices) > 1:
            raise ValueError(
                f"the parameters are on several devices ({', '.join(devices)}); one engine serves one "
                "device: move the model to one, or give each device's parameters an optimizer and an "
                "engine of their own"
            )
        return make_device(torch.device(devices[0]))

    # -- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """One optimizer step with the gradients that were streamed, and ``.grad`` of all others.

        Gradients must be final: averaged over ranks, unscaled, clipped (unless the stream clips).
        Parameters without gradient are skipped by both halves.
        """
        self._require_open()
        self.ledger.start_clock()
        if self.pool is not None:
            self.pool.check()
        if self._stream is None:
            self.device.release_gradients(discard=False)  # the last step's
        step = self.steps + 1
        arrivals = self._stream.arrivals if self._stream is not None else {}
        factor = self._clip_factor(arrivals)
        slot = -1
        if factor is not None and self._cold is not None:
            slot = self._cold.send_factor(factor, step)
        now = self.device.now()
        self._hypers = [read_hyper(group) for group in self.optimizer.param_groups]
        for group, hyper in zip(self.optimizer.param_groups, self._hypers, strict=True):
            dense = []
            for param in group["params"]:
                matrix = self._by_param.get(param)
                if matrix is not None:
                    matrix.hyper = hyper
                    arrival = arrivals.get(matrix)
                    if arrival is not None or param.grad is not None:
                        self._step_matrix(matrix, arrival, step, hyper, now, factor, slot)
                    elif self.schedule.is_boundary(step, matrix.phase):
                        self.cold.miss(matrix, step, now)
                elif param.grad is not None:
                    check_gradient(self.name_of(param), param.grad)
                    dense.append((param, param.grad))
            if dense:
                self.device.on_compute(partial(self.dense.update, dense, hyper, factor))
        arrivals.clear()
        self.steps = step
        self._finish_step(step)

    def _clip_factor(self, arrivals: Mapping[Matrix, Arrival]) -> Tensor | None:
        """The clip factor, if the stream clips: over what was streamed and what was not."""
        if self._stream is None or self._stream.clip_norm is None:
            return None
        retained = [
            param.grad
            for param in self._trainable()
            if param.grad is not None and self._by_param.get(param) not in arrivals
        ]
        return self._stream.factor(retained)

    def _step_matrix(
        self,
        matrix: Matrix,
        arrival: Arrival | None,
        step: int,
        hyper: AdamHyper,
        now: Event,
        factor: Tensor | None,
        factor_slot: int,
    ) -> None:
        """The parts of one step of one matrix (design: one step)."""
        cold = self.cold
        matrix.check_version()
        if matrix.outstanding and self.schedule.merge_due(step, matrix.outstanding.submitted):
            cold.merge(matrix, now)
        grad = None
        if arrival is None:
            grad = self._flat_gradient(matrix)
            arrival = self._arrive(matrix, grad, now)
        carried = None
        if arrival.selected:
            matrix.last_selection = step
        if arrival.swap is not None:
            cold.await_merge(matrix)
            carried = migrate(matrix, arrival.swap, arrival.columns, hyper, self.device, cold)
        update_hot(matrix, arrival.hot_grad, factor, hyper, carried, self.device)
        cold.accept(matrix, hyper, factor_slot)
        if matrix.mean_squares is not None and grad is not None:
            self._preview(matrix, grad, matrix.mean_squares, step, hyper)
        if self.schedule.warming_up(step):
            cold.submit(matrix, step, "warm-up")
        elif self.schedule.is_boundary(step, matrix.phase):
            cold.submit(matrix, step, "boundary")
        matrix.mark_changed()

    def _preview(
        self, matrix: Matrix, grad: Tensor, mean_squares: Tensor, step: int, hyper: AdamHyper
    ) -> None:
        """The device's cold columns react to this step's gradient at once (design: preview)."""
        self.device.track_squares(grad, mean_squares, hyper.beta2)
        if self.schedule.warming_up(step):
            return  # the step's own update is merged before it returns
        eager = EagerStep(
            size=self.config.eager_gain * (1.0 - hyper.beta1) * hyper.lr,
            correction=1.0 - hyper.beta2**matrix.steps,
            eps=hyper.eps,
            limit=PREVIEW_LIMIT,
        )
        matrix.merged = self.device.preview(
            matrix.view, matrix.columns, grad, mean_squares, eager, matrix.merged
        )

    def _flat_gradient(self, matrix: Matrix) -> Tensor:
        grad = matrix.param.grad
        assert grad is not None
        check_gradient(matrix.name, grad)
        return matrix.table(grad).contiguous()

    def _arrive(self, matrix: Matrix, grad: Tensor, ready: Event) -> Arrival:
        """Split the coming step's gradient ``[rows, cols]`` and send its cold half.

        Changes nothing but the staging. If a selection is due, the split is by the columns that it
        chooses.
        """
        columns, swap = matrix.columns, None
        due = self.schedule.selection_due(self.steps + 1, matrix.phase, matrix.last_selection)
        if due:
            swap = plan(matrix, grad, self.device)
            if swap is not None:
                columns = apply_swap(columns, swap)
        hot_grad = None if matrix.hot is None else self.device.split_hot(grad, columns)
        self.cold.send(matrix, columns, grad, ready)
        return Arrival(hot_grad, columns, swap, due)

    def _finish_step(self, step: int) -> None:
        if self._cold is None or self.pool is None:
            self.ledger.close_step(step, 0.0)
            return
        self._cold.wake()
        if self.schedule.warming_up(step) or self.schedule.lag == 0:
            now = self.device.now()  # behind the eager steps, which the merge replaces
            for matrix in self.matrices:
                self._cold.merge(matrix, now)
            self.await_merges()
        self.ledger.close_step(step, self.pool.busy_seconds())

    # -- what others have to say ------------------------------------------------------------------

    def await_merges(self, matrices: Iterable[Matrix] | None = None) -> None:
        """The parameters (of ``matrices``, or all) are about to be used on the device.

        A merge may still be under way when ``step`` returns, so that it overlaps the next forward up
        to the parameter's first use. On the CPU it never is, and this does nothing.
        """
        if self._cold is not None:
            for matrix in self.matrices if matrices is None else matrices:
                self._cold.await_merge(matrix)

    def release_gradients(self) -> None:
        """The gradients of the last step are about to be overwritten in place.

        Needed before the next backward where gradients keep their memory (DDP's buckets,
        ``zero_grad(set_to_none=False)``): their cold half may still be leaving.
        """
        with self.ledger.stall("copy"):
            self.device.release_gradients(discard=True)

    def stream_gradients(self, *, clip_norm: float | None = None, free: bool = True) -> None:
        """From now on gradients of matrices leave during backward, and their memory is freed.

        Each step must then consist of one backward and one :meth:`step`; ``.grad`` of a matrix is None
        after backward. To skip a step call :meth:`discard_gradients`.

        Args:
            clip_norm: clip all gradients together to this 2-norm, as ``clip_grad_norm_`` does; the
                factor is applied by :meth:`step`.
            free: False if the gradients are handed to :meth:`take_gradient` by the caller instead of
                by hooks on the parameters, and keep their memory.

        Raises:
            ValueError: ``clip_norm`` is not above 0, or the preview needs gradients at the step.
        """
        self._require_open()
        if self.config.eager_gain > 0.0:
            raise ValueError(
                "gradients cannot leave during backward in this version while the preview's eager step "
                f"reads them at the step (preview_gain={self.config.preview_gain!r}); set preview=False, "
                'or cold_rule="mean", or keep gradients until the step'
            )
        if clip_norm is not None and not clip_norm > 0.0:
            raise ValueError(f"clip_norm must be above 0, got {clip_norm!r}; None is no clipping")
        self.retain_gradients()
        self._stream = GradientStream(
            self.matrices,
            self.device,
            self._arrive,
            lambda matrix: self.cold.sent(matrix),
            clip_norm=clip_norm,
            free=free,
        )

    def retain_gradients(self) -> None:
        """From now on gradients stay in ``.grad`` until the step, which is the default."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @property
    def streaming(self) -> bool:
        """Whether gradients leave during backward."""
        return self._stream is not None

    @property
    def clip_norm(self) -> float | None:
        """The norm that :meth:`stream_gradients` was given, None also if gradients are retained."""
        return self._stream.clip_norm if self._stream is not None else None

    def take_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Take the final gradient of ``param`` while backward goes on (``stream_gradients(free=False)``).

        Parameters that are not matrices are left for the step.
        """
        matrix = self._by_param.get(param)
        if self._stream is not None and matrix is not None:
            self._stream.take(matrix, grad)

    def discard_gradients(self) -> None:
        """Forget the gradients streamed since the last step, as ``zero_grad`` does with ``.grad``."""
        if self._stream is not None:
            self._stream.discard()

    # -- checks -----------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; build a new ZenFlowEngine to go on training")

    @property
    def cold(self) -> ColdHalf:
        """The cold half.

        Raises:
            RuntimeError: the engine is closed, or no parameter has cold columns.
        """
        self._require_open()
        if self._cold is None:
            raise RuntimeError("there is no host half: no parameter has cold columns")
        return self._cold

    # -- flush, reload, end -----------------------------------------------------------------------

    @torch.no_grad()
    def flush(self) -> None:
        """Merge the outstanding updates, submit what is pending, merge that too.

        Afterwards no gradient is pending anywhere, and the device holds the masters. The window grid
        does not move.
        """
        self._require_open()
        cold, pool = self._cold, self.pool
        if cold is None or pool is None:
            return
        due = [matrix for matrix in self.matrices if cold.pending(matrix)]
        if not due:
            return
        pool.check()
        now = self.device.now()
        for matrix in due:
            cold.merge(matrix, now, cause="flush")
        for matrix in due:
            cold.submit(matrix, self.steps, "flush")
        cold.wake()
        for matrix in due:
            cold.merge(matrix, now, cause="flush")
            matrix.mark_changed()
        self.await_merges()
        self.ledger.close_flush(self.steps, pool.busy_seconds())

    @torch.no_grad()
    def reload_masters(self) -> None:
        """The parameters have been given new values: make them the masters, drop what is pending."""
        self._require_open()
        self.discard_gradients()
        self.synchronize()
        for matrix in self.matrices:
            self.cold.forget(matrix)
            matrix.load_masters()
        self.dense.load_masters()

    def matrix_of(self, param: Tensor) -> Matrix | None:
        """The matrix whose parameter ``param`` is; None if it is dense hot."""
        return self._by_param.get(param)

    def name_of(self, param: Tensor) -> str:
        """The parameter's name, for messages."""
        return self._names.get(param, "(added later)")

    def synchronize(self) -> None:
        """Wait until device and workers have done all that was asked of them; merges nothing."""
        self._require_open()
        self.await_merges()
        for matrix in self.matrices:
            self.cold.settle(matrix)
        self.device.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain AdamW would have it; see :func:`~.state.export_state`."""
        self._require_open()
        return export_state(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of plain AdamW's form; see :func:`~.state.import_state`."""
        self._require_open()
        import_state(self, state_dict)

    @property
    def pending(self) -> bool:
        """Whether a flush has anything to do."""
        cold = self._cold
        return cold is not None and any(cold.pending(matrix) for matrix in self.matrices)

    def hand_over(self) -> None:
        """Put AdamW's state into the optimizer itself, then close: what training leaves behind.

        The optimizer then is as if it had made all steps; its moments are fp32 and on the CPU.

        Raises:
            RuntimeError: something is pending (flush first), or the engine is closed.
        """
        self._require_open()
        if self.pending:
            raise RuntimeError("updates are pending; call flush() before hand_over()")
        hand_over(self)
        self.close()

    def close(self) -> None:
        """Stop the workers and give the host memory back. Pending work is dropped; flush first."""
        self._closed = True
        self._guard.remove()
        self.retain_gradients()
        self.device.close()
        self._by_param = {}
        self.matrices = []
        self._cold = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
