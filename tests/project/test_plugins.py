"""docs/plugins.md is true: its package, found by entry points, is listed, configured, trained and resumed.

So are the README's: files in the folders of methods, strategies and loaders.
"""

import math
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from lab import Lab
from small_runs import lines, prepared, run, tiny
from standins import listed_photos

import dataprep.cli
from dataprep import build_data
from fastcssl.cli import train as command
from fastcssl.config.recipes import OURS, flat, recipe
from fastcssl.data import backends as loaders
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import pair
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.learn import methods, strategies
from fastcssl.learn.methods import Setting
from fastcssl.learn.nets import build_encoder
from fastcssl.learn.replay import as_inputs
from fastcssl.learn.step import Step, optimise

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
SOURCES = re.findall(r"`my_methods/(\w+)\.py`.*?```python\n(.*?)```", DOCUMENT, re.DOTALL)
GROUPS = tomllib.loads(re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)[0])["project"]["entry-points"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installed as pip would: modules on the path, and beside them what entry points they have."""
    site = tmp_path / "site"
    (site / "my_methods").mkdir(parents=True)
    (site / "my_methods" / "__init__.py").touch()
    for name, source in SOURCES:
        (site / "my_methods" / f"{name}.py").write_text(source, encoding="utf-8")
    info = site / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in GROUPS.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("COLUMNS", "100")
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_methods"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("plugins") / "data")


def test_the_examples_are_ten_lines() -> None:
    assert [name for name, _ in SOURCES] == ["hard", "near", "crops", "listed"]
    for name, source in SOURCES:
        _, _, code = source.partition('"""\n')  # the first line is for --list
        counted = [line for line in code.splitlines() if line and not line.startswith(("from ", "import ", "@"))]
        assert len(counted) <= (13 if "def views" in source else 10), name
        assert max(map(len, source.splitlines())) <= 120


def test_they_are_known_by_name(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "hard" in methods.names() and "near" in strategies.names()
    assert methods.find("hard").__module__ == "my_methods.hard"
    assert Path(sys.modules["my_methods.hard"].__file__ or "").is_relative_to(package)
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"hard +Hard SimCLR: learns only from the rows of a batch", out)
    assert re.search(r"near +Near: pulls the weights to where the last task left them\.", out)
    assert command.main(["demo", "hard", "near", "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"--method\.share 0\.5 +of the rows", out) and "--strategy.weight 0.01" in out
    assert command.main(["demo", "hadr", "near"]) == 2
    assert "Did you mean 'hard'?" in capsys.readouterr().err


@pytest.mark.usefixtures("package")
def test_a_recipe_gives_them_its_training_and_leaves_them_their_defaults() -> None:
    made = recipe("imagenet100-class5", "hard", "near")
    values = dict(flat(made.config))
    assert (values["epochs"], values["optim.name"], values["views.policy"]) == (400, "lars", "hard-imagenet")
    assert made.config.views.views() == pair("imagenet")
    assert values["method.share"] == 0.5 and made.sources["method.share"] == OURS


@pytest.mark.usefixtures("package")
def test_the_command_trains_them(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    words = ["demo", "hard", "near", "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    small = ["--epochs", "1", "--batch-size", "16", "--encoder.name", "resnet18-w8", "--views.size-px", "16"]
    small += ["--method.hidden", "16", "--method.dim", "8", "--method.share", "0.25", "--expect.num-tasks", "2"]
    assert command.main([*words, *small, "--log-every", "1", "--num-threads", "1", "--precision", "fp32"]) == 0
    capsys.readouterr()
    terms = {line["task"]: set(line["terms"]) for line in lines(tmp_path / "run")}
    assert terms == {0: {"loss"}, 1: {"loss", "near"}}
    # They go on from a checkpoint.
    assert run(tiny("hard", "near", epochs=1, run={"stop_after_task": 0}), data, tmp_path / "two").status == "stopped"
    assert run(tiny("hard", "near", epochs=1), data, tmp_path / "two").status == "finished"


@pytest.mark.usefixtures("package")
def test_eight_views_of_two_sizes_make_two_steps(data: Path) -> None:
    config = tiny("crops", "finetune").config
    setting = Setting(seed=config.seed)
    method = methods.build(config.method, build_encoder(config.encoder, config.seed, 16), setting)
    step = Step(method, strategies.build(config.strategy, setting)).train()
    optimizer = torch.optim.SGD(step.groups(), lr=0.05)
    before = [p.detach().clone() for p in method.parameters()]
    loader_config = LoaderConfig(policy=config.views.views(), batch_size=16, seed=config.seed, num_threads=1)
    with Loader(Prepared.open(data), loader_config) as loader:
        for batch in islice(loader.open(Selection(tasks=(0,))).epoch(0), 2):
            assert [tuple(view.shape) for view in batch.views] == [(16, 3, 16, 16)] * 2 + [(16, 3, 6, 6)] * 6
            assert len({float(view.sum()) for view in batch.views}) == 8  # each is drawn anew
            terms = optimise(step, as_inputs(batch, torch.float32), optimizer, torch.amp.GradScaler(enabled=False))
            assert set(terms) == {"loss"} and terms["loss"].isfinite()
    assert not any(torch.equal(p, q) for p, q in zip(method.parameters(), before, strict=True) if p.ndim > 1)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("strategy", ["finetune", "cassle", "der", "lump"])
def test_the_command_trains_eight_views(
    strategy: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    made = tiny("crops", strategy, epochs=1)
    assert made.config.views.policy == "crops-cifar" and made.sources["views.policy"] == OURS
    assert run(made, data, tmp_path / "run").status == "finished"
    assert all(math.isfinite(sum(line["terms"].values())) for line in lines(tmp_path / "run"))
    assert command.main(["demo", "crops", "pnr", "--data", str(data), "--out", str(tmp_path / "no")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "pnr takes exactly 2 views of an image, but the policy crops-cifar has 8. Use a --views.policy of 2" in said
    words = ["demo", "moco", "pnr", "--data", str(data), "--views.policy", "crops-cifar"]
    assert command.main([*words, "--out", str(tmp_path / "no")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "moco takes exactly 2 views of an image, but the policy crops-cifar has 8. Use --views.policy moco-" in said
    assert not (tmp_path / "no").exists()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("method", "strategy"), [("hard", "near"), ("hard", "pnr"), ("byol", "near"), ("crops", "near")]
)
def test_they_do_what_they_say(method: str, strategy: str, data: Path) -> None:
    lab = Lab(method, strategy, data)
    lab.train()
    terms = lab.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in lab.parameters().values())
    if strategy == "near":
        last = lab.strategy.copies["near"].module  # type: ignore[attr-defined]
        pairs = zip(lab.method.online.parameters(), last.parameters(), strict=True)
        distance = float(sum((p - q).detach().square().sum() for p, q in pairs))
        assert float(terms["near"]) == pytest.approx(0.01 * distance) and distance > 0
    if method == "hard":
        with torch.no_grad():
            e = lab.method(next(lab.inputs))
            hardest = torch.cat([rows.loss_M() for rows in lab.method.rows(e)]).sort(descending=True).values
            assert float(lab.method.loss(e)) == pytest.approx(float(hardest[: len(hardest) // 2].mean()))
    lab.close()


def test_one_that_cannot_be_imported_is_a_sentence(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "my_methods" / "hard.py").write_text('"""Broken."""\nimport a_package_that_is_not_there\n')
    assert command.main(["demo", "hard", "near", "--help"]) == 2
    said = capsys.readouterr().err
    assert "The method 'hard' (my_methods.hard:Hard) cannot be loaded: No module named" in said.replace("\n", " ")
    assert command.main(["demo", "moco", "pnr", "--list"]) == 0  # others are not its concern


# ---- A source --------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A CSV file that names images, as the document's source reads it."""
    return listed_photos(tmp_path / "photos.csv")


@pytest.mark.usefixtures("package")
def test_a_source_of_another_package_is_built(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scenario", "class", "--tasks", "2", "--workers", "1"]
    assert dataprep.cli.main(["build", f"listed:{photos}", *words, "--out", str(tmp_path / "out")]) == 0
    manifest = dataprep.load_manifest(tmp_path / "out")
    assert manifest.source.kind == "listed" and manifest.classes == ["ant", "bee", "cat", "dog"]
    assert (manifest.source.num_train, manifest.source.num_val) == (32, 8)
    assert not dataprep.verify_data(tmp_path / "out").problems
    again = ["build", f"listed:{photos}", *words, "--out", str(tmp_path / "out")]
    assert dataprep.cli.main(again) == 0 and "already complete" in capsys.readouterr().out
    assert dataprep.cli.main(["build", f"lsited:{photos}", *words, "--out", str(tmp_path / "no")]) == 2
    assert "Did you mean 'listed'?" in capsys.readouterr().err
    refused = ["build", f"listed:{photos}", *words, "--domains", "day", "--out", str(tmp_path / "no")]
    assert dataprep.cli.main(refused) == 2
    assert "--domains does not apply to the source 'listed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import a_package_that_is_not_there", "The source 'listed' (my_methods.listed:open_source) cannot be loaded"),
        ("def open_source(request):\n    return [request]", "The source 'listed' returned list, not a"),
    ],
)
def test_a_faulty_source_is_a_sentence(
    package: Path, code: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "my_methods" / "listed.py").write_text(code + "\n")
    words = ["build", "listed:x", "--scenario", "joint", "--out", str(tmp_path / "out")]
    assert dataprep.cli.main(words) == 2 and says in capsys.readouterr().err
    # Others do not depend on it, and a name of our own stays ours.
    build_data("synthetic:train=4,val=4", tmp_path / "own", scenario="joint", num_workers=1)


# ---- The README's ----------------------------------------------------------------------------------------------------


def test_files_of_the_readme_are_found_in_their_folders(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = next(
        text
        for text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        if text.startswith("# fastcssl/learn/methods/")
    )
    files = re.findall(r"# fastcssl/([\w/]+)/(\w+)\.py: (.*?)(?=\n# fastcssl/|\Z)", block, re.DOTALL)
    packages = (methods, strategies, loaders)
    assert [where for where, _, _ in files] == ["learn/methods", "learn/strategies", "data/backends"]
    for package, (_, name, source) in zip(packages, files, strict=True):
        folder = tmp_path / package.__name__
        folder.mkdir()
        for path in Path(package.__path__[0]).glob("*.py"):
            (folder / path.name).symlink_to(path)
        (folder / f"{name}.py").write_text(f"# {source}", encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [str(folder)])
    loaders.backends.cache_clear()
    (_, method, _), (_, strategy, _), (_, loader, _) = files
    try:
        outcome = run(tiny(method, strategy, loader=loader), data, tmp_path / "run")
        assert outcome.status == "finished"
        assert set(lines(tmp_path / "run")[-1]["terms"]) == {"loss", strategy}
        described = (tmp_path / "run" / "config.json").read_text()
        assert f'"loader": "{loader}"' in described
    finally:
        for package, (_, name, _) in zip(packages, files, strict=True):
            sys.modules.pop(f"{package.__name__}.{name}", None)
        loaders.backends.cache_clear()
