"""A model with every kind of parameter that the engine has to treat, and its twin under AdamW."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOLERANCE = 2e-6


class Kitchen(nn.Module):
    """Embedding tied to the output layer, Conv2d, LayerNorm, Linears, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 12)
        self.frozen = nn.Linear(12, 12)
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.norm = nn.LayerNorm(12)
        self.hidden = nn.Linear(60, 12)
        self.output = nn.Linear(12, 23, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T]`` int64 to logits ``[B, T, 23]``."""
        x = self.frozen(self.embedding(tokens))
        channels = self.conv(x.unsqueeze(1))  # [B, 5, T, 12]
        x = x + self.hidden(channels.permute(0, 2, 1, 3).flatten(2))
        return self.output(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def twins(seed: int = 0) -> tuple[Kitchen, Kitchen]:
    """Two models with the same weights."""
    torch.manual_seed(seed)
    model = Kitchen()
    return model, copy.deepcopy(model)


def batches(count: int, seed: int = 1) -> list[Tensor]:
    """Token batches ``[4, 9]`` whose next token depends on the one before."""
    gen = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 23, (count, 4, 1), generator=gen)
    return list((starts + 5 * torch.arange(9)) % 23)


def distance(left: nn.Module, right: nn.Module) -> float:
    """The largest absolute difference between two models' parameters."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
