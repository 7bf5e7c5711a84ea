"""The PTX that nvcc makes of the InfoNCE kernels, translated and run against float64, each memory access watched."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import emulate
from infonce_problems import EXACT, SINGLE, Problem, bytes_of, draw, worst

from fastcssl.learn.memory import Bank

KERNEL = emulate.CSRC / "infonce" / "infonce_cuda.cu"
DRIVER = emulate.EMULATOR / "infonce_main.cpp"
HALF, BFLOAT, FLOAT = "6__half", "13__nv_bfloat16", "f"
COMBINE = "combine_splits"


def name_of(kind: str, exact: bool, dim: int, few: bool = False) -> str:
    return f"sweep_banksI{kind}Lb{int(exact)}ELi{dim}ELb{int(few)}E"


# Every way in which operands are loaded, split and stored; widths and types mixed so that each occurs.
SWEEPS = {
    name_of(HALF, False, 64): (70, 64, torch.float16, SINGLE),
    name_of(HALF, False, 64, few=True): (20, 48, torch.float16, SINGLE),
    name_of(BFLOAT, False, 128, few=True): (33, 128, torch.bfloat16, SINGLE),
    name_of(HALF, False, 256): (40, 256, torch.float16, SINGLE),
    name_of(HALF, True, 64): (30, 64, torch.float16, EXACT),
    name_of(BFLOAT, True, 256): (17, 200, torch.bfloat16, EXACT),
    name_of(FLOAT, False, 64): (30, 64, torch.float32, SINGLE),
    name_of(FLOAT, True, 128): (40, 128, torch.float32, EXACT),
}
OTHERS = [COMBINE, "write_keys", "move_pointers"]


def executable() -> Path:
    emulate.need_nvcc()
    return emulate.build_ptx(KERNEL, DRIVER, wanted=[*SWEEPS, *OTHERS])


def problem_of(kernel: str) -> Problem:
    num_rows, dim, dtype, precision = SWEEPS[kernel]
    own = torch.arange(num_rows) * 2
    return draw(1, num_rows, dim, (100, 70, 1), dtype, precision=precision, own_M=own, filled=[None, 61, None])


def checked(sites: list[dict[str, Any]]) -> None:
    """The bounds on a sweep's memory accesses. Keys and queries are read without a bank conflict, keys come in whole
    sectors. Queries are stored once a block, in the order of fragments: up to four wavefronts for one. A lane of a
    float32 sweep writes its sums as two times 16 bytes of one sector. Of the 8 bytes a row and split that go with the
    sums, each is alone in its sector."""
    ratios: dict[str, float] = {}
    for opcode in {site["opcode"] for site in sites}:
        same = [site for site in sites if site["opcode"] == opcode]
        for unit in ("wavefronts", "sectors"):
            least = sum(site[f"least_{unit}"] for site in same)
            if least:
                ratios[f"{opcode} {unit}"] = sum(site[unit] for site in same) / least
    for what, ratio in ratios.items():
        opcode, unit = what.split()
        if unit == "wavefronts":
            assert ratio <= (4 if opcode.startswith("st.shared") else 1), ratios
        elif opcode.startswith("cp.async") or opcode == "ld.global.f32":
            assert ratio == 1, ratios
        elif opcode.startswith("st.global"):
            alone = opcode == "st.global.v2.f32" and "st.global.v4.f32 sectors" in ratios
            assert ratio <= (4 if alone else 2 if opcode == "st.global.v4.f32" else 1.25), ratios


@pytest.mark.parametrize("kernel", SWEEPS)
def test_numbers_races_conflicts_sectors(kernel: str, tmp_path: Path) -> None:
    problem = problem_of(kernel)
    done = emulate.run(executable(), problem.stdin(), "sweep", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stderr.decode()
    assert worst(problem, problem.answer_of(done.stdout)) < 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["races"] == 0, report["first_race"]
    ran = {site["kernel"] for site in report["sites"] if site["accesses"]}
    assert len(ran) == 2 and any(kernel in name for name in ran) and any(COMBINE in name for name in ran)
    checked([site for site in report["sites"] if kernel in site["kernel"]])


def test_the_source_and_its_ptx_agree() -> None:
    """To a few roundings: nvcc contracts to fused multiply-adds where g++ need not."""
    problem = problem_of(name_of(HALF, True, 64))
    outputs = [
        emulate.run(program, problem.stdin(), "sweep").stdout
        for program in (executable(), emulate.build(KERNEL, DRIVER))
    ]
    for ours, other in zip(*map(problem.answer_of, outputs), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


def test_enqueue(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    banks = [Bank(23, 40, view=0, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    keys = [torch.from_numpy(rng.standard_normal((count, 40))).float() for count in (20, 30, 1)]
    parts = [np.array([40, len(banks)], np.int64).tobytes()]
    for i, (bank, keys_GD) in enumerate(zip(banks, keys, strict=True)):
        bank.pointer.fill_(9 + i)
        bank.filled.fill_(11)
        numbers = np.array([23, i, 1, 9 + i, 11, len(keys_GD)], np.int64)
        parts += [numbers.tobytes(), bytes_of(bank.rows_KD), bytes_of(keys_GD)]
    done = emulate.run(executable(), b"".join(parts), "enqueue", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stderr.decode()
    at = 0
    for bank, keys_GD in zip(banks, keys, strict=True):
        bank.push(keys_GD)
        assert np.frombuffer(done.stdout[at : at + 16], np.int64).tolist() == [int(bank.pointer), int(bank.filled)]
        size = bank.rows_KD.numel() * bank.rows_KD.element_size()
        rows_KD = torch.frombuffer(bytearray(done.stdout[at + 16 : at + 16 + size]), dtype=bank.rows_KD.dtype)
        ulp = torch.finfo(bank.rows_KD.dtype).eps
        torch.testing.assert_close(rows_KD.view_as(bank.rows_KD), bank.rows_KD, rtol=2 * ulp, atol=1e-9)
        at += 16 + size


# ---- faults in the PTX ----------------------------------------------------------------------------------------------


def replaced(text: str, kernel: str, pattern: str, new: str, index: int) -> str:
    """The text with the index-th match of `pattern` in this kernel replaced."""
    begin = text.index("\n{\n", re.search(rf"\.entry \w*{kernel}", text).start())  # type: ignore[union-attr]
    end = text.index("\n}\n", begin)
    matches = list(re.finditer(pattern, text[begin:end]))
    match = matches[index]
    return text[: begin + match.start()] + match.expand(new) + text[begin + match.end() :]


FAULTS = {
    "first barrier": (r"bar\.sync\s+0", "mov.u32 %r1, %r1", 0),
    "barrier of a bank": (r"bar\.sync\s+0", "mov.u32 %r1, %r1", 1),
    "barrier of a tile": (r"bar\.sync\s+0", "mov.u32 %r1, %r1", -1),
    "wait for one group fewer": (r"cp\.async\.wait_group\s+1", "cp.async.wait_group 2", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_races(fault: str, tmp_path: Path) -> None:
    emulate.need_nvcc()
    kernel = name_of(HALF, False, 64)
    pattern, new, index = FAULTS[fault]
    program = emulate.build_ptx(
        KERNEL,
        DRIVER,
        wanted=[kernel, COMBINE],
        mutate=lambda text: replaced(text, kernel, pattern, new, index),
    )
    done = emulate.run(program, problem_of(kernel).stdin(), "sweep", multiprocessors=1, report=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["races"] > 0, done.stderr.decode()
