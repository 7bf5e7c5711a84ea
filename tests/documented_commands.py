"""How each program that the documents name is run, or what is checked of it where running it is not ours.

A rule takes a command's words. Ours run in this process, on stand-ins and smaller; under torchrun on two gloo ranks,
whatever the number of nodes and GPUs. Of commands that differ in names and numbers alone the first one is run, and of
the others the configuration is built. A program without a rule fails the test.
"""

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tyro
from documents import ROOT, Command
from processes import run as on_ranks
from standins import SMALL, StandIns, configured, has_flags, recipe_of, small
from torch.distributed.run import get_args_parser

import dataprep.cli
from fastcssl.cli import demo, doctor, report, train
from fastcssl.cli import eval as evaluation
from fastcssl.config.recipes import RECIPES
from fastcssl.distributed.world import World
from fastcssl.evaluate.scopes import check_scope
from fastcssl.train import forecast

SMALL_PROBE = ("--epochs", "1", "--device", "cpu", "--precision", "fp32", "--num-threads", "1")
Launch = Callable[[list[str]], None]  # runs the words on several ranks
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Shell:
    def __init__(self, standins: StandIns) -> None:
        self.standins = standins
        self.done: set[tuple[object, ...]] = set()
        self.num_run = 0

    def run(self, command: Command) -> None:
        words = self.standins.rewritten(command.words)
        while words[0] in ("sudo", "time", "nice", "env"):
            words = words[1:]
        program = Path(words[0]).name
        rule = RULES.get(program)
        assert rule is not None, f"nothing says how to run {program!r}; add a rule, or mark a block of text as text"
        rule(self, words[1:])

    def first(self, *shape: object) -> bool:
        """Whether nothing like it was run yet."""
        fresh = shape not in self.done
        self.done.add(shape)
        self.num_run += fresh
        return fresh

    # ---- Ours --------------------------------------------------------------------------------------------------------

    def prep(self, words: list[str]) -> None:
        if not self.first("prep", *words):
            return
        verb, where = words[0], words[1] if len(words) > 1 else ""
        if verb == "build":
            self.standins.source(where)
            if listed := value_of("--classes", words):
                self.standins.class_list(listed)
        elif verb in ("split", "verify", "inspect") and not where.startswith("-"):
            self.standins.prepared(where)
        self.standins.task_list(value_of("--tasks", words) or "")
        ends_well(dataprep.cli.main, words)

    def train(self, words: list[str], launch: Launch | None = None) -> None:
        if words[:1] == ["status"]:
            self.standins.run(words[1])
            ends_well(train.main, words)
            return
        if {"--list", "--help", "-h"} & set(words):
            ends_well(train.main, words)
            return
        (recipe, method, *_), _, flags = recipe_of(words)
        # Dotted flags are values of the configuration, which is built of every command.
        shape = tuple(sorted(flag for flag in words if flag.startswith("--") and "." not in flag))
        if not self.first("train", shape, RECIPES[recipe].follows_data) and launch is None:
            values = [word for word in flags if word not in (value_of("--data", words), value_of("--out", words))]
            (configured if self.first("configured", *values) else has_flags)(words)
            return
        if data := value_of("--data", words):
            self.standins.prepared(data, recipe)
        if start := value_of("--from", words):
            self.standins.start(start, recipe, method)
        out = value_of("--out", words)
        if out and out != (start or "").partition("@")[0]:
            shutil.rmtree(self.standins.cwd / out, ignore_errors=True)  # of another command in another document
        if launch is not None:
            launch(small(words))
        else:
            ends_well(train.main, small(words))

    def eval(self, words: list[str], launch: Launch | None = None) -> None:
        options = tyro.cli(evaluation.EvalOptions, args=words)
        shape = tuple(sorted({flag for flag in words if flag.startswith("--")}))
        if not self.first("eval", shape, options.probe, options.scope) and launch is None:
            return
        for run in (*options.runs, *options.references):
            self.standins.run(str(run))
        for name, where in (text.split("=") for text in options.downstream):
            self.standins.prepared(where, {"cifar100": "cifar100-class5"}.get(name))
        if options.data is not None:
            self.standins.prepared(str(options.data))
        for scope in options.scope:
            assert scope == "none" or check_scope(scope) is None
        # 1 % of a stand-in's images is none: tests/evaluate/test_scopes.py has those.
        seen = [scope for scope in options.scope if not scope.startswith("semi-")] or ["all"]
        own = [word for word in words if not word.startswith("semi-")] + ["--scope", *seen, *SMALL_PROBE]
        if options.architecture:
            own += ["--size-px", "32"]
        if launch is not None:
            launch(own)
        else:
            ends_well(evaluation.main, own)

    def report(self, words: list[str]) -> None:
        options = tyro.cli(report.ReportOptions, args=words)
        if self.first("report", len(options.runs) > 1):
            for run in options.runs:
                self.standins.run(str(run))
                for surplus in sorted(run.glob("evaluations/*.json"))[1:]:  # pictures take a second each
                    surplus.unlink()
            ends_well(report.main, words)

    def doctor(self, words: list[str]) -> None:
        options = tyro.cli(doctor.DoctorOptions, args=words, config=(tyro.conf.FlagCreatePairsOff,))
        if options.full:  # runs tests/gpu, minutes: tests/doctor/test_doctor.py
            return
        if options.data is not None:
            options.data.mkdir(parents=True, exist_ok=True)
            (options.data / "shard").write_bytes(bytes(1 << 20))
        if self.first("doctor"):  # it imports every optional package: seconds
            assert doctor.main(words) in (0, 1)  # 1: it found something on this machine

    def demo(self, words: list[str]) -> None:
        """It takes minutes: tests/cli/test_demo.py runs it on a few images."""
        tyro.cli(demo.DemoOptions, args=words)

    # ---- Several processes -------------------------------------------------------------------------------------------

    def torchrun(self, words: list[str]) -> None:
        """Its own flags are parsed by torch; what it starts runs on two ranks."""
        given = get_args_parser().parse_args(words)
        assert given.module, f"torchrun {' '.join(words)}: start a module, as a file's folder would hide packages"
        name = given.training_script
        rule = {"fastcssl.cli.train": self.train, "fastcssl.cli.eval": self.eval}[name]
        own = list(given.training_script_args)

        def launch(smaller: list[str]) -> None:
            statuses = on_ranks(2, on_a_rank, name, smaller, str(self.standins.cwd), timeout_s=300)
            assert statuses == [0, 0], f"ended with {statuses}"

        flags = [word.partition("=")[0] for word in words[: len(words) - len(own)] if word.startswith("-")]
        # Launched alike, a command is like one that is not launched.
        rule(own, launch if self.first("torchrun", name, *sorted(flags)) else None)

    def srun(self, words: list[str]) -> None:
        rest = list(words)
        while rest and rest[0].startswith("-"):
            rest.pop(0)
        assert rest[:1] == ["torchrun"], f"srun starts {rest[:1]}"
        self.torchrun(rest[1:])

    def sbatch(self, words: list[str]) -> None:
        """The job's script, on one node with two ranks: torchrun is the real one, the scheduler is not."""
        script, *args = [word for word in words if not re.match(r"--\w+(-\w+)*=", word)]
        path = self.standins.cwd / script
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK), f"{script} cannot be executed: chmod +x"
        (recipe, *_), _ = configured(args)
        self.standins.prepared(value_of("--data", args) or "", recipe)
        if self.first("sbatch", script):
            shutil.rmtree(self.standins.cwd / (value_of("--out", args) or "nothing"), ignore_errors=True)
            ended = subprocess.run(
                [str(path), *small(args)],
                env=self.standins.scheduler(),
                cwd=self.standins.cwd,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
            log = self.standins.root / "scheduler.log"
            assert not log.exists() or "requeue" not in log.read_text()

    # ---- Not ours: that what they name is there ----------------------------------------------------------------------

    def make(self, words: list[str]) -> None:
        targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for word in words:
            assert word in targets or "=" in word or word.startswith("-"), f"the Makefile has no target {word!r}"

    def pip(self, words: list[str]) -> None:
        assert words[0] in ("install", "uninstall", "download"), f"pip {words[0]}"
        for word in words[1:]:
            own = re.fullmatch(r"(?:\.|fastcssl(?:-[\w.]+\.whl)?)(?:\[([\w,]+)\])?(?: @ .*)?", word)
            for extra in (own[1] or "").split(",") if own else ():
                assert not extra or extra in PROJECT["optional-dependencies"], f"there is no extra {extra!r}"

    def apt(self, words: list[str]) -> None:
        known = (ROOT / ".ci" / "packages").read_text()
        for word in words:
            if word not in ("install", "update") and not word.startswith("-"):
                assert re.search(rf"want {re.escape(word)}\b", known), f"{word} is no package of .ci/packages"

    def python(self, words: list[str]) -> None:
        if words[:1] == ["-m"]:
            name, rest = words[1], words[2:]
            rules = {"pip": self.pip, "pytest": self.pytest, "fastcssl.cli.train": self.train, "build": self.nothing}
            rules |= {"fastcssl.cli.eval": self.eval, "dataprep.cli": self.prep, "venv": self.nothing}
            rules[name](rest)
            return
        script = ROOT / words[0]
        assert script.is_file(), f"there is no {words[0]}"
        source = script.read_text()
        for flag in (word for word in words[1:] if word.startswith("--")):
            name = flag.partition("=")[0].removeprefix("--")
            assert flag in source or re.search(rf"\b{name.replace('-', '_')}\b", source), f"{words[0]} has no {flag}"

    def pytest(self, words: list[str]) -> None:
        for word in words:
            if word.startswith(("tests", "-") if "/" not in word else ("tests/",)):
                assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), f"there is no {word}"

    def nothing(self, _: list[str]) -> None:
        """Leaves nothing that a later command would need here."""


