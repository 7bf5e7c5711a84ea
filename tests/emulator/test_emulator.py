"""The emulator itself: right kernels give right numbers, each kind of wrong one is named."""

import itertools

import pytest

from emulator import emulate

TOY = emulate.EMULATOR / "toy.cu"
NUMBERS = [float(i + 1) for i in range(64)]


def toy(name: str, *, variant: str = "plain", seed: int = 0, skip_barrier: str = "") -> tuple[list[float], str]:
    done = emulate.run(emulate.build(TOY, variant=variant), b"", name, seed=seed, skip_barrier=skip_barrier)
    return [float(word) for word in done.stdout.split()] if done.returncode == 0 else [], done.stderr.decode()


@pytest.mark.parametrize("variant", ["plain", "sanitized"])
def test_right_kernels(variant: str) -> None:
    for seed in range(3):
        assert toy("reverse", variant=variant, seed=seed) == (NUMBERS[::-1], "")
        assert toy("more_shared", variant=variant, seed=seed) == (NUMBERS[::-1], "")
        swapped = [NUMBERS[i ^ 1] for i in range(64)]
        assert toy("dynamic", variant=variant, seed=seed) == (swapped, "")
        out, errors = toy("collectives", variant=variant, seed=seed)
        sums = [s for half in (NUMBERS[:32], NUMBERS[32:]) for s in itertools.accumulate(half)]
        assert errors == ""
        wanted = [sums[i] + 1e3 * sums[i // 32 * 32] + 1e6 * sums[i ^ 31] for i in range(64)]
        assert out == pytest.approx(wanted, rel=1e-6)


def test_shared_memory_begins_as_nan() -> None:
    assert all(number != number for number in toy("unwritten")[0])


def test_missing_barrier_shows() -> None:
    line = emulate.barrier_lines(TOY)[0]
    for seed in range(20):
        assert toy("reverse", seed=seed, skip_barrier=line)[0] != NUMBERS[::-1]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("two_barriers", ("divergent barrier", "toy.cu:")),
        ("half_a_shuffle", ("deadlock", "__shfl_xor_sync at ", "waits at the barrier")),
        ("absent_lane", ("reads lane", "takes no part")),
        ("two_collectives", ("divergent collective", "__syncwarp", "__ballot_sync")),
        ("too_many_rows", ("no GPU takes this grid",)),
        ("too_much_shared", ("49153 bytes of dynamic shared memory, 49152 allowed",)),
    ],
)
def test_wrong_kernels_are_named(kernel: str, words: tuple[str, ...]) -> None:
    for seed in range(3):
        out, errors = toy(kernel, seed=seed)
        assert out == []
        for word in words:
            assert word in errors


@pytest.mark.parametrize("kernel", ["past_shared", "past_global", "past_dynamic"])
def test_the_sanitizer_sees_the_first_byte_past(kernel: str) -> None:
    out, errors = toy(kernel, variant="sanitized")
    assert out == []
    assert "toy.cu" in errors and ("heap-buffer-overflow" in errors or "out of bounds" in errors), errors
