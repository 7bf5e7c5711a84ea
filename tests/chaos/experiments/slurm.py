"""Submits docs/slurm.sh to a real SLURM of two nodes: it is warned, requeued, resumed, cancelled, and it fails."""

import dataclasses
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos import slurm_cluster
from chaos.experiment import Fault, Outcome
from chaos.slurm_cluster import Cluster
from chaos.small_training import SmallTraining, differences, made_once, prepare_data, reached_step

ROOT = Path(__file__).resolve().parents[3]
_SCRIPT = ROOT / "docs" / "slurm.sh"
_DEADLINE_S = 400.0
_EPOCHS = 24  # 144 steps: long enough to be warned in the middle
_WARNED_AFTER_S = 45  # by then SLURM has warned a job of one minute that asks for it 20 s before its end

_OF_TORCHRUN = ("torch.distributed.elastic.", "torch.distributed.Dist", "ChildFailedError")

# What the script asks for is more than these nodes have. Everything else in it stays.
_FLAGS = ("--gpus-per-node=1", "--cpus-per-task=1")


@dataclass(frozen=True)
class JobFault(Fault):
    """Says what happens to the job, after which step of the training."""

    action: str = "warn"
    step: int = 1


_KINDS = {
    "warn": "SLURM: warned by hand, requeued and resumed",
    "time": "SLURM: the time is nearly up, requeued and resumed",
    "twice": "SLURM: warned and requeued twice",
    "early": "SLURM: warned while the ranks start, requeued and resumed",
    "cancel": "SLURM: cancelled",
    "fail": "SLURM: the training fails",
    "kill": "SLURM: a rank is killed",
    "node": "SLURM: requeued from outside without a warning",
}


class SlurmExperiment:
    """Compares with the same script, submitted in the same way and left alone."""

    name = "slurm"

    def missing(self) -> str | None:
        return slurm_cluster.missing()

    def faults(self, seed: int) -> Iterator[JobFault]:
        steps = [1 + (seed * 37 + number * 53) % 70 for number in range(4 * len(_KINDS))]
        for number, step in enumerate(steps):
            action = list(_KINDS)[number % len(_KINDS)]
            yield JobFault(_KINDS[action], f"{action} after step {step}, {number}", action=action, step=step)

    def prepare(self, folder: Path) -> None:
        prepare_data(folder / "data")

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        assert isinstance(fault, JobFault)
        job = _Job(SmallTraining(folder / "data", epochs=_EPOCHS, checkpoint_minutes=60), scratch)
        with Cluster(scratch / "slurm") as cluster:
            try:
                broken = _ACTIONS[fault.action](fault, job, cluster)
            except _TooLong as late:
                broken = [str(late)]
        log = job.log_text()
        broken += [f"The log has a traceback: {text}" for text in _own_tracebacks(log)]
        if not broken and fault.action not in ("cancel", "fail", "kill"):
            broken = differences(job.out, _reference(folder))
        lines = [line for line in log.splitlines() if line.strip()]
        return Outcome(tuple(broken), f"{job.states}; {lines[-1] if lines else ''}")


class _TooLong(Exception):
    """Raised when SLURM or the training does not get as far as it should within the deadline."""


@dataclass
class _Job:
    """A submitted script, its log and the run that it trains."""

    training: SmallTraining
    scratch: Path
    states: list[str] = dataclasses.field(default_factory=list)
    number: int = 0

    @property
    def out(self) -> Path:
        return self.scratch / "run"

    def submit(self, cluster: Cluster, *flags: str, words: tuple[str, ...] = ()) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        (self.scratch / "logs").mkdir(exist_ok=True)
        log = f"--output={self.scratch}/logs/%x-%j.log"
        words = (*self.training.words(self.out), *words)
        self.number = cluster.submit(*_FLAGS, *flags, log, str(_SCRIPT), *words, environment=environment)

    def log_text(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.scratch.glob("logs/*.log")))

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not holds():
            if time.monotonic() > deadline:
                raise _TooLong(f"The job never came so far that {what}: {self.log_text()[-500:]}")
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait(f"step {step} was done", lambda: reached_step(self.out) >= step)

    def finish(self, cluster: Cluster, *, restarts: int, state: str = "COMPLETED") -> list[str]:
        """Waits until the job is over and returns what is wrong with how it ended."""
        self.wait("it ended", lambda: cluster.has_ended(self.number))
        found = cluster.job(self.number)
        self.states.append(f"{found['JobState']} {found['ExitCode']}, {found['Restarts']} restarts")
        broken = []
        if found["JobState"] != state:
            broken.append(f"The job ended as {found['JobState']} instead of {state}.")
        if int(found["Restarts"]) != restarts:
            broken.append(f"The job was restarted {found['Restarts']} times instead of {restarts}.")
        return broken

    def wait_for_restart(self, cluster: Cluster, count: int) -> None:
        self.wait(f"it was requeued {count} times", lambda: int(cluster.job(self.number)["Restarts"]) >= count)


