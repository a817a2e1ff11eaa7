"""What every test is held to: no process, descriptor or setting of this process is left changed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import children, open_descriptors

# The tensors here are tiny: a second thread only waits at barriers, for long on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ranks of the tests talk over the loopback device only.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip, with the reason, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
            )


def _ours(before: set[int]) -> dict[int, str]:
    left = {fd: name for fd, name in open_descriptors().items() if fd not in before}
    return {fd: n for fd, n in left.items() if any(k in n for k in ("zenflow", "eventfd", "pidfd"))}


@pytest.fixture(autouse=True)
def clean_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves worker processes, arena or event descriptors, or thread settings."""
    before = set(open_descriptors())
    processes, threads = set(children()), torch.get_num_threads()
    yield
    if _ours(before):
        gc.collect()  # an engine in a reference cycle goes with the next collection, as in real life
    assert not _ours(before), f"descriptors left open: {_ours(before)}"
    assert set(children()) <= processes, f"processes left: {children()}"
    assert torch.get_num_threads() == threads


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory: Trainers write logs and checkpoints to where they are."""
    monkeypatch.chdir(tmp_path)
