"""docs/slurm.sh with a scheduler that is three lines of shell: what it requeues, what it passes on, how it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "slurm.sh"

# srun passes SIGUSR1 on, and kills when it gets SIGTERM. Its options end where torchrun's command begins.
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@" & task=$!; trap "kill -USR1 $task" USR1\n'
    'trap "kill -KILL $task" TERM; wait $task; status=$?\n'
    "while kill -0 $task 2>/dev/null; do wait $task; status=$?; done; exit $status",
    "scontrol": 'echo "$@" >> "$LOG"; if [ "$1" = show ]; then printf "first\\nsecond\\n"; fi',
    # torchrun, which ends with 1 when it was stopped; what the training would do is in the last word.
    "torchrun": 'echo "torchrun $*" >> "$LOG"; trap "echo stopped >> $LOG; exit 1" USR1; touch "$LOG.started"\n'
    'case "${@: -1}" in finish) exit 0;; fail) exit 7;; esac; for _ in $(seq 600); do sleep 0.05; done',
}


def run(folder: Path, word: str, *signals: int) -> tuple[int, list[str]]:
    for name, body in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    log = folder / "log"
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "4711"}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    job = subprocess.Popen([str(SCRIPT), "demo", "moco", "pnr", "--out", word], env=env)
    deadline = time.monotonic() + 60
    while not Path(f"{log}.started").exists():
        assert time.monotonic() < deadline, "torchrun was not started"
        time.sleep(0.01)
    for number in signals:
        job.send_signal(number)
    return job.wait(60), log.read_text().splitlines()


def test_time_up_saves_and_requeues(tmp_path: Path) -> None:
    status, log = run(tmp_path, "run", signal.SIGUSR1)
    assert status == 0
    assert log[-2:] == ["stopped", "requeue 4711"]


@pytest.mark.parametrize(("word", "expected"), [("finish", 0), ("fail", 7)])
def test_what_ends_by_itself_is_not_requeued(tmp_path: Path, word: str, expected: int) -> None:
    status, log = run(tmp_path, word)
    assert status == expected
    assert not any("requeue" in line for line in log)


def test_torchrun_meets_on_the_first_node_and_handles_the_signal(tmp_path: Path) -> None:
    _, log = run(tmp_path, "finish")
    command = next(line for line in log if line.startswith("torchrun"))
    for part in ("--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=first:24711", "SIGUSR1", "demo moco pnr --out"):
        assert part in command
