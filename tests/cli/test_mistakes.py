"""A user's mistake ends in one sentence with a remedy, never in a traceback: those that show late, in one place."""

from pathlib import Path

import pytest
from small_runs import prepared

from fastcssl.cli.train import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("mistakes") / "data", tasks=3, source="classes=30,train=4,val=2")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--log-every 0", "log_every is 0; give at least 1."),
        ("--keep-checkpoints 0", "keep_checkpoints is 0; give at least 1."),
        ("--stop-after-task -1", "stop_after_task is -1; give at least 0."),
        ("--num-threads -1", "--num-threads -1: use 1 or more"),
        ("--prefetch 0", "--prefetch 0: at least one batch"),
        ("--method.temperature 0", "method.temperature is 0.0; give a number above 0."),
        ("--method.ema-base 2", "method.ema_base is 2.0; give a share from 0 to 1."),
        ("--compile induktor", "There is no --compile 'induktor'. Did you mean 'inductor'?"),
        ("--optim.name sgd --optim.implementation apex", "Use --optim.implementation foreach."),
        ("--views.min-scale 2", "views.min_scale is 2.0; give a share above 0, at most 1."),
        ("--views.size-px 0", "views.size_px is 0; give at least 1."),
        ("--out file", "Cannot write into file (File exists). Choose another --out."),
        ("--out file/run", "Cannot write into file/run (Not a directory). Choose another --out."),
    ],
)
def test_a_sentence_and_status_2(
    flags: str,
    says: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "file").touch()
    command = ["demo", "moco", "finetune", "--data", str(data), "--batch-size", "16", "--online-probe", "off"]
    try:
        status = main([*command, *flags.split()])
    except SystemExit as ended:  # by tyro
        status = int(ended.code or 0)
    assert status == 2 and says in capsys.readouterr().err