def on_a_rank(world: World, module: str, words: list[str], cwd: str) -> int:
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank)}
    before = os.getcwd()
    os.chdir(cwd)
    try:
        return int(importlib.import_module(module).main(words))
    finally:
        os.chdir(before)
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[key]


def ends_well(main: Callable[[list[str]], int], words: list[str]) -> None:
    try:
        status = main(words)
    except SystemExit as end:  # tyro, for --help and for flags that are not there
        status = 0 if end.code is None else int(end.code)
    assert status == 0, f"it ended with {status}"


def value_of(flag: str, words: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        if word == flag and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


RULES: dict[str, Callable[[Shell, list[str]], None]] = {
    "fastcssl-prep": Shell.prep,
    "fastcssl-train": lambda shell, words: shell.train(words),
    "fastcssl-eval": lambda shell, words: shell.eval(words),
    "fastcssl-report": Shell.report,
    "fastcssl-doctor": Shell.doctor,
    "fastcssl-demo": Shell.demo,
    "torchrun": Shell.torchrun,
    "srun": Shell.srun,
    "sbatch": Shell.sbatch,
    "make": Shell.make,
    "pip": Shell.pip,
    "apt": Shell.apt,
    "apt-get": Shell.apt,
    "python": Shell.python,
    "python3": Shell.python,
    "pytest": Shell.pytest,
    **dict.fromkeys(("cd", "git", "mkdir", "ulimit", "source", "tensorboard", "scancel", "squeue"), Shell.nothing),
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(StandIns(tmp_path_factory.mktemp("documents")))


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of --dry-run: the time that it measures for."""
    monkeypatch.setattr(forecast, "_LOADER_SECONDS", 0.05)
    assert SMALL["device"] == "cpu"
