"""The documents are true: their commands run, their examples print what they say, their links lead somewhere."""

import ast
import dataclasses
import doctest
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from documented_commands import Shell, quick
from documented_commands import shell as shell  # a fixture
from documents import COMMANDED, LINKED, ROOT, Command, anchors, blocks, commands, links
from standins import VARIABLES
from test_plugins import package as package  # a fixture
from torch.distributed.run import get_args_parser

import dataprep.cli
from fastcssl.cli import demo, doctor, report, train
from fastcssl.cli import eval as evaluation
from fastcssl.cli.listing import flag_of
from fastcssl.config.recipes import flat, recipe
from fastcssl.learn import methods, strategies

OTHERS = ("pip", "docker", "nvcc", "pytest", "apt", "git")  # programs whose flags are theirs


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- Commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMANDED, ids=named)
def test_commands_run(
    path: Path, shell: Shell, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.name == "plugins.md":
        request.getfixturevalue("package")
    monkeypatch.chdir(shell.standins.cwd)
    monkeypatch.setenv("COLUMNS", "120")
    quick(monkeypatch)
    for command in commands(path.read_text(encoding="utf-8"), VARIABLES):
        try:
            shell.run(command)
        except BaseException as error:
            error.add_note(f"{named(path)}, line {command.line}: {command}")
            raise


def test_the_shell_of_documents() -> None:
    text = """
```sh
export A=/x   # a comment
for m in a b; do
  for n in 1 2; do run $m --n ${n} "$A/y z" \\
    --last; done
done
X=1 one && two | less; three
```
```text
no command
```
```console
$ four
its output
```
"""
    words = [(command.words, dict(command.env)) for command in commands(text, {})]
    loop = [(("run", m, "--n", n, "/x/y z", "--last"), {}) for m in "ab" for n in "12"]
    assert words == [*loop, (("one",), {"X": "1"}), (("two",), {}), (("three",), {}), (("four",), {})]
    with pytest.raises(ValueError, match="line 3 is no command"):
        list(commands("```\nfine\nit's\n```\n", {}))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("frobnicate --now", "nothing says how to run 'frobnicate'"),
        ("make demmo", "no target 'demmo'"),
        ("pip install fastcssl[dalli]", "no extra 'dalli'"),
        ("apt install libjpeg-turbo-dev", "no package of .ci/packages"),
        ("python benchmarks/nothing.py", "there is no benchmarks/nothing.py"),
        ("python benchmarks/loader.py --quickly", "has no --quickly"),
        ("fastcssl-prep verify --deep x", "ended with 2"),
        ("pytest tests/test_nothing.py", "there is no tests/test_nothing.py"),
    ],
)
def test_what_is_wrong_in_a_command_is_seen(words: str, says: str, shell: Shell) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)):
        shell.run(Command(1, tuple(words.split())))


def test_wrong_flags_of_training_are_seen(shell: Shell) -> None:
    for words in (
        "fastcssl-train demo moco pnr --epoch 3",
        "torchrun --nproc 2 -m fastcssl.cli.train demo moco pnr --x",
    ):
        with pytest.raises(SystemExit):
            shell.run(Command(1, tuple(words.split())))


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Of all commands, of torchrun, of the benchmarks, and of what the job's script asks of the scheduler."""
    found = {"--help", "--list", "--settings", "--from"}
    for options in (dataprep.cli.Build, dataprep.cli.Resplit, dataprep.cli.Verify, dataprep.cli.Inspect):
        found |= {flag_of(field.name) for field in dataclasses.fields(options)}
    others = (evaluation.EvalOptions, report.ReportOptions, doctor.DoctorOptions, demo.DemoOptions)
    for options in (train.TrainOptions, *others):
        found |= {flag_of(field.name) for field in dataclasses.fields(options)}
    for method in methods.names():
        for strategy in strategies.names():
            found |= {flag_of(key) for key, _ in flat(recipe("demo", method, strategy).config)}
    found |= {f"--no-{flag.removeprefix('--')}" for flag in found}
    found |= {flag for action in get_args_parser()._actions for flag in action.option_strings}
    for path in (*(ROOT / "benchmarks").glob("*.py"), ROOT / "docs" / "slurm.sh"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"--[a-z][\w-]*", text))
        found |= {flag_of(name) for name in re.findall(r"^    (\w+): .* = ", text, re.MULTILINE)}  # of tyro's classes
    return found


@pytest.mark.parametrize("path", COMMANDED, ids=named)
def test_flags_in_sentences_exist(path: Path, known_flags: set[str]) -> None:
    text = re.sub(r"^\s*```.*?^\s*```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", text):
        if code.split()[0] in OTHERS:
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", code):
            assert flag in known_flags or flag.endswith("."), (
                f"{named(path)}: `{code}` has {flag}, which no command knows"
            )


# ---- Examples --------------------------------------------------------------------------------------------------------

EXAMPLES = [path for path in COMMANDED if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_examples_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    # Fences are no output.
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, named(path), 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(test, out=said.append)
    assert result.attempted and not result.failed, "".join(said)


@pytest.mark.parametrize("path", COMMANDED, ids=named)
def test_python_without_prompts_is_python_and_imports_what_exists(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language != "python" or ">>> " in block.text:
            continue
        tree = ast.parse(block.text, named(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("fastcssl", "dataprep"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


# ---- Links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LINKED, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("https", "http", "mailto"), link
            assert parts.scheme == "mailto" or re.fullmatch(r"[\w.-]+\.\w+", parts.netloc), f"{link} is no address"
            continue
        target = path if not parts.path else (path.parent / parts.path).resolve()
        assert target.exists() and target.is_relative_to(ROOT), f"{named(path)} links to {link}, which is not there"
        if parts.fragment:
            known = anchors(target.read_text(encoding="utf-8"))
            assert parts.fragment in known, f"{named(path)} links to {link}; headings: {', '.join(sorted(known))}"


def test_links_and_headings_are_found() -> None:
    text = "# A *b*: `c`\n[x](y.md#z) ![p](<q.png>)\n```\n[no](no.md)\n# no\n```\n`[no](no)`\n# A b c\n[r]: s.md\n"
    assert links(text) == ["y.md#z", "q.png", "s.md"]
    assert anchors(text) == {"a-b-c", "a-b-c-1"}
    assert os.fspath(ROOT / "README.md") in map(str, LINKED)
