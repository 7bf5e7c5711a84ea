"""Continual self-supervised learning on images, as fast as the hardware allows.

Everything that the commands do is available from Python (docs/python.md): `recipe`, `train_run`, `evaluate_runs`,
`report_runs` and `diagnose`. `Prepared`, `Loader`, `info_nce` and `fastcssl.learn` are building blocks for other
programs. The package `dataprep` prepares the images. A function's name is a verb and an object (`train_run`), because
plain verbs are packages (`fastcssl.train`). Names are loaded when they are first used, so importing this package does
not import torch.
"""

from typing import TYPE_CHECKING

from dataprep.lazy_exports import homes, on_demand

if TYPE_CHECKING:
    from fastcssl.api import evaluate_runs, forecast_run, train_run, train_seeds
    from fastcssl.config.config import Config
    from fastcssl.config.recipes import RECIPES, Recipe, recipe
    from fastcssl.data.loader import Batch, Loader, LoaderConfig
    from fastcssl.data.policies import policy
    from fastcssl.data.prepared import Prepared, Selection
    from fastcssl.data.views import Policy, ViewSpec
    from fastcssl.doctor.checks import diagnose
    from fastcssl.errors import Diverged, UserError
    from fastcssl.evaluate.options import Evaluated, Request
    from fastcssl.learn.encoder_file import load_encoder
    from fastcssl.ops import info_nce
    from fastcssl.report import Report, report_runs
    from fastcssl.report.runs import RunRecord, read_run
    from fastcssl.runs.results import Evaluation
    from fastcssl.train.forecast import Forecast
    from fastcssl.train.session import Outcome

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

if not TYPE_CHECKING:  # type checkers read the imports above, so they notice misspelt names
    _HOME = homes(
        {
            "api": ("evaluate_runs", "forecast_run", "train_run", "train_seeds"),
            "config.config": ("Config",),
            "data.prepared": ("Prepared", "Selection"),
            "doctor.checks": ("diagnose",),
            "errors": ("Diverged", "UserError"),
            "train.forecast": ("Forecast",),
            "data.loader": ("Batch", "Loader", "LoaderConfig"),
            "learn.encoder_file": ("load_encoder",),
            "ops": ("info_nce",),
            "config.recipes": ("RECIPES", "Recipe", "recipe"),
            "report": ("Report", "report_runs"),
            "report.runs": ("RunRecord", "read_run"),
            "evaluate.options": ("Evaluated", "Request"),
            "runs.results": ("Evaluation",),
            "train.session": ("Outcome",),
            "data.policies": ("policy",),
            "data.views": ("Policy", "ViewSpec"),
        }
    )
    __getattr__, __dir__ = on_demand(globals(), _HOME)
