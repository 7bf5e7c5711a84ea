"""--profile writes a trace of the steps it was asked for, and none without it."""

import dataclasses
import json
from pathlib import Path

from small_runs import prepared, run, tiny


def test_a_trace_holds_the_steps_asked_for(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data", source="classes=20,train=32,val=2")
    found = tiny("simclr", "joint", epochs=1)
    process = dataclasses.replace(found.config.run, profile=2)
    traced = dataclasses.replace(found, config=dataclasses.replace(found.config, run=process))
    run(traced, data, tmp_path / "traced")
    events = json.loads((tmp_path / "traced/profile/rank0.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert "aten::convolution" in names
    run(found, data, tmp_path / "plain")
    assert not (tmp_path / "plain/profile").exists()
