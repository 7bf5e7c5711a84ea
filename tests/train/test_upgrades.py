"""What an earlier version prepared and trained still opens and resumes. tests/upgrades holds such data and runs.

version-0.1.0.tar.xz: 60 images in two class tasks (array), and a run of SimCLR + CaSSLe on them, stopped in its second
task at step 7 of 8; losses.json has those of the same run without the stop.
"""

import dataclasses
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_runs import losses, run, tiny

from dataprep import verify_data
from fastcssl.config.config import ExpectConfig
from fastcssl.config.upgrades import implied
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.runs.changed_settings import differences
from fastcssl.runs.checkpoint import CheckpointError

STORED = sorted((Path(__file__).parents[1] / "upgrades").glob("*.tar.xz"))


@pytest.fixture(params=STORED, ids=lambda path: path.name.removesuffix(".tar.xz"))
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_data_of_an_earlier_version_opens(stored: Path) -> None:
    assert not verify_data(stored / "data").problems


def test_a_run_of_an_earlier_version_resumes(stored: Path) -> None:
    found = tiny("simclr", "cassle", batch_size=8, encoder=EncoderConfig(name="vit-tiny-w32"))
    config = found.config
    config = dataclasses.replace(
        config,
        expect=ExpectConfig(),
        views=dataclasses.replace(config.views, size_px=32),
        method=dataclasses.replace(config.method, hidden=16, dim=8),
    )
    found = dataclasses.replace(found, config=config)
    assert run(found, stored / "data", stored / "run").status == "finished"
    expected = json.loads((stored / "losses.json").read_text())
    seen = losses(stored / "run")
    assert [step for step, _ in seen] == [step for step, _ in expected] == list(range(1, 9))
    for (_, terms), (_, before) in zip(seen, expected, strict=True):
        assert terms == pytest.approx(before, rel=1e-3)  # other processors round otherwise
    changed = dataclasses.replace(found, config=dataclasses.replace(config, epochs=3))
    with pytest.raises(CheckpointError, match="epochs: 2 in the checkpoint, 3 now"):
        run(changed, stored / "data", stored / "run")


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = 8
    newer: str = field(default="fast", metadata={"before": "slow"})


@dataclass(frozen=True, kw_only=True)
class Outer:
    lr: float
    inner: Inner = field(default_factory=Inner)
    extra: tuple[int, ...] = ()


def test_a_setting_that_a_checkpoint_lacks_has_its_old_value() -> None:
    assert implied(Outer(lr=0.1)) == {"inner.width": 8, "inner.newer": "slow", "extra": []}
    saved = {"lr": 0.1, "inner": {"width": 4}}

    def now(**inner: object) -> list[str]:
        return differences(saved, {"lr": 0.1, "inner": {"width": 4, **inner}, "extra": []}, implied(Outer(lr=0.1)))

    assert now(newer="slow") == []
    assert now(newer="fast") == ["inner.newer: 'slow' in the checkpoint, 'fast' now"]
    assert differences(saved, {"inner": {"width": 4}}, {}) == ["lr: 0.1 in the checkpoint, not set now"]
