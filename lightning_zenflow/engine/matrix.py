"""One matrix parameter and all that the engine keeps about it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_zenflow._compat import version
from lightning_zenflow.arithmetic import AdamHyper
from lightning_zenflow.device import Columns, Event, HotState
from lightning_zenflow.engine.columns import count_hot, provisional
from lightning_zenflow.engine.window import KeptWindow, Window
from lightning_zenflow.host.arena import MatrixArrays


@dataclass(frozen=True)
class Outstanding:
    """A host update that is not merged yet: the step it was submitted at, and its command.

    ``previews``: its result is extrapolated, so merging it does not show the masters.
    """

    submitted: int
    command: int
    previews: bool


@dataclass(eq=False)
class Matrix:
    """A parameter viewed as ``[rows, cols]``, split by columns into a hot and a cold half.

    Attributes:
        order: its dimensions as they lie in memory, which is the order of its columns.
        index: its place in the arena.
        phase: where its boundaries lie in the window (staggered schedule).
        hot: optimizer state of the hot columns; None if there are none (k = 0).
        arrays: the cold half in the arena.
        window: what the accumulator holds (``mean``).
        kept: the gradients that wait for their replay (``replay``).
        updates: host updates submitted so far (under ``mean`` their bias correction's count).
        steps: steps at which the matrix had a gradient (the count of all other updates).
        accumulated: number of the newest accumulate command (``mean``).
        previewed: the last merge showed a preview; the masters are elsewhere.
        mean_squares: moving mean square of each column's gradient, fp32 ``[cols]`` on the device; None
            where no eager step needs it.
        last_selection: step at which hot columns were chosen last; None before the first time.
        hyper: hyperparameters of the last step taken, which a flush uses.
        version: the parameter's version after our own last change of it.
        merged: after it the last merge is in the parameter; None if compute has waited for it.
        outgoing_read: after it the last merge has read ``arrays.outgoing``; None if an update has
            been ordered behind it.
    """

    name: str
    param: Tensor
    rows: int
    cols: int
    order: tuple[int, ...]
    index: int
    phase: int
    columns: Columns
    hot: HotState | None
    arrays: MatrixArrays
    window: Window = field(default_factory=Window)
    kept: KeptWindow = field(default_factory=KeptWindow)
    outstanding: Outstanding | None = None
    updates: int = 0
    steps: int = 0
    accumulated: int = 0
    last_selection: int | None = None
    hyper: AdamHyper | None = None
    version: int | None = None
    merged: Event | None = None
    outgoing_read: Event | None = None
    previewed: bool = False
    mean_squares: Tensor | None = None

    def mark_changed(self) -> None:
        """The step changes the parameter: autograd must see it, as after any optimizer's step."""
        increment_version(self.param)
        self.remember_version()

    def remember_version(self) -> None:
        """All changes of the parameter up to here were ours, or have been taken into the masters."""
        self.version = version(self.param)

    def check_version(self) -> None:
        """Warn if someone else has changed the parameter in place since."""
        if self.version is not None and version(self.param) != self.version:
            warnings.warn(
                f"parameter {self.name} was changed in place between two optimizer steps. Its masters "
                "live on the host, so the change will be undone, in the cold columns by their next "
                "merge. Call trainer.strategy.engine.reload_masters() after the change (it drops the "
                "open window's gradients), or keep the parameter on the device whole with a "
                f"min_offload_numel above {self.param.numel()}.",
                stacklevel=2,
            )

    @property
    def view(self) -> Tensor:
        """The parameter as ``[rows, cols]``, sharing its memory.

        Made anew each time: users and Lightning may replace ``param.data``. Writes through it do not
        count as versions, as they may be done later, by a queue: see :meth:`mark_changed`.
        """
        return self.param.data.permute(self.order).view(self.rows, self.cols)

    def table(self, tensor: Tensor) -> Tensor:
        """``tensor``, of the parameter's shape, as ``[rows, cols]``; a copy if it lies otherwise in memory."""
        return tensor.permute(self.order).reshape(self.rows, self.cols)

    def shaped(self, table: Tensor) -> Tensor:
        """The opposite of :meth:`table`: a view of the parameter's shape."""
        sizes = [self.param.shape[dim] for dim in self.order]
        return table.view(sizes).permute([self.order.index(dim) for dim in range(len(sizes))])

    def load_masters(self) -> None:
        """Take the parameter's present values as masters of both halves."""
        self.arrays.master.copy_(self.view.index_select(1, self.columns.cold))
        if self.hot is not None and self.hot.master is not None:
            self.hot.master.copy_(self.view.index_select(1, self.columns.hot))
        self.remember_version()


@dataclass(frozen=True)
class MatrixShape:
    """A matrix parameter before the arena exists."""

    name: str
    param: Tensor
    rows: int
    cols: int
    n_hot: int
    order: tuple[int, ...]

    @property
    def n_cold(self) -> int:
        return self.cols - self.n_hot


def matrix_shape(
    name: str, param: Tensor, topk_ratio: float, min_offload_numel: int
) -> MatrixShape | None:
    """How ``param`` is split, or None if all of it stays on the device (dense hot).

    Dense hot are: fewer than two dimensions, fewer than ``min_offload_numel`` elements, all columns
    hot, and two kinds that the host half cannot hold: see :func:`why_on_device`.
    """
    if param.ndim < 2 or param.numel() < max(1, min_offload_numel):
        return None
    rows = param.shape[0]
    cols = param.numel() // rows
    n_hot = count_hot(topk_ratio, cols)
    order = memory_order(param)
    if n_hot == cols or order is None or param.dtype.itemsize > 4:
        return None
    return MatrixShape(name, param, rows, cols, n_hot, order)


def memory_order(param: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None if there are no rows in it.

    Rows lie side by side if the elements do and the first dimension is the outermost: so it is in
    contiguous parameters, and in channels-last convolution weights, whose columns come in another order.
    """
    sizes, strides = param.shape, param.stride()
    # A dimension of one element may have any stride; the first stays first.
    place = {
        dim: -strides[dim] if sizes[dim] > 1 else (-math.inf, 1)[dim > 0]
        for dim in range(param.ndim)
    }
    order = tuple(sorted(range(param.ndim), key=lambda dim: (place[dim], dim)))
    return order if order[0] == 0 and param.permute(order).is_contiguous() else None


def why_on_device(param: Tensor, topk_ratio: float) -> str | None:
    """Why a matrix parameter stays on the device whole although it is large; None if that was asked for."""
    if topk_ratio == 1.0 or param.ndim < 2:
        return None
    if param.dtype.itemsize > 4:
        return f"its dtype {param.dtype} is wider than the fp32 masters on the host"
    if memory_order(param) is None:
        return (
            f"its rows do not lie side by side in memory (shape {tuple(param.shape)}, strides "
            f"{param.stride()}; .contiguous() before the optimizer is built puts them there)"
        )
    cols = param.numel() // param.shape[0]
    return f"all of its {cols} columns are hot at topk_ratio={topk_ratio}"


def build_matrix(
    shape: MatrixShape, index: int, phase: int, arrays: MatrixArrays, *, eager: bool
) -> Matrix:
    """A fresh matrix: provisional hot columns, masters from the parameter, zero moments.

    ``eager``: the device makes an eager step, which needs the columns' mean squares.
    """
    device = shape.param.device
    columns = provisional(shape.n_hot, shape.cols, device)
    hot: HotState | None = None
    if shape.n_hot:

        def state() -> Tensor:
            return torch.zeros(shape.rows, shape.n_hot, dtype=torch.float32, device=device)

        own_master = shape.param.dtype == torch.float32
        hot = HotState(None if own_master else state(), state(), state())
    matrix = Matrix(
        name=shape.name,
        param=shape.param,
        rows=shape.rows,
        cols=shape.cols,
        order=shape.order,
        index=index,
        phase=phase,
        columns=columns,
        hot=hot,
        arrays=arrays,
        mean_squares=torch.zeros(shape.cols, device=device) if eager else None,
    )
    matrix.load_masters()
    return matrix
