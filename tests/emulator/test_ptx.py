"""The PTX translator and its watch: right numbers, and known races, conflicts and sectors counted as they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from emulator import emulate, ptx

TOY = emulate.EMULATOR / "toy_ptx.cu"
KERNELS = ["exchange", "vectors", "scattered"]


def toy(name: str, folder: Path) -> tuple[list[float], dict[str, Any]]:
    emulate.need_nvcc()
    executable = emulate.build_ptx(TOY, wanted=KERNELS)
    done = emulate.run(executable, b"", name, report=folder / "report.json")
    assert done.returncode == 0, done.stderr.decode()
    return [float(word) for word in done.stdout.split()], json.loads((folder / "report.json").read_text())


def conflicts(report: dict[str, Any]) -> set[float]:
    shared = [site for site in report["sites"] if site["least_wavefronts"]]
    return {site["wavefronts"] / site["least_wavefronts"] for site in shared}


@pytest.mark.parametrize(("name", "degree"), [("exchange", 1), ("two_apart", 2), ("32_apart", 32)])
def test_bank_conflicts_of_words(name: str, degree: int, tmp_path: Path) -> None:
    out, report = toy(name, tmp_path)
    assert out == [float(i ^ 1) for i in range(64)]
    assert report["races"] == 0
    assert conflicts(report) == {degree}


@pytest.mark.parametrize(("name", "degree"), [("vectors", 1), ("column", 8)])
def test_bank_conflicts_of_vectors(name: str, degree: int, tmp_path: Path) -> None:
    out, report = toy(name, tmp_path)
    assert out == [float(i) for i in range(64)]
    assert degree in conflicts(report)


def test_sectors(tmp_path: Path) -> None:
    _, report = toy("scattered", tmp_path)
    assert [(site["sectors"], site["least_sectors"]) for site in report["sites"]] == [(32, 4), (32, 4)]


def test_a_race_is_counted_and_named(tmp_path: Path) -> None:
    _, report = toy("racy", tmp_path)
    assert report["races"] > 0
    assert "exchange" in report["first_race"] and " by thread " in report["first_race"]


def test_what_is_not_known_is_an_error() -> None:
    text = ".visible .entry f(\n)\n{\n\t.reg .b32 %r<3>;\n\tpopc.b32 %r1, %r2;\n\tret;\n}\n"
    with pytest.raises(ValueError, match=r"line 5 of the PTX, 'popc.b32 %r1, %r2'.*Teach it"):
        ptx.translate(text, ["f"])
    with pytest.raises(ValueError, match="no kernel is named"):
        ptx.translate(text, ["g"])
