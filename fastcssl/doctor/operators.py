"""Compares the compiled operators with plain torch and float64, on the CPU or a GPU."""

from collections.abc import Iterator

import torch

from fastcssl import ops
from fastcssl.data.augment import NEUTRAL, Column, photometric_torch
from fastcssl.doctor import REPORT_IT, Finding, Section, failed, note, ok, peers, run_checks
from fastcssl.doctor.peers import Errors
from fastcssl.learn.memory import Bank
from fastcssl.ops import cards

# Rows, width and banks: tiles that are not full, many full tiles, a single row, and a bank smaller than the batch.
SHAPES = ((252, 128, (5000, 333)), (64, 64, (4096, 0)), (1, 256, (77,)), (96, 128, (40, 1000)))
TYPES = (torch.float32, torch.float16, torch.bfloat16)
TEMPERATURES = (0.05, 0.2, 1.0)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def operators(device: str) -> Section:
    place = "this CPU" if device == "cpu" else torch.cuda.get_device_name()
    missing = ops.missing(device) or ops.missing(device, "info_nce_sweep")
    if missing and device == "cpu":  # the section "Build" has reported it
        return Section(f"Operators on {place}", (note("operators", f"not checked: {missing}"),))
    if missing and torch.cuda.get_device_capability() < cards.LEAST:
        plain = note("operators", f"plain torch runs in their place: {missing}")
        return Section(f"Operators on {place}", (plain,))
    if missing:
        remedy = "Reinstall with nvcc on PATH and FASTCSSL_CUDA=1. Until then the GPU runs plain torch."
        return Section(f"Operators on {place}", (failed("operators", missing, remedy),))
    return run_checks(
        f"Operators on {place}",
        [
            ("contrastive loss", lambda: contrastive(device)),
            ("enqueue", lambda: enqueue(device)),
            ("photometry", lambda: photometry(device)),
        ],
    )


def contrastive(device: str) -> Iterator[Finding]:
    """Checks that the loss and its gradient stay within the error budget: twice plain torch's error plus 1e-5."""
    before = torch.get_float32_matmul_precision()  # "high" lets the GPU's tensor cores round float32
    torch.set_float32_matmul_precision("highest")
    try:
        for dtype in TYPES:
            worst, where, count = 0.0, "", 0
            for rows, dim, sizes in SHAPES:
                for temperature in TEMPERATURES:
                    given = peers.problem(
                        rows,
                        dim,
                        sizes,
                        dtype=dtype,
                        temperature=temperature,
                        device=device,
                        num_clusters=20,
                        seed=count,
                    )
                    expected = peers.oracle(given)
                    budget = Errors.of(peers.plain(given), expected).budget()
                    share = Errors.of(peers.ours(device)(given), expected).over(budget)
                    count += 1
                    if share >= worst:
                        worst, where = share, f"{rows} rows of {dim}, banks {sizes}, temperature {temperature}"
            name = f"loss, {str(dtype).removeprefix('torch.')} banks"
            if worst > 1:
                yield failed(
                    name,
                    f"its error is {worst:.1f} times the allowed error, at {where}",
                    f"Until this is fixed, move {library()} away; plain torch is used instead. {REPORT_IT}",
                )
            else:
                yield ok(name, f"{count} cases; values and gradients use at most {worst:.0%} of the error budget")
    finally:
        torch.set_float32_matmul_precision(before)


def enqueue(device: str) -> Finding:
    """Checks that keys are written to a bank as Bank.push does, also past its end and with more keys than rows."""
    generator = torch.Generator().manual_seed(0)
    for dtype in TYPES:
        for size, dim, counts in ((40, 64, (16, 16, 16, 3)), (7, 128, (20, 1)), (256, 128, (256, 100, 200))):
            plain, ring = (Bank(size, dim, view=0, dtype=dtype) for _ in range(2))
            ring.to(torch.device(device))
            for count in counts:
                keys_GD = torch.randn(count, dim, generator=generator)
                ops.enqueue(plain.rows_KD, keys_GD, plain.pointer, plain.filled, impl="torch")
                ops.enqueue(ring.rows_KD, keys_GD.to(device), ring.pointer, ring.filled, impl=device)  # type: ignore[arg-type]
            same = torch.equal(plain.pointer, ring.pointer.cpu()) and torch.equal(plain.filled, ring.filled.cpu())
            step = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
            if not same or not torch.allclose(plain.rows_KD.float(), ring.rows_KD.cpu().float(), atol=step, rtol=0):
                return failed(
                    "enqueue", f"a bank of {size} {dtype} rows of {dim} differs from plain torch's", REPORT_IT
                )
    return ok("enqueue", "9 banks match plain torch, also when keys wrap around or outnumber the rows")


def library() -> str:
    """Returns the path of the operators' library."""
    return str(ops._PATH or "fastcssl/ops/_ops*.so")


def photometry(device: str) -> Finding:
    """Checks that the photometric augmentations give plain torch's pixels."""
    generator = torch.Generator().manual_seed(0)
    crops = torch.randint(0, 256, (24, 37, 41, 3), generator=generator, dtype=torch.uint8)
    columns = torch.tensor(NEUTRAL).repeat(24, 1)
    columns[:, Column.FLIP] = torch.arange(24) % 2
    for column in (Column.BRIGHTNESS, Column.CONTRAST, Column.SATURATION):
        columns[:, column] = 0.6 + 0.8 * torch.rand(24, generator=generator)
    columns[:, Column.HUE] = 0.2 * torch.rand(24, generator=generator) - 0.1
    columns[:, Column.ORDER] = torch.arange(24)
    columns[::3, Column.SIGMA] = 1.3
    columns[::5, Column.GRAY] = 1
    expected = photometric_torch(crops, columns, MEAN, STD, torch.float32)
    found = ops.photometric(crops.to(device), columns.to(device), MEAN, STD, torch.float32).cpu()
    worst = float((found - expected).abs().max() * min(STD) * 255)
    if not worst <= 0.06:
        return failed("photometry", f"it is off by {worst:.2f} grey levels", f"Use --augment torch. {REPORT_IT}")
    return ok("photometry", f"24 images, in all orders of the jitter; within {worst:.3f} grey levels of plain torch")
