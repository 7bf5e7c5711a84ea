"""Banks in training: written by the sweep that reads them last, with the results of a push after all sweeps."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prep_ok
from lab import Lab
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastcssl import ops
from fastcssl.learn.methods import BankConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PNR = [
    ("pnr", {"form": form, "pn1": pn1, "pn2": pn2})
    for form in ("code", "paper")
    for pn1 in (True, False)
    for pn2 in (True, False)
]
STRATEGIES: list[tuple[str, dict[str, Any]]] = [("finetune", {}), ("cassle", {}), *PNR]
# Sweeps in a step of the second task, of which some write.
SWEEPS = {("code", True, True): (2, 2), ("code", False, False): (4, 4), ("paper", True, True): (1, 1)} | {
    ("paper", False, False): (2, 2)
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("banks") / "data"
    prep_ok("build", "synthetic:classes=20,train=4,val=2", "--scenario", "class", "--tasks", 2, "--out", out)
    return out


class Later:
    """Stands in for the fused call: sweeps now, and writes when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, ...]] = []

    def __call__(
        self, query: Tensor, positive: Tensor, banks: Any, warm: Any, keys: Any, pointers: Any, **options: Any
    ) -> Tensor:
        counts = options["filled"]
        self.waiting += [each for each in zip(banks, keys, pointers, counts, strict=True) if each[1] is not None]
        return ops.info_nce(query, positive, banks, warm, **options)

    def write(self) -> None:
        for bank, keys, pointer, filled in self.waiting:
            ops.enqueue(bank, keys, pointer, filled)
        self.waiting.clear()


class Count(TorchDispatchMode):
    """Which operators ran, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("strategy", "config"), STRATEGIES, ids=str)
def test_the_last_sweep_of_a_bank_writes_it(
    strategy: str, config: dict[str, Any], dtype: torch.dtype, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, apart = (Lab("moco", strategy, data, strategy_config=config, dtype=dtype) for _ in range(2))
    for _ in range(3):
        expected = fused.train()
        later = Later()
        with monkeypatch.context() as patch:
            patch.setattr(ops, "info_nce_enqueue", later)
            terms = apart.train()
        written = sorted(id(bank) for bank, *_ in later.waiting)
        banks = (*apart.method.banks, *apart.strategy.banks)
        assert written == sorted(id(bank.rows_KD) for bank in banks), "each bank once in a step"
        later.write()
        near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(terms, expected, **near)
        torch.testing.assert_close(apart.banks(), fused.banks(), **near)
    parameters = [{name: p.detach() for name, p in lab.parameters().items()} for lab in (apart, fused)]
    torch.testing.assert_close(*parameters, **near)
    for lab in (fused, apart):
        lab.close()


@pytest.mark.parametrize(("pn", "sweeps"), SWEEPS.items(), ids=str)
def test_one_operator_sweeps_and_writes(pn: tuple[str, bool, bool], sweeps: tuple[int, int], data: Path) -> None:
    config = dict(zip(("form", "pn1", "pn2"), pn, strict=True))
    lab = Lab("moco", "pnr", data, strategy_config=config, dtype=torch.float32)
    with Count() as count:
        lab.backward()
    lab.close()
    assert count.calls["info_nce_sweep_enqueue"] + count.calls["info_nce_sweep"] == sweeps[0]
    assert count.calls["info_nce_sweep_enqueue"] == sweeps[1]
    assert not {"enqueue", "index_copy_", "logsumexp", "info_nce_chunked"} & set(count.calls)


def test_a_compiled_step_is_the_same(data: Path) -> None:
    """One graph, the operator and its writes in it."""
    plain, compiled = (Lab("moco", "pnr", data, dtype=torch.float32) for _ in range(2))
    compiled.step.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled.train(), plain.train(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled.banks(), plain.banks(), rtol=1e-4, atol=1e-5)
    for lab in (plain, compiled):
        lab.close()


def test_a_loss_alone_writes_nothing(data: Path) -> None:
    """As EWC's Fisher pass needs it."""
    lab = Lab("moco", "finetune", data, dtype=torch.float32)
    method, before = lab.method, lab.banks()
    inputs = next(lab.inputs)
    e = method(type(inputs)(views=tuple(view.float() for view in inputs.views), label=inputs.label, id=inputs.id))
    loss = method.loss(e)
    assert all(torch.equal(rows, before[name]) for name, rows in lab.banks().items())
    fused = method.loss_then_remember(e)
    torch.testing.assert_close(fused, loss)
    assert not any(torch.equal(rows, before[name]) for name, rows in lab.banks().items())
    lab.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_banks_in_half_precision(dtype: str, data: Path) -> None:
    kept = getattr(torch, dtype)
    banks = {"bank": BankConfig(size=40, dtype=dtype)}  # type: ignore[arg-type]
    half = Lab("moco", "pnr", data, method_config=banks, dtype=torch.float32)
    full = Lab("moco", "pnr", data, dtype=torch.float32)
    for _ in range(3):
        terms, exact = half.train(), full.train()
    torch.testing.assert_close(terms, exact, rtol=2e-2, atol=2e-2)
    assert set(half.banks()) == {"method0", "method1", "strategy0", "strategy1"}
    for name, rows in half.banks().items():
        assert rows.dtype == kept
        written = rows[rows.any(dim=1)].float()
        torch.testing.assert_close(written.norm(dim=1), torch.ones(len(written)), rtol=0, atol=5e-3)
        torch.testing.assert_close(rows.float(), full.banks()[name], rtol=0, atol=5e-2)
    state = {name: bank.state_dict()["rows"].dtype for name, bank in half.method.copies.items() if "bank" in name}
    assert state == {"bank0": kept, "bank1": kept}
    for lab in (half, full):
        lab.close()
