"""Which cores the host half may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def physical_cores(cpus: set[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One CPU of each physical core among ``cpus``, ordered by package, core and number.

    Hyper-threads of one core share its caches and load ports, so AdamW gains nothing from the
    second. Where the kernel does not tell (containers without sysfs) every CPU counts as a core.
    """
    seen: dict[tuple[int, int], int] = {}
    for cpu in sorted(cpus):
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            package, core = 0, -1 - cpu
        seen.setdefault((package, core), cpu)
    return [seen[key] for key in sorted(seen)]


def quota_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Whole cores that the cgroup v2 or v1 CPU quota allows, at least 1; None without a quota."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return max(1, int(quota) // int(period))


@dataclass(frozen=True)
class Placement:
    """Worker processes, lanes in each, and the CPUs each worker binds to (empty: unbound)."""

    workers: int
    threads: int
    affinity: list[list[int]]


def place_workers(
    workers: int | str,
    threads: int | str,
    *,
    local_rank: int = 0,
    local_ranks: int = 1,
    cores: list[int] | None = None,
    limit: int | None = None,
) -> Placement:
    """Choose processes and CPUs for one rank.

    ``"auto"`` takes one single-threaded worker for each physical core of this rank's share but one,
    which stays with the trainer. Workers are bound only if a core of the share stays free of them;
    otherwise the scheduler knows better.

    Args:
        workers: number of processes, or ``"auto"``.
        threads: lanes in each, or ``"auto"`` (1).
        local_rank: which of the ranks on this machine asks.
        local_ranks: how many ranks share this machine.
        cores: physical cores to share out; default: those this process may run on.
        limit: cores that a quota allows; default: this process's cgroup quota.
    """
    if cores is None:
        cores = physical_cores(os.sched_getaffinity(0))
        limit = quota_cores() if limit is None else limit
    start, stop = (len(cores) * r // local_ranks for r in (local_rank, local_rank + 1))
    share = cores[start:stop] or cores[:1]  # more ranks than cores: one worker each, unbound
    usable = min(len(share), max(1, limit // local_ranks)) if limit else len(share)
    lanes = 1 if threads == "auto" else int(threads)
    count = max(1, (usable - 1) // lanes) if workers == "auto" else int(workers)
    affinity: list[list[int]] = []
    if limit is None and count * lanes < len(share) and len(share) > 2:
        own = share[len(share) - count * lanes :]
        affinity = [own[w * lanes : (w + 1) * lanes] for w in range(count)]
    return Placement(count, lanes, affinity)
