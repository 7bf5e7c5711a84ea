"""Tests an installed fastcssl with a small run of every command: smoke.py FOLDER [--empty-root].

Run it with the environment's own Python, with -I and without a compiler on PATH. It fails if there is a compiler, if
fastcssl is not the installed one, or if a libjpeg other than the wheel's is used. --empty-root: it also fails if the
system has any libjpeg. It uses only the standard library.
"""

import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ninja", "cmake")
SITE = Path(sysconfig.get_path("platlib"))
OPTIONAL = ("ffcv", "numba", "nvidia", "timm", "wandb", "tensorboard")  # installed by extras, not by the wheel
DATA = "synthetic:size=mixed,train=10,val=4"  # JPEGs of various sizes, 30 classes
SMALL = ("--epochs", "1", "--batch-size", "32", "--encoder.name", "resnet18-w8", "--views.size-px", "16")

# Runs in a process that has imported neither Pillow nor torchvision, which have a libjpeg of their own.
MAPPED_LIBJPEG = """
import dataprep._codec as codec, fastcssl.data._native as native, numpy as np
gray = np.full((40, 24, 3), 128, np.uint8)
assert codec.decode(codec.encode(gray, 90)) == (gray.tobytes(), 40, 24) and native.cuda_status()
print(*{line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "jpeg" in line}, sep="\\n")
"""


def run(*command: str) -> str:
    """Returns what a command printed. If it failed, prints its output and exits."""
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    shown = " ".join(part if "\n" not in part else "..." for part in (Path(command[0]).name, *command[1:]))
    if done.returncode:
        sys.exit(f"{shown}\n{done.stdout}{done.stderr}\nsmoke: exit status {done.returncode} of the command above")
    print(f"  {time.monotonic() - begun:5.1f} s  {shown}", flush=True)
    return done.stdout


def require(condition: bool, sentence: str) -> None:
    """Exits with a message unless the condition holds."""
    if not condition:
        sys.exit(f"smoke: {sentence}")


def system_libjpegs() -> list[str]:
    """Returns every libjpeg of this root outside the environment."""
    found = []
    for folder, below, names in os.walk("/"):
        here = Path(folder)
        below[:] = [name for name in below if here / name not in (Path("/proc"), Path("/sys"), Path(sys.prefix))]
        found += [str(here / name) for name in names if name.startswith(("libjpeg", "libturbojpeg"))]
    return found


def import_everything() -> int:
    """Imports every module of both packages and returns their number. Only optional packages may be missing."""
    count = 0
    for name in ("dataprep", "fastcssl"):
        package = importlib.import_module(name)
        require(
            Path(package.__file__ or "").is_relative_to(SITE), f"{name} is {package.__file__}, not the installed one"
        )
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if module.name == "fastcssl.ops._ops":
                continue  # a library of torch operators; fastcssl.ops loads it
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                require((error.name or "").split(".")[0] in OPTIONAL, f"{module.name} does not import: {error}")
            count += 1
    return count


def main() -> None:
    folder, empty_root = Path(sys.argv[1]).resolve(), "--empty-root" in sys.argv[2:]
    compilers = [path for path in map(shutil.which, COMPILERS) if path]
    require(not compilers, f"a compiler is on PATH, so this test would prove nothing: {', '.join(compilers)}")
    if empty_root:
        outside = system_libjpegs()
        require(not outside, f"this root has a libjpeg of its own: {', '.join(outside)}")
        print("  no libjpeg in this root outside the environment")

    needed = [need.partition(">=")[0] for need in importlib.metadata.requires("fastcssl") or () if "extra" not in need]
    print(" ", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in needed))
    mapped = run(sys.executable, "-I", "-c", MAPPED_LIBJPEG).splitlines()
    ours = [path for path in mapped if Path(path).parent == SITE / "fastcssl.libs"]
    require(
        len(mapped) == 1 and ours == mapped,
        f"the wheel's libjpeg is not the only one loaded: {mapped or 'none is loaded'}",
    )
    print(f"  libjpeg is {Path(mapped[0]).relative_to(SITE)}")
    print(f"  {import_everything()} modules import")

    def command(name: str, *arguments: str) -> str:
        return run(str(Path(sysconfig.get_path("scripts")) / f"fastcssl-{name}"), *arguments)

    data, trained, report = (str(folder / name) for name in ("data", "run", "report"))
    command("prep", "build", DATA, "--scenario", "class", "--tasks", "3", "--out", data)
    command("prep", "verify", data)
    command("train", "demo", "moco", "pnr", "--data", data, "--out", trained, *SMALL)
    command("eval", trained, "--probe", "linear-cached", "knn")
    command("report", trained, "--out", report)
    require((Path(report) / "index.html").stat().st_size > 10_000, "the report is empty")
    require("libjpeg" in command("doctor"), "the doctor does not report which libjpeg is used")


if __name__ == "__main__":
    main()
