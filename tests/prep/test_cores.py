"""How many cores a process may use, and how its threads wait."""

import os
from pathlib import Path

import pytest

from dataprep import cores
from dataprep.cores import share_cores, usable_cores


def quota_2(root: Path, group: str, text: str) -> None:
    (root / group).mkdir(parents=True, exist_ok=True)
    (root / group / "cpu.max").write_text(text)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("job", "above", "expected"),
    [("max 100000", "max 100000", 64), ("400000 100000", "max 100000", 4), ("max 100000", "250000 100000", 2)],
)
def test_the_smallest_quota_counts(tmp_path: Path, job: str, above: str, expected: int) -> None:
    own = tmp_path / "own"
    own.write_text("0::/slurm/job1\n")
    quota_2(tmp_path, "slurm/job1", job)
    quota_2(tmp_path, "slurm", above)
    assert usable_cores(tmp_path, own) == expected


@pytest.mark.usefixtures("many")
def test_half_a_core_is_one(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    quota_2(tmp_path, "", "50000 100000")
    assert usable_cores(tmp_path, own) == 1


@pytest.mark.usefixtures("many")
def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/docker/a1\n3:memory:/x\n")
    folder = tmp_path / "cpu" / "docker" / "a1"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path, own) == 3
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path, own) == 64


@pytest.mark.usefixtures("many")
def test_without_cgroups_the_bound_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path, tmp_path / "nothing") == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path, tmp_path / "nothing") == 1


def test_a_user_may_choose_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: len(os.sched_getaffinity(0)))
    chosen: dict[str, str] = {}
    share_cores(chosen)
    assert chosen == cores._PATIENT
    chosen = {"OMP_WAIT_POLICY": "ACTIVE"}
    share_cores(chosen)
    assert chosen == {"OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.usefixtures("many")
def test_a_container_has_as_many_threads_as_it_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    chosen: dict[str, str] = {}
    share_cores(chosen)
    assert chosen["OMP_NUM_THREADS"] == "4"
    chosen = {"OMP_NUM_THREADS": "2"}
    share_cores(chosen)
    assert chosen["OMP_NUM_THREADS"] == "2"
