"""Turns images on disk into task-split, checksummed shards and a manifest. The command is `fastcssl-prep`.

The Python functions (docs/python.md) are `build_data`, `split_data`, `verify_data`, `draw_sheet` and `load_manifest`.
Names are looked up when they are first used, so importing this package costs almost nothing.
"""

from typing import TYPE_CHECKING

from dataprep.lazy_exports import homes, on_demand

if TYPE_CHECKING:
    from dataprep.api import build_data, draw_sheet, split_data, verify_data
    from dataprep.build import BuildJob, BuildResult
    from dataprep.errors import Interrupted, PrepError
    from dataprep.manifest import Manifest, ManifestError, load_manifest
    from dataprep.verify import Verification

__all__ = [
    "BuildJob",
    "BuildResult",
    "Interrupted",
    "Manifest",
    "ManifestError",
    "PrepError",
    "Verification",
    "build_data",
    "draw_sheet",
    "load_manifest",
    "split_data",
    "verify_data",
]

if not TYPE_CHECKING:  # type checkers read the imports above, so they can report a misspelt name
    _HOME = homes(
        {
            "api": ("build_data", "draw_sheet", "split_data", "verify_data"),
            "build": ("BuildJob", "BuildResult"),
            "errors": ("Interrupted", "PrepError"),
            "manifest": ("Manifest", "ManifestError", "load_manifest"),
            "verify": ("Verification",),
        }
    )
    __getattr__, __dir__ = on_demand(globals(), _HOME)
