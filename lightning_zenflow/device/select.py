"""The device for the parameters at hand."""

from __future__ import annotations

import torch

from lightning_zenflow.device.base import Queues
from lightning_zenflow.device.cuda import CudaQueues
from lightning_zenflow.device.device import Device
from lightning_zenflow.device.inline import InlineQueues
from lightning_zenflow.device.torch_kernels import TorchKernels


def make_device(device: torch.device) -> Device:
    """The device half for parameters on ``device``.

    Args:
        device: where the parameters are.

    Raises:
        ValueError: the device is neither the CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return Device(InlineQueues(), TorchKernels())
    if device.type != "cuda":
        raise ValueError(
            f"ZenFlow knows the devices cpu and cuda, and the parameters are on {device}; move the "
            "model, or use strategy='ddp'"
        )
    queues: Queues = CudaQueues(device)
    return Device(queues, TorchKernels())
