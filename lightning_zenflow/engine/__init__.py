"""The engine: one step in order, on torch alone. Knows nothing of Lightning."""

from lightning_zenflow.engine.engine import ZenFlowEngine
from lightning_zenflow.engine.hyper import UnsupportedOptimizerError
from lightning_zenflow.engine.ledger import LedgerSummary, StallLedger, StepRecord
from lightning_zenflow.engine.setup import HostMemory

__all__ = [
    "HostMemory",
    "LedgerSummary",
    "StallLedger",
    "StepRecord",
    "UnsupportedOptimizerError",
    "ZenFlowEngine",
]
