"""Warnings at the start of a run about settings whose effect the user may not expect."""

from collections.abc import Iterator, Mapping

import torch

from fastcssl import ops
from fastcssl.config.recipes import COMMAND_LINE, RECIPES
from fastcssl.data.prepared import Selection
from fastcssl.learn.precision import BF16_SINCE
from fastcssl.learn.strategies.pnr import PnrConfig
from fastcssl.train.build import Run


def startup_warnings(run: Run, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields one sentence per warning. `sources`: the source of each setting, by dotted key."""
    config, method = run.config, run.method
    yield from _about_the_card(run.device, run.amp_dtype)
    if config.accumulate > 1 and method.in_batch:
        yield (
            f"{method.name} compares the samples of a batch with each other; with --accumulate {config.accumulate} it "
            f"sees only {config.batch_size // config.accumulate} at a time, which changes the training."
        )
    budget = config.strategy.budget
    if run.strategy.replays and budget is not None and len(run.tasks) > 1:
        earlier = run.task(len(run.tasks) - 1).earlier
        past = len(run.data.rows(Selection(tasks=earlier)))
        if budget > past:
            yield (
                f"--strategy.budget {budget} is more than the {past} images of all tasks before the last: "
                f"{run.strategy.name} keeps every one of them."
            )
    kind = run.data.manifest.source.kind
    weighs = isinstance(config.strategy, PnrConfig) and config.strategy.pn2 and not method.contrastive
    if weighs and kind != RECIPES[config.recipe].source and sources.get("strategy.weight") != COMMAND_LINE:
        assert isinstance(config.strategy, PnrConfig)
        yield (
            f"The best weight of PNR's pseudo-negatives for {method.name} depends on the data, and none is known for "
            f"{kind}: {config.strategy.weight:g} is used, from the recipe {config.recipe}. "
            "Use --strategy.weight to change it."
        )


def _about_the_card(device: torch.device, amp_dtype: torch.dtype | None) -> Iterator[str]:
    if device.type != "cuda":
        return
    if reason := ops.missing(device) or ops.missing(device, "info_nce_sweep"):
        yield (
            f"The compiled CUDA operators are not used: {reason}. Plain torch computes the photometric part of the "
            "views and the loss against banks: the same results, more slowly."
        )
    capability = torch.cuda.get_device_capability(device)
    if amp_dtype is torch.bfloat16 and capability < BF16_SINCE:
        seen = "{}.{}".format(*capability)
        yield (
            f"This card has compute capability {seen} and only emulates bfloat16, slowly. Use --precision fp16 or auto."
        )
