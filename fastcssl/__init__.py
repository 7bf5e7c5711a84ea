"""Continual self-supervised learning on images, as fast as the hardware allows.

Everything that the commands do, from Python (docs/python.md): `recipe`, `train_run`, `evaluate_runs`, `report_runs`,
`diagnose`; the parts to build with are `Prepared`, `Loader`, `info_nce` and the packages `methods` and `strategies`.
Images are prepared by the package `dataprep`. A function is named by its verb and what it works on, as plain verbs are
modules (`fastcssl.train` is the loop). Names are looked up when they are first used: importing this needs no torch.
"""

from typing import TYPE_CHECKING

from dataprep.names import homes, on_demand

if TYPE_CHECKING:
    from fastcssl.api import evaluate_runs, forecast_run, train_run, train_seeds
    from fastcssl.config import Config
    from fastcssl.data import Prepared, Selection
    from fastcssl.doctor.looks import diagnose
    from fastcssl.errors import Diverged, UserError
    from fastcssl.forecast import Forecast
    from fastcssl.loaders.stream import Batch, Loader, LoaderConfig
    from fastcssl.nets import load_encoder
    from fastcssl.ops import info_nce
    from fastcssl.recipes import RECIPES, Recipe, recipe
    from fastcssl.report import Report, report_runs
    from fastcssl.report.runs import RunRecord, read_run
    from fastcssl.request import Evaluated, Request
    from fastcssl.results import Evaluation
    from fastcssl.session import Outcome
    from fastcssl.views import Policy, ViewSpec, policy

__version__ = "0.1.0"
__all__ = [
    "RECIPES",
    "Batch",
    "Config",
    "Diverged",
    "Evaluated",
    "Evaluation",
    "Forecast",
    "Loader",
    "LoaderConfig",
    "Outcome",
    "Policy",
    "Prepared",
    "Recipe",
    "Report",
    "Request",
    "RunRecord",
    "Selection",
    "UserError",
    "ViewSpec",
    "__version__",
    "diagnose",
    "evaluate_runs",
    "forecast_run",
    "info_nce",
    "load_encoder",
    "policy",
    "read_run",
    "recipe",
    "report_runs",
    "train_run",
    "train_seeds",
]

if not TYPE_CHECKING:  # a type checker reads the imports above, and so knows a misspelt name
    _HOME = homes(
        {
            "api": ("evaluate_runs", "forecast_run", "train_run", "train_seeds"),
            "config": ("Config",),
            "data": ("Prepared", "Selection"),
            "doctor.looks": ("diagnose",),
            "errors": ("Diverged", "UserError"),
            "forecast": ("Forecast",),
            "loaders.stream": ("Batch", "Loader", "LoaderConfig"),
            "nets": ("load_encoder",),
            "ops": ("info_nce",),
            "recipes": ("RECIPES", "Recipe", "recipe"),
            "report": ("Report", "report_runs"),
            "report.runs": ("RunRecord", "read_run"),
            "request": ("Evaluated", "Request"),
            "results": ("Evaluation",),
            "session": ("Outcome",),
            "views": ("Policy", "ViewSpec", "policy"),
        }
    )
    __getattr__, __dir__ = on_demand(globals(), _HOME)
