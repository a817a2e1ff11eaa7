"""A small byte-level GPT in plain torch, and the LightningModule that trains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

VOCABULARY = 256


class Block(nn.Module):
    """One pre-norm layer: causal attention, then an MLP. ``[B, T, width]`` in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_attention(x))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class GPT(nn.Module):
    """Predicts the next byte. The output layer shares the embedding's weight.

    Args:
        layers: transformer layers.
        width: channels; a multiple of ``heads``.
        heads: attention heads.
        block_size: longest input, in bytes.
    """

    def __init__(self, layers: int, width: int, heads: int, block_size: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width={width} cannot be split over heads={heads}; make it a multiple of heads"
            )
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.bytes.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, param in self.named_parameters():
            if param.dim() >= 2:
                # Layers add up along the residual path; keep its variance independent of depth.
                into_residual = name.endswith(("join.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers if into_residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, 256]`` for int64 bytes ``[B, T]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


@dataclass(frozen=True)
class WarmupCosine:
    """Factor on the learning rate: up over ``warmup`` steps, then a cosine down to ``floor``."""

    warmup: int
    total: int
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))


class GPTModule(pl.LightningModule):
    """Trains :class:`GPT` with ``torch.optim.AdamW``. Nothing in it knows about ZenFlow.

    Args:
        layers, width, heads, block_size: see :class:`GPT`.
        lr: highest learning rate.
        weight_decay: of matrices; biases and norms have none.
        lr_warmup: share of the steps in which the learning rate rises.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 256,
        heads: int = 4,
        block_size: int = 128,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        lr_warmup: float = 0.1,
    ) -> None:
        super().__init__()
        self.model = GPT(layers, width, heads, block_size)
        self.val_loss = MeanMetric()  # over windows: the last batch may be smaller
        self._lr = lr
        self._weight_decay = weight_decay
        self._lr_warmup = lr_warmup

    def _loss(self, windows: Tensor) -> Tensor:
        """Nats a byte; ``windows`` is uint8 ``[B, T + 1]``."""
        tokens = windows.long()
        logits = self.model(tokens[:, :-1])
        # In fp32 also where the model is bf16: a sum over 256 exponentials needs the digits.
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        # Not on the progress bar: that would wait for the device at every step.
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_loss.update(self._loss(batch), weight=len(batch))
        self.log("val_loss", self.val_loss, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        params = list(self.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": self._weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self._lr, betas=(0.9, 0.95))
        total = int(self.trainer.estimated_stepping_batches)
        factor = WarmupCosine(warmup=round(self._lr_warmup * total), total=total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
