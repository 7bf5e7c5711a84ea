"""A signal that arrives while a command starts ends it with a sentence and the usual status."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _ended(tmp_path: Path, *args: str, **more: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), **more}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=60)


def _check(done: "subprocess.CompletedProcess[str]", number: int) -> None:
    name = signal.Signals(number).name
    assert done.returncode == 128 + number, done
    assert done.stderr == f"Stopped by {name}. Finished work is kept; run the same command again to continue.\n"


@pytest.mark.parametrize("module", ["dataprep.cli", "fastcssl.cli.train", "fastcssl.cli.eval", "fastcssl.cli.report"])
def test_during_the_imports(tmp_path: Path, module: str) -> None:
    # The first slow import of each command, replaced by one that is interrupted.
    (tmp_path / "tyro.py").write_text("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(30)\n")
    _check(_ended(tmp_path, "-m", module, "--help"), signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_c_code_waits(tmp_path: Path, number: int) -> None:
    """A mutex that is locked twice never returns to Python, as a rank that waits for others does not."""
    program = f"""
import ctypes, os, threading
from dataprep.startup import catch_signals
catch_signals()
mutex = ctypes.create_string_buffer(128)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
threading.Timer(0.2, os.kill, (os.getpid(), {int(number)})).start()
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    _check(_ended(tmp_path, "-c", program), number)


def test_later_handlers_and_children_are_left_alone(tmp_path: Path) -> None:
    program = """
import os, signal, time
from dataprep.startup import catch_signals
catch_signals()
ready, say = os.pipe()
child = os.fork()
if not child:
    os.write(say, b".")
    time.sleep(30)
    os._exit(1)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
seen = []
before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
print(len(seen))
signal.signal(signal.SIGTERM, before)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    done = _ended(tmp_path, "-c", program, RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "1\n", "")  # other ranks say nothing


def test_every_command_begins_with_it(tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(scripts) == 6
    homes = {target.partition(":")[0] for target in scripts.values()}
    listed = "[name for name in ('tyro', 'rich', 'torch', 'numpy') if name in sys.modules]"
    program = f"import sys, {', '.join(sorted(homes))}; print({listed})"
    assert _ended(tmp_path, "-c", program).stdout == "[]\n"
    for target in scripts.values():
        module, _, function = target.partition(":")
        (tmp_path / "tyro.py").write_text("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(30)\n")
        (tmp_path / "rich").mkdir(exist_ok=True)
        (tmp_path / "rich/__init__.py").write_text((tmp_path / "tyro.py").read_text())
        _check(_ended(tmp_path, "-c", f"import {module} as m; m.{function}()"), signal.SIGTERM)
