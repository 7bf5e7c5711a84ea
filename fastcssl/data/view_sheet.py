"""Draws source images beside their augmented views. Only here does data preparation use the trainer's code."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from dataprep.contents import FAINT, GAP_PX, INK, MARGIN_PX, PAPER, TILE_PX, read_sample, spread_rows, tile
from dataprep.errors import PrepError
from fastcssl.data.backends import LoaderError
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import ViewSpec

_NUM_SAMPLES = 6
_NUM_EPOCHS = 4
_CAPTION_PX = 26


def view_sheet(where: Path, policy_name: str) -> Image.Image:
    """Returns a picture with one row per sample: the stored image, then all its views in several epochs."""
    try:
        views = policy(policy_name)
    except ValueError as error:
        raise PrepError(str(error)) from None
    data = Prepared.open(where)
    rows = _rows(data)
    columns = [[tile(read_sample(data.manifest, data.table[row], data.folder)) for row in rows]]
    config = LoaderConfig(policy=views, batch_size=len(rows), last="pad", num_threads=1)
    tasks = tuple(range(len(data.manifest.tasks)))
    selection = Selection(tasks=tasks, ids=data.table["id"][rows], order="sequential")
    try:
        with Loader(data, config) as loader:
            stream = loader.open(selection)
            for epoch in range(_NUM_EPOCHS):
                batch = next(iter(stream.epoch(epoch)))
                place = {int(i): n for n, i in enumerate(batch.id.tolist())}
                for view, spec in zip(batch.views, views, strict=True):
                    pixels = _as_bytes(view, spec)
                    columns.append([tile(pixels[place[int(data.table["id"][row])]]) for row in rows])
    except LoaderError as error:
        raise PrepError(str(error)) from None
    return _paste(columns, policy_name, len(views))


def _rows(data: Prepared) -> list[int]:
    num_tasks = len(data.manifest.tasks)
    found = [spread_rows(data.table, data.manifest, i % num_tasks, _NUM_SAMPLES)[i] for i in range(_NUM_SAMPLES)]
    return list(dict.fromkeys(found))


def _as_bytes(view_N3HW: torch.Tensor, spec: ViewSpec) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    levels = ((view_N3HW.float() * std + mean) * 255).round().clamp(0, 255)
    return levels.permute(0, 2, 3, 1).to(torch.uint8).contiguous().numpy()


def _paste(columns: list[list[Image.Image]], name: str, num_views: int) -> Image.Image:
    step = TILE_PX + GAP_PX
    extra = 2 * GAP_PX  # separates the stored image from its views
    width = 2 * MARGIN_PX + len(columns) * step - GAP_PX + extra
    height = 2 * MARGIN_PX + _CAPTION_PX + len(columns[0]) * step - GAP_PX
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    draw.text((MARGIN_PX, MARGIN_PX - 4), "stored", fill=INK, font=font)
    for c, tiles in enumerate(columns):
        left = MARGIN_PX + c * step + (extra if c else 0)
        if c:
            epoch, view = divmod(c - 1, num_views)
            draw.text((left, MARGIN_PX - 2), f"epoch {epoch} · view {view + 1}", fill=FAINT, font=small)
        for r, picture in enumerate(tiles):
            sheet.paste(picture, (left, MARGIN_PX + _CAPTION_PX + r * step))
    draw.text((width - MARGIN_PX, height - MARGIN_PX + 4), name, fill=FAINT, font=small, anchor="ra")
    return sheet
