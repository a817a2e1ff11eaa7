"""The arena: one memory for several processes, without a name, sealed, and given back."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_zenflow.host.arena import Arena
from lightning_zenflow.host.layout import ERROR_BYTES, HostMatrix, HostSpec

SPEC = HostSpec(
    matrices=[HostMatrix(5, 3, "float32"), HostMatrix(4, 7, "bfloat16")],
    workers=2,
    threads=2,
    chunk_elements=6,
    affinity=[[0], [0]],
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SPEC)
    yield arena
    arena.close()


def mappings() -> list[str]:
    """This process's mappings of arenas."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "zenflow" in line and "memfd" in line]


OTHER_PROCESS = """
import json, os, sys
from lightning_zenflow.host.arena import Arena

arena = Arena.attach(int(sys.argv[1]))
one, two = arena.matrices
report = {
    "spec": arena.layout.spec.to_json(),
    "staging": two.staging.tolist(),
    "posted": arena.posted.tolist(),
    "command": arena.commands[1, 3].tolist(),
}
one.master.fill_(2.5)
two.outgoing[3].fill_(-1.5)
arena.done[3][1] = 7
arena.lane_words[2, 4] = 99
arena.write_error(1, "last words")
print(json.dumps(report))
"""


def test_another_process_sees_and_changes_the_same_bytes(arena: Arena) -> None:
    staged = torch.arange(28, dtype=torch.bfloat16).view(4, 7)
    command = (2, 0, 1, 9, 1, 1e-3, 0.9, 0.99, 1e-8, 0.1, 0.5, 0.25, -1, 3, 2, 1, 0.125)
    arena.matrices[1].staging.copy_(staged)
    arena.posted[1] = 12
    arena.commands[1, 3] = command
    result = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(arena.fd)],
        pass_fds=[arena.fd],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    report = json.loads(result.stdout)
    assert HostSpec.from_json(report["spec"]) == SPEC
    assert report["staging"] == staged.tolist()
    assert report["posted"] == [0, 12]
    assert tuple(report["command"]) == command

    one, two = arena.matrices
    assert bool((one.master == 2.5).all())
    assert one.outgoing is one.master, "fp32 has no copy of its own to go out"
    assert two.outgoing.tolist() == [[0.0] * 7] * 3 + [[-1.5] * 7]
    assert [done.tolist() for done in arena.done] == [[0, 0], [0, 0], [0, 0], [0, 7]]
    assert arena.lane_words.sum() == arena.lane_words[2, 4] == 99
    assert arena.read_error(1) == "last words"
    assert arena.read_error(0) == ""


def test_arrays_do_not_overlap(arena: Arena) -> None:
    """Each array gets its own number; then each still holds it."""
    flat = [arena.posted, arena.announced, *arena.done, arena.lane_words]
    tensors = []
    for m in arena.matrices:
        tensors += [m.master, m.exp_avg, m.exp_avg_sq, m.accumulator, m.staging]
        tensors += [m.inverse_count, m.decay]
        if m.outgoing is not m.master:
            tensors.append(m.outgoing)
    for number, array in enumerate([*flat, *tensors]):
        array[...] = number
    arena.write_error(0, "x" * 9000)
    arena.write_error(1, "y" * 9000)
    for number, array in enumerate([*flat, *tensors]):
        assert bool((array == number).all())
    assert set(arena.read_error(0)) == {"x"}
    assert set(arena.read_error(1)) == {"y"}
    again = Arena.attach(os.dup(arena.fd))
    assert again.layout.spec == SPEC
    again.close()


def test_a_new_arena_is_zero(arena: Arena) -> None:
    for m in arena.matrices:
        for tensor in (m.master, m.exp_avg, m.exp_avg_sq, m.accumulator, m.staging, m.outgoing):
            assert not tensor.any()
        assert not m.inverse_count.any()
        assert not m.decay.any()
    assert not arena.posted.any()
    assert not arena.lane_words.any()


