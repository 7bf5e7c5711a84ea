"""Fake CUDA: processes in which torch sees a card that has streams, events and a capability, but cannot compute.

`runtime.c` is preloaded in place of libcudart. Under `FakeTensorMode` the real code of the project then runs on
"cuda:0", its backward pass, autocast and streams included, and what would need a value from the device fails.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
# Ends without tearing torch down. Autograd keeps a thread for the card, and sometimes aborts the process there, because
# the runtime is not a real one.
_PROGRAM = """
import os, runpy, sys, traceback
code, sys.argv = sys.argv[1], sys.argv[1:]
try:
    if code == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    status = 0
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        sys.stderr.write(end.code)
except BaseException:
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


@cache
def _library() -> Path:
    """Builds the fake runtime once per process and returns its path; skips the test where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("the fake CUDA runtime is built with nvcc, which is not on PATH")
    folder = Path(mkdtemp(prefix="fake-cuda-"))
    path = folder / "libcuda.so.1"  # torch opens the driver by this name
    flags = ["-cudart", "none", "-shared", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror,-std=gnu11"]
    subprocess.run([nvcc, "-x", "c", *flags, "-o", str(path), str(HERE / "runtime.c")], check=True)
    return path


def environment(*, capability: int = 90, devices: int = 1) -> dict[str, str]:
    """Returns the variables of a process with fake cards of a compute capability such as 90 or 75."""
    library = _library()
    return os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": f"{TESTS}:{TESTS.parent}:{os.environ.get('PYTHONPATH', '')}",
        "FAKE_CUDA_CAPABILITY": str(capability),
        "FAKE_CUDA_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
    }


def run(code: str, *arguments: str, capability: int = 90, devices: int = 1) -> str:
    """Runs Python code, or with "-m" a module, in such a process and returns what it printed.

    A failure shows its whole output.
    """
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, code, *arguments],
        env=environment(capability=capability, devices=devices),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
