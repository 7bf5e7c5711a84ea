"""Starts the commands of fastcssl in forked processes, so that torch is imported once and not for every fault.

Runs as `python -m chaos.server FD` with the shim preloaded. It reads one JSON request per line from the socket FD:
"start" forks a process that becomes the command, and "reap" returns how a process ended. It never starts a thread,
because a fork would not copy it.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

# What the commands import when they need it.
_PRELOADED = (
    "dataprep.api",
    "dataprep.cli",
    "dataprep.verify",
    "dataprep.synthetic",
    "dataprep.sources.folder",
    "dataprep.writers.array",
    "dataprep.writers.ffcv",
    "dataprep.writers.tar",
    "fastcssl.api",
    "fastcssl.cli.eval",
    "fastcssl.cli.report",
    "fastcssl.cli.train",
    "fastcssl.config.recipes.own_data",
    "fastcssl.distributed.world",
    "fastcssl.evaluate.evaluate",
    "fastcssl.evaluate.probes",
    "fastcssl.evaluate.scoreboard",
    "fastcssl.learn.strategies",
    "fastcssl.report",
    "fastcssl.report.summary",
    "fastcssl.train.loop",
    "matplotlib.backends.backend_agg",
    "safetensors.torch",
    "torch._dynamo",
    "torch.onnx",
    "torchvision",
    "typeguard",
    "PIL.JpegImagePlugin",
    "fastcssl.learn.encoders",
    "tyro._backends",
)
_PR_SET_PDEATHSIG = 1
_COMMANDS = {
    "fastcssl-prep": "dataprep.cli",
    "fastcssl-train": "fastcssl.cli.train",
    "fastcssl-eval": "fastcssl.cli.eval",
    "fastcssl-report": "fastcssl.cli.report",
}


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests until the other side closes. In a forked process, return the request to carry out."""
    children: set[int] = set()
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            request = json.loads(line)
            if request["do"] == "reap":
                _, status, _ = os.wait4(request["pid"], 0)
                children.discard(request["pid"])
                answer = {"status": os.waitstatus_to_exitcode(status)}
            else:
                if (pid := os.fork()) == 0:
                    return dict(request)
                children.add(pid)
                answer = {"pid": pid}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def become(request: dict[str, Any]) -> int:
    """Run a command in this process, as its script would, and return its exit status."""
    os.setsid()
    os.chdir(request["folder"])
    for stream, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.update(request["environment"])
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, *args = request["words"]
    command = importlib.import_module(_COMMANDS[name])
    # A process that multiprocessing spawns imports the command, and not this file.
    main = sys.modules["__main__"]
    main.__spec__, main.__file__ = command.__spec__, command.__file__
    sys.argv = [name, *args]
    if request["plan"] is not None:
        os.environ["CHAOS_PLAN"] = request["plan"]
        if failed := ctypes.CDLL(None).chaos_use(os.fsencode(request["plan"])):
            raise OSError(failed, os.strerror(failed), request["plan"])
    os.close(os.open(request["begun"], os.O_WRONLY | os.O_CREAT, 0o644))
    return int(command.main())


def _prepare() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in _PRELOADED:
        importlib.import_module(name)
    if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
        raise RuntimeError(f"The server has {threads} threads, and a fork would copy only one. Set OMP_NUM_THREADS=1.")
    gc.freeze()


def leave(status: int) -> NoReturn:
    """End as the interpreter does, but without freeing every module of torch, which takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch's own clean-up, which most commands do not have, is slow
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _status(request: dict[str, Any]) -> int:
    """Carry out a request and return the exit status that the interpreter would give."""
    try:
        return become(request)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    _prepare()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        leave(_status(asked))
