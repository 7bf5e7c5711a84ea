"""A user's program, read by mypy alone (`make check`): public names have types, and misuse is seen."""

from pathlib import Path

import dataprep
import fastcssl


def everything(root: Path) -> tuple[float, str]:
    built: dataprep.BuildResult = dataprep.build_data("synthetic", root / "data", scenario="class", num_tasks=3)
    manifest: dataprep.Manifest = dataprep.split_data(root / "data", "data5", scenario="data", num_tasks=5)
    problems: tuple[str, ...] = dataprep.verify_data(root / "data").problems
    data = fastcssl.Prepared.open(root / "data")
    views: fastcssl.Policy = fastcssl.policy("pnr-moco-cifar")
    with fastcssl.Loader(data, fastcssl.LoaderConfig(policy=views, batch_size=16)) as loader:
        for batch in loader.open(fastcssl.Selection(tasks=(0,))).epoch(0):
            loss: float = fastcssl.info_nce(batch.views[0], batch.views[1], [batch.views[0]], 0.2).mean().item()
    recipe: fastcssl.Recipe = fastcssl.recipe("demo", "moco", "pnr").changed({"epochs": 1})
    outcome: fastcssl.Outcome = fastcssl.train_run(recipe, data=root / "data", out=root / "run")
    seeds: list[fastcssl.Outcome] = fastcssl.train_seeds(recipe, (5, 6), data=root / "data", out=root / "runs")
    found = fastcssl.evaluate_runs([outcome.folder, *(it.folder for it in seeds)], fastcssl.Request(probes=("knn",)))
    best: float = max(item.evaluation.metrics.A[-1] for item in found)
    page: Path = fastcssl.report_runs(root / "run").page
    seconds: float | None = fastcssl.forecast_run(recipe, data=root / "data").seconds
    record: fastcssl.RunRecord = fastcssl.read_run(root / "run")
    failed = [finding.text for section in fastcssl.diagnose() for finding in section.findings]
    fastcssl.trian_run(recipe)  # type: ignore[attr-defined]
    fastcssl.train_run(recipe, data=3, out=root)  # type: ignore[arg-type]
    fastcssl.Request(probes=("nearest",))  # type: ignore[arg-type]
    dataprep.build_data("synthetic", root, scenario="classes")  # type: ignore[arg-type]
    said = f"{built} {manifest} {problems} {loss} {page} {seconds} {record.title} {failed}"
    return best, said
