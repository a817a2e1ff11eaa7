"""Before the first step: which parameters are offloaded, how the host half is laid out, which rule runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zenflow.config import ZenFlowConfig
from lightning_zenflow.device import Device
from lightning_zenflow.engine.cold import ColdHalf
from lightning_zenflow.engine.hyper import check_parameter
from lightning_zenflow.engine.ledger import StallLedger
from lightning_zenflow.engine.matrix import MatrixShape, matrix_shape, why_on_device
from lightning_zenflow.engine.mean import MeanHalf
from lightning_zenflow.engine.replay import ReplayHalf
from lightning_zenflow.host.blocks import BlockPlan, plan_blocks
from lightning_zenflow.host.layout import HostMatrix, HostSpec, dtype_name
from lightning_zenflow.host.pool import UpdaterPool
from lightning_zenflow.host.topology import Placement

LARGE = 4096  # elements from which a matrix that is not offloaded is worth a word


@dataclass(frozen=True)
class HostMemory:
    """What the host half takes, as the engine laid it out.

    ``total_bytes`` is the size of the arena; ``overheads`` are its parts beyond the budget per cold
    parameter (control area, per-column factors, padding).
    """

    total_bytes: int
    cold_parameters: int
    hot_parameters: int
    overheads: dict[str, int]

    @property
    def bytes_per_cold_parameter(self) -> float:
        """Arena bytes for each cold parameter, overheads included; 0 without cold parameters."""
        return self.total_bytes / self.cold_parameters if self.cold_parameters else 0.0


def find_matrices(
    names: Mapping[Tensor, str], config: ZenFlowConfig
) -> tuple[list[MatrixShape], dict[str, str]]:
    """The parameters (with their names) that are offloaded; and by name why others, large, are not.

    Raises:
        UnsupportedOptimizerError: a parameter that Adam here does not cover.
    """
    shapes, kept = [], {}
    for param, name in names.items():
        check_parameter(name, param)
        shape = matrix_shape(name, param, config.topk_ratio, config.min_offload_numel)
        if shape is not None:
            shapes.append(shape)
        elif param.numel() >= max(config.min_offload_numel, LARGE):
            reason = why_on_device(param, config.topk_ratio)
            if reason is not None:
                kept[name] = reason
    return shapes, kept


def warn_of_kept(kept: Mapping[str, str]) -> None:
    """One warning that names the large parameters which stay on the device, and why."""
    if kept:
        found = "; ".join(f"{name}: {reason}" for name, reason in kept.items())
        warnings.warn(
            f"these parameters are large and are updated whole on the device all the same: {found}",
            stacklevel=3,
        )


def host_spec(
    config: ZenFlowConfig,
    shapes: Sequence[MatrixShape],
    phases: Sequence[int],
    placement: Placement,
    delay_us: int,
) -> HostSpec:
    """What the workers have to know."""
    matrices = [HostMatrix(s.rows, s.n_cold, dtype_name(s.param.dtype)) for s in shapes]
    blocks = BlockPlan(0, 0)
    if config.cold_rule == "replay":
        blocks = plan_blocks(
            matrices,
            phases,
            interval=config.update_interval,
            lag=config.lag,
            chunk_elements=config.chunk_elements,
        )
    return HostSpec(
        matrices=matrices,
        workers=placement.workers,
        threads=placement.threads,
        chunk_elements=config.chunk_elements,
        rule=config.cold_rule,
        window=config.update_interval,
        block_bytes=blocks.nbytes,
        blocks=blocks.count,
        looks_ahead=config.horizon > 0,
        affinity=placement.affinity,
        delay_us=delay_us,
    )


def make_cold(
    config: ZenFlowConfig, pool: UpdaterPool, device: Device, ledger: StallLedger
) -> ColdHalf:
    """The cold half under the configured rule."""
    if config.cold_rule == "replay":
        return ReplayHalf(pool, device, ledger, config.horizon)
    return MeanHalf(pool, device, ledger, config.cold_lr_scale)


def measure_memory(pool: UpdaterPool | None, parameters: int) -> HostMemory:
    """What the arena takes, for ``parameters`` trainable ones in all."""
    if pool is None:
        return HostMemory(0, 0, parameters, {})
    layout = pool.arena.layout
    return HostMemory(
        total_bytes=layout.total_bytes,
        cold_parameters=layout.cold_elements,
        hot_parameters=parameters - layout.cold_elements,
        overheads=dict(layout.overheads()),
    )
