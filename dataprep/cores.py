"""Says how many processor cores this process may use, and makes its threads wait without using them."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
# OpenMP's threads wait for each other after every operation, by default in a loop that uses the core. If another
# program has that core, each operation then takes as long as the scheduler's time slice.
# A short loop before they sleep is quicker for small networks (benchmarks/LOG.md).
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "0"}


def usable_cores(root: Path = _CGROUP, own_group: Path = _OWN_GROUP) -> int:
    """Returns the number of cores that this process may use, at least 1.

    It respects the cores that the process is bound to, and the share of processor time that a container or a batch
    system grants (`cpu.max` of cgroups, or `cpu.cfs_quota_us` of their first version).
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), _quota(root, own_group))))


def _quota(root: Path, own_group: Path) -> float:
    """Returns the smallest quota of this process's group and of those that contain it, in cores."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return math.inf
    found = [math.inf]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        home = root if not controllers else root / "cpu"
        folder = home / name.strip("/")
        while True:  # inside a container the folder may not exist, but its parents do
            found.append(_quota_of(folder))
            if folder == home:
                break
            folder = folder.parent
    return min(found)


def _quota_of(folder: Path) -> float:
    try:
        if (path := folder / "cpu.max").is_file():
            quota, period = path.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes OpenMP's threads sleep while they wait, and no more of them than there are cores.

    It must precede `import torch`, and leaves what the user chose. Otherwise a step that takes 0.1 s on two free cores
    can take seconds as soon as another program uses one of them, or inside a container that grants two cores of many.
    """
    if not any(name in environment for name in _PATIENT):
        environment.update(_PATIENT)
    if (granted := usable_cores()) < len(os.sched_getaffinity(0)):
        environment.setdefault("OMP_NUM_THREADS", str(granted))
