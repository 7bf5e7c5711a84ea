"""Problems for the CUDA InfoNCE kernels, their answers in float64, and the error that is allowed."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SINGLE, EXACT = "tf32", "tf32x3"
Answer = tuple[Tensor, Tensor, Tensor]  # loss_M, by_scaled_MD, by_positive_MD


@dataclass
class Problem:
    scaled_MD: Tensor
    positive_MD: Tensor
    banks: list[Tensor]
    filled: list[int | None] = field(default_factory=list)
    own_M: Tensor | None = None
    positive_in_denominator: bool = True
    precision: str = EXACT
    wants_scaled: bool = True
    wants_positive: bool = True

    def stdin(self) -> bytes:
        filled = self.filled or [None] * len(self.banks)
        head = [*self.scaled_MD.shape, len(self.banks), (SINGLE, EXACT).index(self.precision)]
        head += [self.positive_in_denominator, self.own_M is not None, self.wants_scaled, self.wants_positive]
        parts = [np.array(head, np.int64).tobytes(), bytes_of(self.scaled_MD), bytes_of(self.positive_MD)]
        if self.own_M is not None:
            parts.append(bytes_of(self.own_M))
        for bank, count in zip(self.banks, filled, strict=True):
            numbers = [len(bank), TYPES.index(bank.dtype), -1 if count is None else count]
            parts += [np.array(numbers, np.int64).tobytes(), bytes_of(bank)]
        return b"".join(parts)

    def answer_of(self, stdout: bytes) -> Answer:
        """What was not asked for is empty."""
        flat = torch.frombuffer(bytearray(stdout), dtype=torch.float32).double() if stdout else torch.zeros(0).double()
        (num_rows, dim), size = self.scaled_MD.shape, self.scaled_MD.numel()
        sizes = [num_rows, size * self.wants_scaled, size * self.wants_positive]
        assert len(flat) == sum(sizes), "standard output has the wrong length"
        loss_M, by_scaled, by_positive = flat.split(sizes)
        return loss_M, by_scaled.view(-1, dim), by_positive.view(-1, dim)


def bytes_of(values: Tensor) -> bytes:
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.view(torch.int16)
    return values.contiguous().numpy().tobytes()


def visible(problem: Problem) -> tuple[Tensor, Tensor]:
    """All keys that any row sees, and which row sees which."""
    filled = problem.filled or [None] * len(problem.banks)
    parts, seen = [], []
    for bank, count in zip(problem.banks, filled, strict=True):
        count = len(bank) if count is None else min(count, len(bank))
        sees = torch.ones(len(problem.scaled_MD), count, dtype=torch.bool)
        if problem.own_M is not None:
            sees &= torch.arange(count) != problem.own_M[:, None]
        parts.append(bank[:count].double())
        seen.append(sees)
    dim, num_rows = problem.scaled_MD.shape[1], len(problem.scaled_MD)
    return torch.cat([torch.zeros(0, dim).double(), *parts]), torch.cat([torch.ones(num_rows, 0).bool(), *seen], 1)


def to_tf32(values: Tensor) -> Tensor:
    bits = (values.float().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).double()


def solve(problem: Problem, dtype: torch.dtype = torch.float64, rounded: torch.dtype | None = None) -> Answer:
    """The definition in csrc/infonce/infonce.h, in `dtype`. `rounded`: operands of both products are rounded first, to
    this type or, for float32, to TF32: what plain torch does on tensor cores."""
    keys_KD, seen_MK = visible(problem)
    scaled_MD, positive_MD = problem.scaled_MD.to(dtype), problem.positive_MD.to(dtype)

    def operand(values: Tensor) -> Tensor:
        if rounded is None:
            return values.to(dtype)
        return (to_tf32(values) if rounded == torch.float32 else values.to(rounded)).to(dtype)

    keys = operand(keys_KD)
    logits_MK = (operand(scaled_MD) @ keys.T).masked_fill(~seen_MK, -torch.inf)
    sees_M = seen_MK.any(1)
    top_M = (
        logits_MK.amax(1, keepdim=True).nan_to_num(neginf=0.0)
        if len(keys)
        else torch.zeros(len(scaled_MD), 1).to(dtype)
    )
    weights_MK = (logits_MK - top_M).exp()
    sums_M = weights_MK.sum(1).masked_fill(~sees_M, 1)
    mean_MD = operand(weights_MK) @ keys / sums_M[:, None]
    excess_M = sums_M.log() + top_M[:, 0] - (scaled_MD * positive_MD).sum(1)
    loss_M, share_M = excess_M, torch.ones_like(excess_M)
    if problem.positive_in_denominator:
        loss_M, share_M = torch.nn.functional.softplus(excess_M, threshold=60), excess_M.sigmoid()
    share_M = share_M * sees_M
    by_scaled_MD = share_M[:, None] * (mean_MD - positive_MD)
    by_positive_MD = -share_M[:, None] * scaled_MD
    return (loss_M * sees_M).double(), by_scaled_MD.double(), by_positive_MD.double()


def worst(problem: Problem, found: Answer) -> float:
    """The largest error in units of what is allowed: twice that of plain torch with the same roundings, plus 1e-5."""
    truth = solve(problem)
    if problem.precision == EXACT:
        plain = [solve(problem, torch.float32)]
    else:
        plain = [solve(problem, rounded=dtype) for dtype in {bank.dtype for bank in problem.banks}]
    ratios = []
    for i, (values, wanted) in enumerate(zip(found, truth, strict=True)):
        if len(values) == 0 < len(wanted):
            continue  # not asked for
        allowed = 2 * max((distance(answer[i], wanted) for answer in plain), default=0.0) + 1e-5
        ratios.append(distance(values, wanted) / allowed)
    return max(ratios)


def distance(values: Tensor, truth: Tensor) -> float:
    """Infinite when anything is not a number."""
    if not values.isfinite().all():
        return torch.inf
    return float((values - truth).abs().max()) if truth.numel() else 0.0


def unit(rng: np.random.Generator, *shape: int) -> Tensor:
    drawn = rng.standard_normal(shape)
    return torch.from_numpy(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).float()


def draw(
    seed: int,
    num_rows: int,
    dim: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float16,
    temperature: float = 0.2,
    precision: str = EXACT,
    **more: object,
) -> Problem:
    """Unit queries near their positives, and some near a key, so that logits reach 1 / temperature."""
    rng = np.random.default_rng(seed)
    banks = [unit(rng, size, dim) for size in sizes]
    query = unit(rng, num_rows, dim)
    positive = torch.nn.functional.normalize(query + 0.5 * unit(rng, num_rows, dim), dim=1)
    largest = max(banks, key=len) if banks else query
    if len(largest):
        query[::3] = torch.nn.functional.normalize(
            query[::3] + 2 * largest[rng.integers(0, len(largest), len(query[::3]))], dim=1
        )
    banks = [bank.to(dtype) for bank in banks]
    return Problem(query / temperature, positive, banks, precision=precision, **more)  # type: ignore[arg-type]
