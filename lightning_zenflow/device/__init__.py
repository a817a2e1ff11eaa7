"""The device half's operations: one small interface, and its implementations."""

from lightning_zenflow.device.base import Device, HotState
from lightning_zenflow.device.torch_device import TorchDevice

__all__ = ["Device", "HotState", "TorchDevice"]
