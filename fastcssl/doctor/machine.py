"""Checks the machine: processor, memory, limits, and the disk that images are read from."""

import os
import platform
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fastcssl.doctor import Finding, Section, failed, note, ok, run_checks

OPEN_FILES_WANTED = 4096  # mapped shards, and the pipes and sockets of workers and ranks
SHARED_WANTED_GB = 1.0  # FFCV's and DataLoader's workers pass batches through /dev/shm
READ_BYTES = 256 << 20
DISK_WANTED_MB_S = 100.0  # 2,000 images of 50 kB per second, which one core decodes


def machine(data: Path | None) -> Section:
    checks = [
        ("python", python),
        ("processor", processor),
        ("memory", memory),
        ("open files", open_files),
        ("shared memory", shared_memory),
    ]
    if data is not None:
        checks.append(("disk", lambda: disk(data)))
    return run_checks("Machine", checks)


def python() -> Finding:
    return ok(
        "python", f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    )


def processor() -> Finding:
    lines = _lines("/proc/cpuinfo")
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown model")
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    has = [name for name, flag in (("AVX2", "avx2"), ("AVX-512", "avx512f"), ("AMX", "amx_tile")) if flag in flags]
    lent, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cores = f"{lent} cores" if lent == there else f"{lent} of {there} cores available to this process"
    text = f"{model}, {cores}, {', '.join(has) or 'no AVX2'}"
    if flags and "avx2" not in flags:
        return note(
            "processor",
            text,
            "The portable code is used, which is several times slower. Most CPUs since 2013 have AVX2.",
        )
    return ok("processor", text)


def memory() -> Finding:
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in _lines("/proc/meminfo") if line.endswith("kB")}
    if "MemTotal" not in sizes:
        return note("memory", "this system does not report its size")
    total_gb, free_gb = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    limit_gb = _container_limit_gb()
    text = f"{free_gb:.1f} of {total_gb:.1f} GB available"
    if limit_gb is not None and limit_gb < total_gb:
        text += f", {limit_gb:.1f} GB allowed in this container"
    least = min(free_gb, limit_gb or free_gb)
    if least < 4:
        return note("memory", text, "A ResNet-18 run with prefetching needs 4 GB. Use --prefetch 1 or a smaller batch.")
    return ok("memory", text)


def _container_limit_gb() -> float | None:
    for line in _lines("/sys/fs/cgroup/memory.max"):
        return None if line == "max" else int(line) / 1e9
    return None


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {_limit(soft)} (hard limit {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_WANTED:
        reachable = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES_WANTED
        remedy = f"Before training, run ulimit -n {OPEN_FILES_WANTED}."
        if not reachable:
            remedy = f"Ask the administrator for 'nofile {OPEN_FILES_WANTED}' in /etc/security/limits.conf."
        return note("open files", f"{text}; many shards or workers need {OPEN_FILES_WANTED:,}", remedy)
    return ok("open files", text)


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else f"{value:,}"


def shared_memory(path: str = "/dev/shm") -> Finding:
    if not Path(path).is_dir():
        return note(
            "shared memory", f"there is no {path}", "FFCV and DataLoader workers need it; the native loader does not."
        )
    free_gb = shutil.disk_usage(path).free / 1e9
    if free_gb < SHARED_WANTED_GB:
        return note(
            "shared memory",
            f"{free_gb:.2f} GB free in {path}; FFCV and DataLoader workers need {SHARED_WANTED_GB:.0f} GB",
            "In Docker, use --shm-size=8g or --ipc=host. The native loader does not need it.",
        )
    return ok("shared memory", f"{free_gb:.1f} GB free in {path}")


def disk(data: Path) -> Finding:
    """Measures how fast files in `data` can be read, bypassing the system's cache if possible."""
    if not data.exists():
        return failed("disk", f"{data} does not exist", "Give an existing folder: fastcssl-doctor --data DIR.")
    read, seconds, was_cold = 0, 0.0, True
    for path in _largest_files(data):
        got, took, cold = _read(path, READ_BYTES - read)
        read, seconds, was_cold = read + got, seconds + took, was_cold and cold
        if read >= READ_BYTES:
            break
    if not read:
        return failed("disk", f"{data} contains no readable file", "Give a folder with prepared shards.")
    rate = read / 1e6 / max(seconds, 1e-9)
    free_gb = shutil.disk_usage(data).free / 1e9
    text = f"{rate:,.0f} MB/s from {data} ({read / 1e6:,.0f} MB sequentially), {free_gb:,.0f} GB free"
    if not was_cold:
        text += "; some of it may have come from memory"
    if rate < DISK_WANTED_MB_S:
        return note(
            "disk",
            text,
            f"Loading at full speed needs {DISK_WANTED_MB_S:.0f} MB/s per core. Copy the shards to a local disk.",
        )
    return ok("disk", text)


def _largest_files(folder: Path, most: int = 64) -> Iterator[Path]:
    if folder.is_file():
        yield folder
        return
    found: list[tuple[int, Path]] = []
    for number, path in enumerate(folder.rglob("*")):
        if path.is_file():
            found.append((path.stat().st_size, path))
        if number > 20_000:  # probably a folder of single images: any of them will do
            break
    yield from (path for _, path in sorted(found, reverse=True)[:most])


def _read(path: Path, most: int) -> tuple[int, float, bool]:
    """Returns bytes, seconds, and whether the system's cache was cleared of this file first."""
    block, got = 8 << 20, 0
    with path.open("rb", buffering=0) as file:
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cold = True
        except (AttributeError, OSError):
            cold = False
        began = time.perf_counter()
        while got < most and (part := file.read(min(block, most - got))):
            got += len(part)
        return got, time.perf_counter() - began, cold


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
