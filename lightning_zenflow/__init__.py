"""Stall-free optimizer offloading for PyTorch Lightning: ``Trainer(strategy="zenflow")``.

Importing this package registers the strategy's names with Lightning, whichever of the two is imported
first. It imports neither torch nor Lightning itself: public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zenflow._autoload import install as _install

if TYPE_CHECKING:
    from lightning_zenflow.callbacks import GradientSyncCallback, StallMonitor
    from lightning_zenflow.config import ZenFlowConfig
    from lightning_zenflow.engine import StallLedger, UnsupportedOptimizerError, ZenFlowEngine
    from lightning_zenflow.host.pool import WorkerDied
    from lightning_zenflow.progress import ZenFlowProgressBar
    from lightning_zenflow.strategy import ZenFlowStrategy

__version__ = "0.1.0"

_HOMES = {
    "GradientSyncCallback": "callbacks",
    "StallLedger": "engine",
    "StallMonitor": "callbacks",
    "UnsupportedOptimizerError": "engine",
    "WorkerDied": "host.pool",
    "ZenFlowConfig": "config",
    "ZenFlowEngine": "engine",
    "ZenFlowProgressBar": "progress",
    "ZenFlowStrategy": "strategy",
}

__all__ = [
    "GradientSyncCallback",
    "StallLedger",
    "StallMonitor",
    "UnsupportedOptimizerError",
    "WorkerDied",
    "ZenFlowConfig",
    "ZenFlowEngine",
    "ZenFlowProgressBar",
    "ZenFlowStrategy",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


_install()
