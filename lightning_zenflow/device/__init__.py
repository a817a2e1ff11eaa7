"""The device half's operations: their order, their queues and their arithmetic."""

from lightning_zenflow.device.base import (
    Columns,
    EagerStep,
    Event,
    HotState,
    Kernels,
    Queue,
    Queues,
)
from lightning_zenflow.device.device import WAITS, Device, Target, Traffic
from lightning_zenflow.device.select import make_device

__all__ = [
    "WAITS",
    "Columns",
    "Device",
    "EagerStep",
    "Event",
    "HotState",
    "Kernels",
    "Queue",
    "Queues",
    "Target",
    "Traffic",
    "make_device",
]
