"""The optimisers: LARS against numbers worked out in plain Python, torch's, and restoring bit for bit."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastcssl.learn.optim import Lars, OptimConfig, build_optimizer, describe, lars_update_plain, set_lr

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((4, 3), (6,), (2, 3, 3, 3), (1,), (5, 1))


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for number, param in enumerate(params):
        # From far below to far above what clipping lets through.
        size = 10.0 ** (number - 3)
        param.grad = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * size).to(param.dtype)


class Scalars:
    """LARS with momentum on lists of Python numbers, one tensor; knows nothing of the code under test."""

    def __init__(self, tensor: Tensor, momentum: float) -> None:
        self.w, self.momentum = tensor.detach().flatten().tolist(), momentum
        self.buffer: list[float] | None = None

    def step(self, grad: Tensor, lr: float, decay: float, eta: float, clip: bool, excluded: bool) -> None:
        u = grad.flatten().tolist()
        w_norm, u_norm = (math.sqrt(math.fsum(x * x for x in xs)) for xs in (self.w, u))
        if not excluded and w_norm != 0 and u_norm != 0:
            ratio = eta * w_norm / (u_norm + decay * w_norm + 1e-8)
            if clip:
                ratio = min(ratio / lr, 1.0)
            u = [(x + decay * w) * ratio for x, w in zip(u, self.w, strict=True)]
        if self.buffer is None:
            self.buffer = u
        else:
            self.buffer = [self.momentum * b + x for b, x in zip(self.buffer, u, strict=True)]
        self.w = [w - lr * b for w, b in zip(self.w, self.buffer, strict=True)]


def assert_same(params: list[nn.Parameter], expected: list[Scalars]) -> None:
    for param, scalars in zip(params, expected, strict=True):
        torch.testing.assert_close(
            param.detach().flatten(), torch.tensor(scalars.w, dtype=torch.float64), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_lars_is_its_formula(clip: bool, exclude: bool, momentum: float) -> None:
    config = OptimConfig(clip=clip, exclude_bias_and_norm=exclude, momentum=momentum, weight_decay=0.01, eta=0.03)
    params = parameters()
    optimizer = build_optimizer([{"params": params, "name": "net"}], config)
    expected = [Scalars(param, momentum) for param in params]
    for step, lr in enumerate((0.003, 0.6, 0.6, 0.05)):
        give_gradients(params, step)
        set_lr(optimizer, lr)
        optimizer.step()
        for param, scalars in zip(params, expected, strict=True):
            scalars.step(param.grad, lr, 0.01, 0.03, clip, excluded=exclude and param.ndim == 1)
        assert_same(params, expected)


def test_clip_holds_back_and_never_pushes() -> None:
    weight, tiny, huge = torch.ones(2, 2), torch.full((2, 2), 1e-6), torch.full((2, 2), 1e3)
    settings = {"lr": 0.1, "weight_decay": 0.0, "eta": 0.02, "clip": True}
    assert torch.equal(lars_update_plain(weight, tiny, **settings), tiny)
    # lr times the update is eta times the weight's norm.
    assert (0.1 * lars_update_plain(weight, huge, **settings)).norm() == pytest.approx(0.02 * 2)
    assert lars_update_plain(weight, tiny, **{**settings, "clip": False}).norm() == pytest.approx(0.02 * 2, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.3, 0.0])
def test_lars_is_its_plain_sibling(dtype: torch.dtype, lr: float) -> None:
    params = parameters(dtype=dtype)
    params.append(nn.Parameter(torch.tensor(0.5, dtype=dtype)))
    give_gradients(params, 0)
    settings: dict[str, Any] = {"lr": lr, "weight_decay": 0.01, "eta": 0.02, "clip": True}
    updates = [lars_update_plain(p.detach().double(), p.grad.double(), **settings) for p in params]
    before = [param.detach().double().clone() for param in params]
    optimizer = Lars(params, momentum=0.9, **settings)
    optimizer.step()
    scale = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for param, old, update in zip(params, before, updates, strict=True):
        assert param.dtype == dtype and optimizer.state[param]["momentum_buffer"].dtype == dtype
        buffer = optimizer.state[param]["momentum_buffer"].double()
        assert (buffer - update).abs().max() <= scale * update.abs().max()
        torch.testing.assert_close(param.detach().double(), old - lr * update, rtol=scale, atol=scale)


def test_norms_of_bfloat16_are_kept_in_float32() -> None:
    # The norms are 257.01 and 256.99, between which bfloat16 would round to 258 and 256.
    param = nn.Parameter(torch.tensor([[256.0, 22.75]], dtype=torch.bfloat16))
    param.grad = torch.tensor([[256.0, 22.5]], dtype=torch.bfloat16)
    Lars([param], 1.0, momentum=0.0, eta=1.0, clip=False).step()
    assert param.tolist() == [[0.0, 0.25]]


def test_zero_gradients_and_zero_weights_are_left_alone() -> None:
    still, born = parameters(shapes=((3, 3), (3, 3)))
    born.data.zero_()
    before = still.detach().clone()
    optimizer = Lars([still, born], 0.1, momentum=0.0, weight_decay=0.5)
    still.grad, born.grad = torch.zeros_like(still), torch.ones_like(born)
    optimizer.step()
    assert torch.equal(still, before)  # no decay
    torch.testing.assert_close(born.detach(), torch.full_like(born, -0.1), rtol=0, atol=1e-16)  # plain SGD


def test_a_zero_gradient_still_coasts_on_momentum() -> None:
    (param,) = parameters(shapes=((3, 3),))
    optimizer = Lars([param], 0.1, momentum=0.9, weight_decay=0.5)
    expected = Scalars(param, 0.9)
    for grad in (torch.ones_like(param), torch.zeros_like(param)):
        param.grad = grad.detach()
        optimizer.step()
        expected.step(grad, 0.1, 0.5, 0.02, True, excluded=False)
    assert_same([param], [expected])


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lars_that_adapts_nothing_is_torch_sgd(weight_decay: float, momentum: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer = Lars(ours, 0.3, momentum=momentum, weight_decay=weight_decay, adapt=False)
    # On the CPU torch's two ways round bfloat16 differently, float32 alike.
    foreach = dtype == torch.bfloat16
    reference = torch.optim.SGD(theirs, lr=0.3, momentum=momentum, weight_decay=weight_decay, foreach=foreach)
    for step in range(4):
        for params in (ours, theirs):
            give_gradients(params, step)
            if step == 0:
                params[2].grad = None  # its first gradient comes later
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    assert all(ours[n].grad is not None and torch.equal(ours[n].grad, theirs[n].grad) for n in range(len(ours)))


def test_excluded_tensors_are_torch_sgd_without_decay() -> None:
    shapes = ((4,), (7,))
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizer = build_optimizer([{"params": ours, "name": "norms"}], OptimConfig(lr=0.3, weight_decay=0.5))
    reference = torch.optim.SGD(theirs, lr=0.3, momentum=0.9)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_several_groups_have_their_own_lr_and_decay() -> None:
    encoder, head = parameters(1), parameters(2)
    groups = [
        {"params": iter(encoder), "name": "encoder"},
        {"params": head, "name": "head", "lr_scale": 0.25, "weight_decay": 0.0},
    ]
    optimizer = build_optimizer(groups, OptimConfig(weight_decay=0.02))
    assert [group["name"] for group in optimizer.param_groups] == ["encoder", "encoder 1-D", "head", "head 1-D"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.02, 0.0, 0.0, 0.0]
    expected = [Scalars(param, 0.9) for param in encoder + head]
    for step, lr in enumerate((0.1, 0.4)):
        give_gradients(encoder + head, step)
        set_lr(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr, lr / 4, lr / 4]
        optimizer.step()
        for number, (param, scalars) in enumerate(zip(encoder + head, expected, strict=True)):
            mine = (lr, 0.02) if number < len(encoder) else (lr / 4, 0.0)
            scalars.step(param.grad, *mine, 0.02, True, excluded=param.ndim == 1)
    assert_same(encoder + head, expected)


def test_parameters_without_gradients_stay() -> None:
    params = parameters()
    before = [param.detach().clone() for param in params]
    optimizer = build_optimizer([{"params": params, "name": "net"}], OptimConfig())
    optimizer.step()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [False, True, True, True, True]
    assert params[1] not in optimizer.state


def test_lars_reads_nothing_back_from_the_device() -> None:
    """Tensors on the meta device have no values: any question about one is an error."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = build_optimizer([{"params": params, "name": "net"}], OptimConfig())
    for _ in range(2):
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"].is_meta
    with pytest.raises(RuntimeError):
        lars_update_plain(params[0], params[0], lr=1.0, weight_decay=0.0, eta=1.0, clip=True)


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_a_step_that_the_scaler_skips_leaves_no_trace(name: Any) -> None:
    scaled, plain = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    optimizer, reference = (
        build_optimizer([{"params": params, "name": "net"}], OptimConfig(name=name)) for params in (scaled, plain)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        give_gradients(scaled, step)
        for param in scaled:
            param.grad *= scaler.get_scale() if step else math.inf
        scaler.step(optimizer)
        scaler.update()
        if step:
            give_gradients(plain, step)
            reference.step()
    for a, b in zip(scaled, plain, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


def test_closures_see_gradients() -> None:
    (param,) = parameters(shapes=((2, 2),))
    optimizer = Lars([param], 0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return float(loss)

    first = optimizer.step(closure)
    assert first is not None and closure() < first


# Which optimiser it is, and that it goes on where it was.


@pytest.mark.parametrize(
    ("name", "described", "kind"),
    [
        ("lars", "LARS (foreach)", Lars),
        ("sgd", "torch SGD (foreach)", torch.optim.SGD),
        ("adamw", "torch AdamW (foreach)", torch.optim.AdamW),
    ],
)
def test_each_name_builds_and_says_what_it_is(name: Any, described: str, kind: type) -> None:
    config = OptimConfig(name=name, weight_decay=0.3, lr=0.2, momentum=0.8, betas=(0.7, 0.95))
    optimizer = build_optimizer([{"params": parameters(), "name": "net", "lr_scale": 0.5}], config)
    assert describe(optimizer) == described and type(optimizer) is kind
    for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
        assert group["weight_decay"] == decay and group["lr"] == 0.1
        assert group["betas"] == (0.7, 0.95) if name == "adamw" else group["momentum"] == 0.8
    (together,) = build_optimizer(
        [{"params": parameters(), "name": "net"}], OptimConfig(name=name, weight_decay=0.3, exclude_bias_and_norm=False)
    ).param_groups
    assert together["weight_decay"] == 0.3 and len(together["params"]) == len(SHAPES)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_torchs_optimisers_are_torchs(name: Any) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer([{"params": ours, "name": "net"}], OptimConfig(name=name, weight_decay=0.1))
    groups = [
        {"params": [param for param in theirs if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in theirs if param.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.SGD(groups, lr=0.6, momentum=0.9) if name == "sgd" else torch.optim.AdamW(groups, lr=0.6)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def run(config: OptimConfig, restore: Callable[[Any], Any] | None) -> tuple[list[nn.Parameter], dict[str, Any]]:
    """Six steps; with `restore` new objects take over after the third."""
    params = parameters(dtype=torch.float32)
    optimizer = build_optimizer([{"params": params, "name": "net", "lr_scale": 0.5}], config)
    for step in range(6):
        if step == 3 and restore is not None:
            weights, state = restore(([param.data for param in params], optimizer.state_dict()))
            params = [nn.Parameter(weight) for weight in weights]
            optimizer = build_optimizer([{"params": params, "name": "net", "lr_scale": 0.5}], config)
            optimizer.load_state_dict(state)
        set_lr(optimizer, 0.1 + 0.05 * step)
        give_gradients(params, step)
        if step < 2:
            params[4].grad = None
        optimizer.step()
    return params, optimizer.state_dict()


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_restored_in_the_middle_it_goes_on_bit_for_bit(name: Any) -> None:
    config = OptimConfig(name=name)
    params, state = run(config, None)
    restored, restored_state = run(config, through_a_file)
    for a, b in zip(params, restored, strict=True):
        assert torch.equal(a, b)
    assert state["param_groups"] == restored_state["param_groups"]
    assert state["state"].keys() == restored_state["state"].keys() and len(state["state"]) == len(SHAPES)
    for number, kept in state["state"].items():
        for key, tensor in kept.items():
            assert torch.equal(tensor, restored_state["state"][number][key])
    forgetful, _ = run(config, lambda saved: (saved[0], {**saved[1], "state": {}}))
    assert not all(torch.equal(a, b) for a, b in zip(params, forgetful, strict=True))


def test_a_state_from_another_machine_computes_this_machines_way() -> None:
    config = OptimConfig(name="adamw")
    optimizer = build_optimizer([{"params": parameters(), "name": "net"}], config)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["fused"], group["foreach"] = True, False
    optimizer.load_state_dict(state)
    assert describe(optimizer) == "torch AdamW (foreach)"


def test_a_state_of_other_groups_is_refused() -> None:
    saved = build_optimizer([{"params": parameters(), "name": "encoder"}], OptimConfig()).state_dict()
    optimizer = build_optimizer([{"params": parameters(), "name": "head"}], OptimConfig())
    with pytest.raises(ValueError, match=r"saved optimiser has the groups \['encoder', 'encoder 1-D'\], this one has"):
        optimizer.load_state_dict(saved)


# Bad values.


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lr": -0.1}, "optim.lr is -0.1; it must be finite and at least 0"),
        ({"lr": math.nan}, "optim.lr is nan"),
        ({"lr": math.inf}, "optim.lr is inf"),
        ({"weight_decay": -1e-4}, "optim.weight_decay is"),
        ({"momentum": 1.0}, "optim.momentum has 1.0; it must be at least 0 and below 1"),
        ({"betas": (0.9, 1.5)}, "optim.betas has 1.5"),
        ({"eta": 0.0}, "optim.eta is 0.0; it must be finite and above 0"),
        ({"warmup_epochs": -1}, "optim.warmup_epochs is -1"),
        ({"warmup_start_lr": -1.0}, "optim.warmup_start_lr is"),
        ({"min_lr": -1.0}, "optim.min_lr is"),
        ({"name": "adam"}, "no optim.name 'adam'. Did you mean 'adamw'? Known: lars, sgd, adamw"),
        ({"name": "zzz"}, "no optim.name 'zzz'. Known: lars, sgd, adamw"),
        ({"schedule": "warmup_cosine"}, "Did you mean 'warmup-cosine'?"),
        ({"schedule_unit": "epochs"}, "Did you mean 'epoch'?"),
        ({"implementation": "fused"}, "no optim.implementation 'fused'. Known: foreach, apex"),
        ({"implementation": "apex"}, "'apex' cannot run 'lars', only 'sgd'"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        OptimConfig(**values)
    assert says in str(caught.value)


def test_bad_groups_are_named() -> None:
    with pytest.raises(ValueError, match=r"cannot have 'lr_scal'. Did you mean 'lr_scale'\?"):
        build_optimizer([{"params": parameters(), "name": "net", "lr_scal": 2}], OptimConfig())
    with pytest.raises(ValueError, match="The 1 groups hold no parameters"):
        build_optimizer([{"params": [], "name": "net"}], OptimConfig())
