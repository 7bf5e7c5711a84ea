"""Whatever happened to the files of a run, status, report and evaluation answer with a sentence, or still work."""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import evaluated, made_run
from rich.console import Console

from fastcssl.errors import UserError
from fastcssl.evaluate.targets import open_targets
from fastcssl.learn.encoder_file import save_encoder
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder
from fastcssl.report.comparison import compared
from fastcssl.report.page import Content, page
from fastcssl.report.runs import read_run
from fastcssl.runs.log import RunLog
from fastcssl.runs.results import load_evaluation
from fastcssl.runs.status import summary

WRONG: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "", "x", [], [[]], {}, {"a": {}})


def _damaged(content: bytes) -> Iterator[bytes]:
    """Yields the file empty, cut short, as something else, nested too deeply, and with a changed value at each key."""
    rng = random.Random(1)
    yield from (b"", b"\0" * 64, b"\xff\xfe\x80", b"null", b"[1]", b"3", b'"text"', b"{}", b"nonsense")
    yield b"[" * 100_000
    yield b'{"a":' * 500 + b"1" + b"}" * 500
    for _ in range(8):
        yield content[: rng.randrange(len(content))]
    whole = json.loads(content)
    for key in whole:
        for wrong in (*WRONG, _nested(200)):
            yield json.dumps({**whole, key: wrong}).encode()
        yield json.dumps({name: value for name, value in whole.items() if name != key}).encode()
    yield json.dumps({**whole, "unheard-of": 1}).encode()


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found}
    return found


def _shown(what: Any) -> None:
    Console(file=io.StringIO(), width=100).print(what)


def _check(path: Path, use: Any) -> int:
    """Returns how many of the damaged contents were refused, each with a sentence."""
    content, refused = path.read_bytes(), 0
    for damaged in _damaged(content):
        path.write_bytes(damaged)
        try:
            use()
        except UserError as error:
            refused += 1
            assert str(path.parent) in str(error) and "\n" not in str(error), damaged[:200]
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {damaged[:300]!r}") from error
    path.write_bytes(content)
    use()
    return refused


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def _reported(folder: Path) -> None:
    records = [read_run(folder)]
    page(Content(runs=records, overviews=[], comparisons=compared(records), pictures={}, ranges={}))


def test_status_json(run: Path) -> None:
    assert _check(run / "status.json", lambda: _shown(summary(run))) > 50
    assert _check(run / "status.json", lambda: _reported(run)) > 50


def test_config_json(run: Path) -> None:
    assert _check(run / "config.json", lambda: _reported(run)) > 50


def test_config_json_of_an_evaluation(run: Path) -> None:
    encoder = build_encoder(EncoderConfig(name="conv4-w16"), 0)
    (run / "encoders").mkdir()
    for task in range(2):
        save_encoder(run / f"encoders/task{task}.safetensors", encoder, EncoderConfig(name="conv4-w16"), {})
    described = json.loads((run / "config.json").read_text())
    described["config"]["encoder"] |= {"name": "conv4-w16", "stem": "imagenet"}
    (run / "config.json").write_text(json.dumps(described))
    options: dict[str, Any] = {"architecture": None, "family": "imagenet", "size_px": None, "out": None}
    assert _check(run / "config.json", lambda: open_targets([run], **options)) > 50


def test_a_result(run: Path) -> None:
    evaluated(run)
    (path,) = sorted((run / "evaluations").glob("*.json"))[:1]
    assert _check(path, lambda: load_evaluation(path)) > 50


def test_metrics(run: Path) -> None:
    path, status = run / "metrics.jsonl", lambda: _shown(summary(run))
    lines = path.read_bytes().splitlines(keepends=True)
    kinds = {json.loads(line)["kind"]: place for place, line in enumerate(lines)}
    for place in kinds.values():
        for damaged in list(_damaged(lines[place]))[::11]:
            path.write_bytes(b"".join((*lines[:place], damaged.rstrip(b"\n") + b"\n", *lines[place + 1 :])))
            for use in (lambda: read_run(run), status):
                try:
                    use()
                except UserError as error:
                    assert "metrics.jsonl" in str(error) or "no finished task" in str(error)
            RunLog(run, resume_step=10**9).close()  # resuming drops the line
            try:
                read_run(run)
            except UserError as error:
                assert "no finished task" in str(error)
