"""What an encoder file says about the images that its encoder was trained on."""

import json

import pytest

from fastcssl.data.policies import policy
from fastcssl.evaluate.targets import _style_of


@pytest.mark.parametrize("family", ["cifar", "imagenet"])
def test_the_mean_tells_the_family(family: str) -> None:
    view = policy(f"probe-val-{family}")[0]
    strings = {"mean": json.dumps(view.mean), "std": json.dumps(view.std), "size_px": "48"}
    style = _style_of(strings, "imagenet", None)
    assert (style.family, style.size_px, style.mean, style.std) == (family, 48, view.mean, view.std)


def test_another_mean_is_seen_as_imagenet_is_and_a_silent_file_as_told() -> None:
    strings = {"mean": "[0.5, 0.5, 0.5]", "std": "[0.2, 0.2, 0.2]", "size_px": "32"}
    assert _style_of(strings, "cifar", None).family == "imagenet"
    told = _style_of({}, "cifar", None)
    assert told.family == "cifar" and told.mean == policy("probe-val-cifar")[0].mean
