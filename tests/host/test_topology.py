"""Cores, quotas, and how many workers go where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_zenflow.host.topology import (
    Placement,
    physical_cores,
    place_workers,
    quota_cores,
)


def fake_sysfs(root: Path, cpus: dict[int, tuple[int, int]]) -> Path:
    """A /sys/devices/system/cpu with ``cpu -> (package, core)``."""
    for cpu, (package, core) in cpus.items():
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return root


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    # As on most servers: the second threads of all cores come after the first ones.
    sysfs = fake_sysfs(tmp_path, {cpu: (0, cpu % 4) for cpu in range(8)})
    assert physical_cores(set(range(8)), sysfs) == [0, 1, 2, 3]


def test_cores_are_ordered_by_package(tmp_path: Path) -> None:
    # CPUs dealt out alternately to two packages; core ids repeat in each package.
    sysfs = fake_sysfs(tmp_path, {cpu: (cpu % 2, cpu // 2) for cpu in range(8)})
    assert physical_cores(set(range(8)), sysfs) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_only_allowed_cpus_are_used(tmp_path: Path) -> None:
    sysfs = fake_sysfs(tmp_path, {cpu: (0, cpu % 4) for cpu in range(8)})
    # Core 1 is allowed only through its second thread.
    assert physical_cores({0, 4, 5}, sysfs) == [0, 5]


def test_every_cpu_is_a_core_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    assert sorted(physical_cores({3, 1, 2}, tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", "-", "not a number\n"])
def test_unreadable_topology_counts_as_cores(tmp_path: Path, text: str) -> None:
    sysfs = fake_sysfs(tmp_path, {0: (0, 0), 1: (0, 0)})
    for cpu in (0, 1):
        (sysfs / f"cpu{cpu}" / "topology" / "core_id").write_text(text)
    assert sorted(physical_cores({0, 1}, sysfs)) == [0, 1]


def test_this_machine_has_cores() -> None:
    allowed = os.sched_getaffinity(0)
    cores = physical_cores(allowed)
    assert cores
    assert set(cores) <= allowed


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("400000 100000\n", 4),
        ("450000 100000\n", 4),
        ("50000 100000\n", 1),
        ("100000 50000\n", 2),
    ],
)
def test_quota_of_cgroup_v2(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1\n", None), ("300000\n", 3), ("1000\n", 1)])
def test_quota_of_cgroup_v1(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) == cores


@pytest.mark.parametrize("text", [None, ""])
def test_no_quota_without_readable_files(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert quota_cores(tmp_path) is None


CASES = {
    "one is left to the trainer": ({}, 8, Placement(7, 1, [[c] for c in range(1, 8)])),
    "threads share the cores": (
        {"threads": 3},
        8,
        Placement(2, 3, [[2, 3, 4], [5, 6, 7]]),
    ),
    "a wish is granted": ({"workers": 2}, 8, Placement(2, 1, [[6], [7]])),
    "a wish beyond the cores is unbound": ({"workers": 8}, 8, Placement(8, 1, [])),
    "one core": ({}, 1, Placement(1, 1, [])),
    "two cores are left to the scheduler": ({}, 2, Placement(1, 1, [])),
    "more threads than cores": ({"threads": 16}, 4, Placement(1, 16, [])),
    "a quota": ({"limit": 4}, 8, Placement(3, 1, [])),
    "a quota above the cores": ({"limit": 64}, 8, Placement(7, 1, [])),
    "a quota of one": ({"limit": 1}, 8, Placement(1, 1, [])),
    "a rank's share": (
        {"local_rank": 1, "local_ranks": 2},
        8,
        Placement(3, 1, [[5], [6], [7]]),
    ),
    "a rank's share of a quota": (
        {"local_rank": 0, "local_ranks": 2, "limit": 6},
        8,
        Placement(2, 1, []),
    ),
    "a quota below the ranks": (
        {"local_rank": 3, "local_ranks": 4, "limit": 2},
        8,
        Placement(1, 1, []),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_placement(case: str) -> None:
    settings, cores, expected = CASES[case]
    options = {"workers": "auto", "threads": "auto", **settings}
    assert place_workers(cores=list(range(cores)), **options) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cores", [3, 8, 17])
def test_ranks_share_the_cores_without_overlap(ranks: int, cores: int) -> None:
    placements = [
        place_workers("auto", "auto", local_rank=r, local_ranks=ranks, cores=list(range(cores)))
        for r in range(ranks)
    ]
    assert all(p.workers >= 1 and p.threads == 1 for p in placements)
    bound = [cpu for p in placements for worker in p.affinity for cpu in worker]
    assert len(bound) == len(set(bound))
    assert set(bound) <= set(range(cores))
    for placement in placements:
        assert len(placement.affinity) in (0, placement.workers)


@pytest.mark.parametrize("rank", range(5))
def test_more_ranks_than_cores(rank: int) -> None:
    placement = place_workers("auto", "auto", local_rank=rank, local_ranks=5, cores=[0, 1])
    assert placement == Placement(1, 1, [])


def test_cores_keep_their_numbers() -> None:
    placement = place_workers(2, 1, cores=[4, 6, 10, 12])
    assert placement.affinity == [[10], [12]]


def test_by_default_this_process_is_asked() -> None:
    placement = place_workers("auto", "auto")
    assert 1 <= placement.workers <= max(1, len(os.sched_getaffinity(0)) - 1)
    for cpus in placement.affinity:
        assert set(cpus) <= os.sched_getaffinity(0)
