"""The public names: which there are, that they are what they say, and that looking at them costs nothing."""

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from setuptools import find_packages

import dataprep
import fastcssl
from fastcssl.errors import UserError

ROOT = Path(__file__).parents[2]

# What a user may rely on. A name is added or removed here by decision, with a line in CHANGELOG.md.
PUBLIC = {
    "dataprep": """
        BuildJob BuildResult Interrupted Manifest ManifestError PrepError Verification
        build_data draw_sheet load_manifest split_data verify_data
    """.split(),
    "fastcssl": """
        RECIPES Batch Config Diverged Evaluated Evaluation Forecast Loader LoaderConfig Outcome Policy Prepared Recipe
        Report Request RunRecord Selection UserError ViewSpec __version__
        diagnose evaluate_runs forecast_run info_nce load_encoder policy read_run recipe report_runs train_run
        train_seeds
    """.split(),
}
NO_DOCSTRING = {"RECIPES", "Policy", "__version__"}  # data, a type alias, a string


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_these(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        found = getattr(module, name)
        assert not isinstance(found, types.ModuleType), f"{package}.{name} is a module and something else"
        # A submodule of the same name would replace it as soon as somebody imports that.
        assert not (Path(module.__file__ or "").parent / f"{name}.py").exists()
        assert not (Path(module.__file__ or "").parent / name).exists()
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from {package} import nothing")


@pytest.mark.parametrize("package", PUBLIC)
def test_type_checkers_and_python_see_the_same(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__ or "").read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    homes = {
        alias.asname or alias.name: node.module
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == {name: f"{package}.{home}" for name, home in module._HOME.items()}
    for name, home in homes.items():
        assert getattr(module, name) is getattr(importlib.import_module(home or ""), name)
    assert {*homes} | {"__version__"} >= {*module.__all__} >= {*homes}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_say_what_they_are(package: str) -> None:
    for name in set(PUBLIC[package]) - NO_DOCSTRING:
        found = getattr(importlib.import_module(package), name)
        own = inspect.getdoc(found) or ""
        assert len(own) > 20 and not own.startswith(f"{name}("), f"{package}.{name} has no docstring"
        if inspect.isfunction(found):
            assert found.__name__ == name
            signature = inspect.signature(found)
            for parameter in [*signature.parameters.values()]:
                assert parameter.annotation is not parameter.empty, f"{package}.{name}: {parameter.name} has no type"
            assert signature.return_annotation is not signature.empty


def test_importing_costs_nothing() -> None:
    heavy = ("torch", "numpy", "torchvision", "matplotlib", "PIL", "rich", "tyro")
    code = f"""
import sys
import fastcssl, dataprep
assert fastcssl.__version__ and dir(fastcssl) and dir(dataprep)
print(sorted(name for name in {heavy!r} if name in sys.modules))
from fastcssl import RECIPES, UserError
from dataprep import load_manifest
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "False False"]


def test_the_packages_are_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in PUBLIC:
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in project["tool"]["setuptools"]["package-data"][package]
    found = find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    folders = {path.parent for package in PUBLIC for path in (ROOT / package).rglob("*.py")}
    assert {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders} == set(found)


def test_the_version_is_the_package_s() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == fastcssl.__version__


def test_a_recipe_changes_by_the_command_line_s_names() -> None:
    recipe = fastcssl.recipe("demo", "moco", "pnr")
    changed = recipe.changed({"epochs": 3, "optim.lr": 0.3, "method.bank.size": 64})
    assert (changed.config.epochs, changed.config.optim.lr) == (3, 0.3)
    assert changed.sources["optim.lr"] == "command line" and changed.sources["seed"] == recipe.sources["seed"]
    optim = dataclasses.replace(recipe.config.optim, lr=0.3)
    same = recipe.changed({"optim.lr": 0.3})
    assert recipe.changed_to(dataclasses.replace(recipe.config, optim=optim)) == same
    with pytest.raises(UserError, match=r"no setting 'optim\.lrr'. Did you mean 'optim\.lr'\?"):
        recipe.changed({"optim.lrr": 1})
    with pytest.raises(ValueError, match="epochs is 0"):
        recipe.changed({"epochs": 0})


def test_diagnose_looks_without_raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcssl.doctor import Section, checks

    monkeypatch.setattr(checks, "checks", lambda data, full: iter([("x", lambda: Section(f"{data} {full}", ()))]))
    assert [section.title for section in fastcssl.diagnose(str(tmp_path), full=True)] == [f"{tmp_path} True"]


def test_what_the_functions_refuse_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(dataprep.PrepError, match="needs --tasks"):
        dataprep.build_data("synthetic:classes=20,train=1,val=1", tmp_path / "out", scenario="class")
    with pytest.raises(dataprep.PrepError, match="is not a format"):
        dataprep.build_data("synthetic", tmp_path / "out", scenario="joint", formats=["zip"])
    with pytest.raises(dataprep.ManifestError, match="does not exist"):
        dataprep.load_manifest(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a run"):
        fastcssl.evaluate_runs(tmp_path)
    with pytest.raises(UserError, match="no recipe 'dmo'"):
        fastcssl.recipe("dmo", "moco", "pnr")
