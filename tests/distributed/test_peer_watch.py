"""A rank that dies while the others use GPUs: torch's NCCL back end on fake cards, of which gloo alone sends anything.

No collective runs on a card here. What is real: the environment at the start, the connection that closes, the abort of
the back end, the sentence, and the farewell of ranks that leave in good order.
"""

import os
import socket
import subprocess
import sys

import fake_cuda
import pytest
import torch.distributed

from fastcssl.cli import exit_codes
from fastcssl.distributed import world
from fastcssl.distributed.world import RankLost

PROGRAM = """
import os, signal, sys
from fastcssl.distributed import world as ranks
from fastcssl.distributed.peer_watch import PeerWatch

aborted = []
abort = ranks._nccl
class Back:
    def __init__(self):
        self.real = abort()
    def abort(self):
        aborted.append(True)
        self.real.abort()
    def get_error(self):
        return self.real.get_error()
ranks._nccl = Back

world, device = ranks.connect("cuda", timeout_s=60)
said = [device, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], repr(ranks._peers.trouble())]
world.barrier()
if sys.argv[1] == "dies":
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks._peers._thread.join(60)
    try:
        world.agree(0)
    except ranks.RankLost as error:
        said.append(error)
else:
    ranks.disconnect()
print(*said, f"aborted {len(aborted)}", sep="|", flush=True)
"""


def two_ranks(how: str, **variables: str) -> list[tuple[int, str]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env=fake_cuda.environment(devices=2) | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text.strip()) for process, text in zip(started, said, strict=True)]


def test_a_rank_that_dies_is_noticed_without_the_card() -> None:
    (status, said), (killed, _) = two_ranks("dies")
    assert killed == -9 and status == 0
    assert said == (
        "cuda:0|2|''|Another rank was lost during agreement (rank 1 closed its connection). The first error in the "
        "output of the other ranks says why.|aborted 1"
    )


def test_ranks_that_leave_in_good_order() -> None:
    found = two_ranks("leaves", TORCH_NCCL_ASYNC_ERROR_HANDLING="3")  # the user's own choice stays
    assert found == [(0, f"cuda:{rank}|3|''|aborted 0") for rank in range(2)]


def test_a_cpu_run_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world.connect("cpu")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ and world._peers is None


class Aborted:
    """As the back end answers after a timeout."""

    def trouble(self) -> str:
        return "NCCL reports TIMEOUT"


def test_nobody_agrees_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_peers", Aborted())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RankLost, match=r"lost during agreement \(NCCL reports TIMEOUT\)"):
        world.World(0, 2).agree(0)


def test_nccls_errors_are_named_outside_of_our_collectives() -> None:
    """Those of SyncBatchNorm and of DDP's forward pass; an error that only speaks of a connection stays as it is."""
    aborted = torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0. Original reason: unknown")
    with pytest.raises(exit_codes.Ended, match=r"lost during a collective \(NCCL communicator was aborted on rank 0\)"):
        with exit_codes.explained():
            raise aborted
    with pytest.raises(RuntimeError, match="no connection"), exit_codes.explained():
        raise RuntimeError("no connection to the data base")
