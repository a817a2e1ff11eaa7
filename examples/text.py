"""Text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePath

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256

# Installed packages and tests are not there on every machine; encodings/ is tables of characters.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
)


@dataclass(frozen=True)
class Text:
    """Both halves of the text: uint8, one dimension, an element a byte."""

    train: Tensor
    val: Tensor


def stdlib_root() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[PurePath]:
    """List Python files below ``root``, relative to it, in the same order on every machine."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in found if SKIPPED.isdisjoint(path.parts)]
    return sorted(kept, key=lambda path: path.as_posix())


def is_validation(path: PurePath) -> bool:
    """Whether a file is held out: one of ten, chosen by the hash of its relative path."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def read_text(root: Path | None = None) -> Text:
    """Read the source files below ``root`` (default: the standard library), split by file.

    Raises:
        FileNotFoundError: one of the halves would be empty.
    """
    root = stdlib_root() if root is None else root
    halves: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(root):
        halves[is_validation(path)].append((root / path).read_bytes())
    train, val = b"".join(halves[False]), b"".join(halves[True])
    if not train or not val:
        raise FileNotFoundError(
            f"{root} holds too few Python source files to train on ({len(train)} bytes to train, "
            f"{len(val)} to validate); give the folder of a source tree with root="
        )
    return Text(_as_tensor(train), _as_tensor(val))


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unigram_entropy(text: Text) -> float:
    """Nats a byte of a model that knows only how often each byte occurs in training.

    The cross-entropy of the validation bytes under the frequencies of the training bytes, each of
    the 256 counted once more than seen. A model that uses any context must end below it.
    """
    counts = torch.bincount(text.train, minlength=VOCABULARY).double() + 1.0
    nats = counts.sum().log() - counts.log()
    seen = torch.bincount(text.val, minlength=VOCABULARY).double()
    return float((seen * nats).sum() / seen.sum())


class RandomWindows(Dataset[Tensor]):
    """Windows at random places: the place depends on seed and index alone.

    Args:
        text: uint8 bytes, ``[n]``.
        length: bytes in a window.
        seed: another seed cuts other windows.
    """

    def __init__(self, text: Tensor, length: int, seed: int) -> None:
        _check_length(text, length)
        self._text = text
        self._length = length
        self._seed = seed

    def __len__(self) -> int:
        return len(self._text) // self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        # Seeded by a string: random hashes it, so that neighbouring indices share nothing.
        start = random.Random(f"{self._seed} {index}").randrange(len(self._text) - self._length + 1)
        return self._text[start : start + self._length]


class FixedWindows(Dataset[Tensor]):
    """At most ``count`` windows of ``length`` bytes, spread evenly, none overlapping."""

    def __init__(self, text: Tensor, length: int, count: int) -> None:
        _check_length(text, length)
        self._text = text
        self._length = length
        self._count = min(count, len(text) // length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(f"window {index} of {self._count}")
        start = index * (len(self._text) // self._count)
        return self._text[start : start + self._length]


def _check_length(text: Tensor, length: int) -> None:
    if not 2 <= length <= len(text):
        raise ValueError(
            f"windows of {length} bytes do not fit a text of {len(text)} bytes; choose block_size "
            f"from 1 to {len(text) - 1}"
        )


class TextData(pl.LightningDataModule):
    """Batches of windows, uint8 ``[batch_size, block_size + 1]``: inputs and, one further, targets.

    Args:
        block_size: bytes that the model sees at once.
        batch_size: windows in a batch.
        val_windows: validation windows; the same ones every time.
        seed: decides the training windows.
        root: folder with the Python files; default: the standard library.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 8,
        val_windows: int = 256,
        seed: int = 0,
        root: Path | None = None,
    ) -> None:
        super().__init__()
        self._length = block_size + 1
        self._batch_size = batch_size
        self._val_windows = val_windows
        self._seed = seed
        self._root = root
        self._text: Text | None = None

    @property
    def text(self) -> Text:
        """The bytes, read at first use."""
        if self._text is None:
            self._text = read_text(self._root)
        return self._text

    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = RandomWindows(self.text.train, self._length, self._seed)
        return DataLoader(windows, batch_size=self._batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        windows = FixedWindows(self.text.val, self._length, self._val_windows)
        return DataLoader(windows, batch_size=4 * self._batch_size)
