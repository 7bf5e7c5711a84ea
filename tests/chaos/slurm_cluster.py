"""Starts a small SLURM in a folder: one controller and two nodes, all on this machine.

Keys, sockets, ports, state and logs are its own, and nothing outside of the folder changes: commands find it through
SLURM_CONF, and the daemons see their own /etc/hosts in a mount namespace, so that the names of the nodes resolve.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "unshare")
NODES = ("node1", "node2")
_DEADLINE_S = 60.0
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

_CONFIG = """\
ClusterName=chaos
SlurmctldHost=localhost({address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
KillWait=5
OverTimeLimit=2
GresTypes=gpu
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Returns what this machine lacks to start a cluster, as a sentence, or None."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"SLURM cannot be started: {', '.join(absent)} is not installed (run .ci/packages python3 chaos)."
    if os.getuid() != 0:
        return "SLURM cannot be started: its daemons need root."
    if _address() is None:
        return "SLURM cannot be started: this machine has no network address besides the loopback's."
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "SLURM cannot be started: this machine allows no mount namespaces."
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _address() -> str | None:
    """Returns an address of this machine that is not the loopback's: the daemons refuse that one."""
    listed = subprocess.run(
        ["ip", "-4", "-oneline", "address", "show", "scope", "global"], capture_output=True, text=True
    )
    words = listed.stdout.split()
    return words[3].partition("/")[0] if len(words) > 3 else None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """Runs the daemons inside a `with` block. Each node has two processors and one GPU, which is /dev/null."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "SLURM_TIME_FORMAT": "%s"}

    def __enter__(self) -> "Cluster":
        try:
            self._write_files()
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self._end_steps()

    def _write_files(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        address = _address()
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address} Port={port} CPUs=2 RealMemory=2000 Gres=gpu:1 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        config = _CONFIG.format(
            address=address, controller_port=ports[0], folder=self.folder, nodes=nodes, names=",".join(NODES)
        )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        gres = "".join(f"NodeName={node} Name=gpu File=/dev/null\n" for node in NODES)
        (self.folder / "gres.conf").write_text(gres)
        known = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(f"{known}\n127.0.0.1 {' '.join(NODES)}\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _start_daemons(self) -> None:
        at = self.folder
        own = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        files = [f"--{flag}={at / name}" for flag, name in own.items()]
        self._start("munged", "--foreground", "--force", *files, f"--log-file={at / 'munged.log'}")
        self._await("munged answers", lambda: (at / "munge.socket").exists())
        self._start("slurmctld", "-D", "-c", "-f", str(at / "slurm.conf"))
        for node in NODES:
            self._start("slurmd", "-D", "-c", "-N", node, "-f", str(at / "slurm.conf"))
        self._await("the nodes are idle", lambda: self._states() == ["idle"] * len(NODES))

    def _start(self, name: str, *words: str) -> None:
        program = _program(name)
        assert program is not None, name
        hosts = f'mount --bind "{self.folder}/hosts" /etc/hosts && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", hosts, name, program, *words]
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
                )
            )

    def _states(self) -> list[str]:
        listed = self.command("sinfo", "--noheader", "--Node", "--format=%t", check=False)
        return listed.split()

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not holds():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"It never came about that {what}; ended daemons: {ended}.\n{logs}")
            time.sleep(0.1)

    def _end_steps(self) -> None:
        """Kills what the daemons left behind: their steps, known by the configuration in their environment."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue

    # ---- Jobs --------------------------------------------------------------------------------------------------------

    def command(self, *words: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """Runs one of SLURM's commands and returns what it printed."""
        done = subprocess.run(
            words, env={**self.environment, **(environment or {})}, capture_output=True, text=True, timeout=_DEADLINE_S
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, *words: str, environment: Mapping[str, str] | None = None) -> int:
        """Submits a job and returns its number."""
        printed = self.command("sbatch", "--parsable", *words, environment=environment)
        return int(printed.strip().partition(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """Returns the fields of a job, as `scontrol show job` prints them."""
        shown = self.command("scontrol", "--oneliner", "show", "job", str(number))
        return {key: value for key, _, value in (word.partition("=") for word in shown.split())}

    def has_ended(self, number: int) -> bool:
        """Returns whether the job is over for good, and none of its processes is left."""
        return self.job(number)["JobState"] in _ENDED