# ---- What happens to the job -----------------------------------------------------------------------------------------


def _warned(fault: JobFault, job: _Job, cluster: Cluster, times: int = 1) -> list[str]:
    """Sends the batch script what `--signal=B:USR1@300` sends."""
    job.submit(cluster)
    broken = []
    for number in range(times):
        job.wait_for_step(fault.step + 30 * number)
        cluster.command("scancel", "--batch", "--signal=USR1", str(job.number))
        job.wait_for_restart(cluster, number + 1)
        stopped = reached_step(job.out)
        if not (job.out / "checkpoints" / f"step-{stopped:08d}.pt").exists():
            broken.append(f"The run was stopped at step {stopped} without a checkpoint of that step.")
    return broken + job.finish(cluster, restarts=times)


def _warned_early(fault: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    """Sends the warning when there is nothing to save yet, because srun, torchrun or the ranks are still starting."""
    job.submit(cluster)
    job.wait("it ran", lambda: cluster.job(job.number)["JobState"] == "RUNNING")
    time.sleep(1 + fault.step % 10)
    cluster.command("scancel", "--batch", "--signal=USR1", str(job.number))
    return job.finish(cluster, restarts=1)


def _timed(_: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    """Lets SLURM send the warning, 10 to 40 s after the start. A stopped rank makes the training last until then."""
    job.submit(cluster, "--time=1", "--signal=B:USR1@20")
    began = time.monotonic()
    job.wait_for_step(1)
    _signal_rank_1(job.out, signal.SIGSTOP)
    time.sleep(max(0.0, began + _WARNED_AFTER_S - time.monotonic()))
    _signal_rank_1(job.out, signal.SIGCONT)
    job.wait_for_restart(cluster, 1)
    cluster.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    return job.finish(cluster, restarts=1)


def _cancelled(fault: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    job.submit(cluster)
    job.wait_for_step(fault.step)
    cluster.command("scancel", str(job.number))
    broken = job.finish(cluster, restarts=0, state="CANCELLED")
    time.sleep(15)  # longer than a requeued job would wait
    return broken + job.finish(cluster, restarts=0, state="CANCELLED")


def _failing(_: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    """Trains with a flag that does not fit, which ends with status 2."""
    job.submit(cluster, words=("--stop-after-task", "-4"))
    return job.finish(cluster, restarts=0, state="FAILED")


def _killed(fault: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    job.submit(cluster)
    job.wait_for_step(fault.step)
    _signal_rank_1(job.out, signal.SIGKILL)
    broken = job.finish(cluster, restarts=0, state="FAILED")
    if "Run the same command again to resume." not in job.log_text():
        broken.append("The log does not say how to resume.")
    return broken


def _requeued(fault: JobFault, job: _Job, cluster: Cluster) -> list[str]:
    """Is what happens when a node fails, or an administrator needs it: no warning, and no checkpoint of this moment."""
    job.submit(cluster)
    job.wait_for_step(fault.step)
    cluster.command("scontrol", "requeue", str(job.number))
    return job.finish(cluster, restarts=1)


_ACTIONS: dict[str, Callable[[JobFault, _Job, Cluster], list[str]]] = {
    "warn": _warned,
    "time": _timed,
    "twice": lambda fault, job, cluster: _warned(fault, job, cluster, 2),
    "early": _warned_early,
    "cancel": _cancelled,
    "fail": _failing,
    "kill": _killed,
    "node": _requeued,
}


def _own_tracebacks(log: str) -> list[str]:
    """Returns the last lines of the tracebacks that are not torchrun's own, with which it reports every lost rank."""
    found = re.findall(r"^Traceback .*\n(?:[ ].*\n)+(.*)$", log, re.MULTILINE)
    return [last for last in found if not last.startswith(_OF_TORCHRUN)]


def _signal_rank_1(out: Path, number: int) -> None:
    """Sends a signal to rank 1 of the training in this folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and b"RANK=1" in variables:
            os.kill(int(folder.name), number)


def _reference(folder: Path) -> Path:
    """Returns the run of a job that was left alone. It is trained when first asked for."""

    def train(fresh: Path) -> None:
        scratch = folder / "new"
        shutil.rmtree(scratch, ignore_errors=True)
        job = _Job(SmallTraining(folder / "data", epochs=_EPOCHS, checkpoint_minutes=60), scratch)
        with Cluster(scratch / "slurm") as cluster:
            job.submit(cluster)
            if broken := job.finish(cluster, restarts=0):
                raise RuntimeError(f"The reference cannot be trained: {broken} {job.log_text()[-2000:]}")
        job.out.rename(fresh)
        shutil.rmtree(scratch)

    return made_once(folder / "reference", train)


ALONE = True
EXPERIMENT = SlurmExperiment()