def test_shapes_and_dtypes(arena: Arena) -> None:
    for matrix, arrays in zip(SPEC.matrices, arena.matrices, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq", "accumulator", "staging", "outgoing"):
            tensor = getattr(arrays, name)
            wire = name in ("staging", "outgoing")
            assert tensor.shape == (matrix.rows, matrix.n_cold)
            assert tensor.dtype == (matrix.torch_dtype if wire else torch.float32)
            assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("change", [-4096, 4096])
def test_nobody_can_change_its_size(arena: Arena, change: int) -> None:
    size = arena.allocated_bytes()
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size + change)
    assert arena.allocated_bytes() == size == arena.layout.total_bytes
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW


def test_it_has_no_name_and_is_not_in_dev_shm(arena: Arena) -> None:
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:zenflow")
    assert mappings()
    assert not [line for line in mappings() if "/dev/shm" in line]
    assert os.fstat(arena.fd).st_nlink == 0
    assert not os.get_inheritable(arena.fd), "only workers get it, and by name"


def test_pages_are_taken_when_first_touched() -> None:
    spec = HostSpec([HostMatrix(1 << 12, 1 << 14, "float32")], 1, 1, 1 << 19)
    arena = Arena.create(spec)
    try:
        assert arena.allocated_bytes() > 20 << 26
        assert os.fstat(arena.fd).st_blocks * 512 < 1 << 20
    finally:
        arena.close()


def test_close_gives_memory_and_descriptor_back_and_may_be_repeated() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena.create(SPEC)
    assert len(mappings()) == 1
    arena.close()
    assert arena.fd == -1
    assert mappings() == []
    assert set(os.listdir("/proc/self/fd")) == before
    arena.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_view_outlives_the_arena_and_the_memory_goes_with_it() -> None:
    arena = Arena.create(SPEC)
    view = arena.matrices[0].master
    arena.close()
    view.fill_(3.0)
    assert view.sum() == 45.0
    del view
    gc.collect()
    assert mappings() == []


def test_an_impossible_size_is_refused_with_its_bytes_and_a_remedy() -> None:
    spec = HostSpec([HostMatrix(1 << 40, 1 << 10, "float32")], 1, 1, 1 << 19)
    with pytest.raises(OSError, match="could not be mapped") as caught:
        Arena.create(spec)
    (size,) = re.findall(r"arena of (\d+) bytes", str(caught.value))
    assert 20 << 50 <= int(size) < (20 << 50) + (1 << 30)
    for words in (str(1 << 50), "topk_ratio", "min_offload_numel", os.strerror(caught.value.errno)):
        assert words in str(caught.value)
    assert mappings() == []


class TestErrors:
    """A worker's last words."""

    ROOM = ERROR_BYTES - 8  # behind their length

    @pytest.mark.parametrize("length", [0, 1, ROOM - 1, ROOM])
    def test_what_fits_is_kept_whole(self, arena: Arena, length: int) -> None:
        text = "".join(chr(ord("a") + i % 26) for i in range(length))
        arena.write_error(0, text)
        assert arena.read_error(0) == text

    def test_what_does_not_fit_keeps_its_end(self, arena: Arena) -> None:
        text = "the beginning" + "." * ERROR_BYTES + "ValueError: the end"
        arena.write_error(1, text)
        assert arena.read_error(1) == text[-self.ROOM :]

    def test_a_character_cut_in_two_is_readable(self, arena: Arena) -> None:
        arena.write_error(0, "ä" * ERROR_BYTES + "x")
        kept = arena.read_error(0)
        assert kept.endswith("ääx")
        assert len(kept.encode(errors="replace")) <= ERROR_BYTES

    def test_the_newest_counts(self, arena: Arena) -> None:
        arena.write_error(0, "a long message")
        arena.write_error(0, "short")
        assert arena.read_error(0) == "short"
