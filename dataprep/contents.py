"""Shows what a prepared folder holds: a table of its tasks, and a contact sheet of its images."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table as RichTable

from dataprep.imagefile import Pixels, decode_with_pillow
from dataprep.manifest import SPLITS, Manifest, ManifestError
from dataprep.progress import human_bytes, human_seconds, literal
from dataprep.table import Table, rows_of_ids
from dataprep.writers import DerivedFormat, Format, formats

_MAX_CLASSES = 100  # named per task
TILE_PX = 112
GAP_PX = 6
MARGIN_PX = 22
_CAPTION_PX = 34
INK, FAINT, PAPER = (28, 32, 38), (110, 118, 128), (250, 250, 248)


def task_table(
    manifest: Manifest,
    table: Table,
    *,
    seconds_by_task: Sequence[float] | None = None,
    quarantined_by_task: Sequence[int] | None = None,
) -> RichTable:
    """Returns a table with one row per task. Times and quarantined images, which only a build knows, are optional."""
    shown = RichTable(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False, collapse_padding=True)
    shown.add_column("task", justify="right")
    shown.add_column("name", no_wrap=True)
    for heading in ("classes", "train", "val", "bytes", "each", "pixels"):
        shown.add_column(heading, justify="right", no_wrap=True)
    if seconds_by_task is not None:
        shown.add_column("time", justify="right")
    if quarantined_by_task is not None:
        shown.add_column("quarantined", justify="right")
    total_bytes = 0
    for number, task in enumerate(manifest.tasks):
        rows = np.concatenate([_rows(table, manifest, number, name) for name in SPLITS])
        num_bytes = sum(int(table[f"{format}_bytes"][rows].sum()) for format in manifest.formats)
        total_bytes += num_bytes
        cells = [
            f"{number}",
            literal(task.name),
            f"{len(task.classes):,}",
            f"{task.train.count:,}",
            f"{task.val.count:,}",
            human_bytes(num_bytes),
            human_bytes(num_bytes / max(len(rows), 1)),
            _pixels(table[rows]),
        ]
        if seconds_by_task is not None:
            cells.append(human_seconds(seconds_by_task[number]))
        if quarantined_by_task is not None:
            cells.append(str(quarantined_by_task[number] or "-"))
        shown.add_row(*cells)
    if len(manifest.tasks) > 1:
        shown.add_section()
        counts = [sum(task.part(name).count for task in manifest.tasks) for name in SPLITS]
        cells = ["", "all", f"{len(manifest.classes):,}", *(f"{count:,}" for count in counts), human_bytes(total_bytes)]
        cells += [human_bytes(total_bytes / max(sum(counts), 1)), _pixels(table[table["is_stored"]])]
        if seconds_by_task is not None:
            cells.append(human_seconds(sum(seconds_by_task)))
        if quarantined_by_task is not None:
            cells.append(str(sum(quarantined_by_task) or "-"))
        shown.add_row(*cells, style="bold")
    return shown


def description(manifest: Manifest) -> str:
    """Returns the two lines that are printed above the table."""
    encoding = manifest.encoding
    stored = f"{', '.join(manifest.formats)} · resize {encoding.resize}"
    if any(known.stores == "jpeg" for name, known in formats().items() if name in manifest.formats):
        stored += f" · quality {encoding.quality} · {encoding.num_passed_through:,} JPEGs passed through untouched"
    domains = f" · domains {', '.join(manifest.domains)}" if manifest.domains else ""
    scenario = manifest.scenario
    tasks = f"{scenario.num_tasks} task{'s' * (scenario.num_tasks != 1)}"
    return f"{manifest.source.kind} · {scenario.kind} · {tasks} · order {scenario.order}{domains}\n{stored}"


def class_lines(manifest: Manifest) -> list[str]:
    """Returns one line per task with the names of its classes, or a single line if all tasks have the same classes."""
    if len({frozenset(task.classes) for task in manifest.tasks}) == 1 and len(manifest.tasks) > 1:
        return [f"classes of every task: {_class_names(manifest, sorted(manifest.tasks[0].classes))}"]
    return [
        f"classes of task {number}: {_class_names(manifest, task.classes)}"
        for number, task in enumerate(manifest.tasks)
    ]


def _class_names(manifest: Manifest, labels: list[int]) -> str:
    names = [manifest.classes[label] for label in labels[:_MAX_CLASSES]]
    rest = len(labels) - len(names)
    return ", ".join(names) + (f" and {rest:,} more, listed in the manifest" if rest else "")


def contact_sheet(manifest: Manifest, table: Table, folder: Path, *, num_columns: int = 12) -> Image.Image:
    """Returns a picture with one row of training images per task, spread evenly over the task."""
    width = 2 * MARGIN_PX + num_columns * (TILE_PX + GAP_PX) - GAP_PX
    height = 2 * MARGIN_PX + len(manifest.tasks) * (TILE_PX + _CAPTION_PX)
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    title, small = ImageFont.load_default(15), ImageFont.load_default(12)
    for number, task in enumerate(manifest.tasks):
        top = MARGIN_PX + number * (TILE_PX + _CAPTION_PX)
        heading = f"task {number} · {task.name}"
        draw.text((MARGIN_PX, top), heading, fill=INK, font=title)
        counts = f"{len(task.classes)} classes, {task.train.count:,} train, {task.val.count:,} val"
        draw.text((width - MARGIN_PX, top + 2), counts, fill=FAINT, font=small, anchor="ra")
        for column, row in enumerate(spread_rows(table, manifest, number, num_columns)):
            picture = tile(read_sample(manifest, table[row], folder))
            sheet.paste(picture, (MARGIN_PX + column * (TILE_PX + GAP_PX), top + 24))
    return sheet


def read_sample(manifest: Manifest, row: np.void, folder: Path) -> Pixels:
    """Returns one stored image as RGB, from the format that is quickest to read."""
    known = formats()
    format = min((known[name] for name in manifest.formats), key=_reading_order)
    path = manifest.shards[int(row[f"{format.name}_shard"])].path_in(folder)
    try:
        with contextlib.closing(format.reader(path)) as reader:
            content = reader.content(row)
            return decode_with_pillow(content) if isinstance(content, bytes) else content
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise ManifestError(f"{path}, sample {row['id']}: {error}. Run fastcssl-prep verify {folder}.") from None


def _reading_order(format: Format) -> tuple[bool, bool]:
    """Returns a sort key: pixels before JPEGs, which must be decoded, and streamed formats before derived ones."""
    return format.stores != "pixels", isinstance(format, DerivedFormat)


def save_png(image: Image.Image, path: Path) -> None:
    """Writes an image as a PNG file, whatever the suffix of `path`."""
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    path.write_bytes(content.getvalue())


def _rows(table: Table, manifest: Manifest, number: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    part = manifest.tasks[number].train if name == "train" else manifest.tasks[number].val
    return rows_of_ids(table, np.fromiter(part.iter_ids(), np.int64, part.count))


def spread_rows(table: Table, manifest: Manifest, number: int, count: int) -> list[int]:
    """Returns `count` rows of a task's training images, from as many classes and domains as fit, in a fixed order."""
    rows = _rows(table, manifest, number, "train")
    if not len(rows):
        raise ManifestError(f"Task {number} has no training images to draw.")
    labels = np.unique(table["label"][rows])
    domains = np.unique(table["domain"][rows])
    chosen: list[int] = []
    for i in range(count):
        label = labels[i * len(labels) // count] if len(labels) >= count else labels[i % len(labels)]
        pool = rows[(table["label"][rows] == label)]
        wanted = pool[table["domain"][pool] == domains[i % len(domains)]]
        pool = wanted if len(wanted) else pool
        chosen.append(int(pool[(i * 7) % len(pool)]))
    return chosen


def tile(pixels: Pixels) -> Image.Image:
    """Returns the centre square at the size of a tile. Tiny images are enlarged without smoothing."""
    image = Image.fromarray(np.asarray(pixels))
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((TILE_PX, TILE_PX), Image.Resampling.BICUBIC if side >= 24 else Image.Resampling.NEAREST)


def _pixels(rows: Table) -> str:
    """Returns the stored size as text, or the range of sides if the sizes differ."""
    if not len(rows):
        return "-"
    sides = np.concatenate([rows["width"], rows["height"]])
    low, high = int(sides.min()), int(sides.max())
    return f"{low}x{low}" if low == high else f"{low}-{high}"
