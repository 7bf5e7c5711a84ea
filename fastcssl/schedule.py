"""The learning rate at a moment of a task: the linear rule for the batch, warm-up, cosine. Every task starts anew."""

import math

from fastcssl.optim import OptimConfig


def lr_peak(config: OptimConfig, batch_size: int) -> float:
    """`batch_size` is global. Only this is scaled, neither warmup_start_lr nor min_lr."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    return config.lr * batch_size / 256


def lr_at(config: OptimConfig, peak: float, epoch: float, num_epochs: int) -> float:
    """`epoch` counts from the start of the task; its fraction counts only where schedule_unit is "step".

    warmup-cosine is Lightning Bolts' curve. With w warm-up epochs a line leads from warmup_start_lr in epoch 0 to the
    peak in epoch w - 1, so epochs w - 1 and w both have the peak; then half a cosine reaches min_lr at num_epochs.
    With w = 1 epoch 0 has warmup_start_lr and epoch 1 the peak; with w = 0 it is cosine (Bolts would still start low).
    A task of w epochs or fewer ends within the warm-up, which is not compressed. cosine has no warm-up.
    The peak is the highest that ever is: a warmup_start_lr or min_lr above it counts as the peak.
    Past num_epochs the rate stays where it ended.
    """
    if num_epochs < 1 or not 0 <= epoch < math.inf:
        raise ValueError(f"epoch is {epoch} of {num_epochs}; it must be finite and at least 0, of at least 1.")
    if config.schedule == "constant":
        return peak
    at = min(math.floor(epoch) if config.schedule_unit == "epoch" else epoch, num_epochs)
    num_warmup = config.warmup_epochs if config.schedule == "warmup-cosine" else 0
    if at < num_warmup:
        start = min(config.warmup_start_lr, peak)
        return min(start + at * (peak - start) / max(num_warmup - 1, 1), peak)
    if at == num_warmup:  # which may be the end too: then there is no cosine
        return peak
    end = min(config.min_lr, peak)
    return end + (peak - end) * (1 + math.cos(math.pi * (at - num_warmup) / (num_epochs - num_warmup))) / 2
