"""Reads and writes the file of a trained encoder: safetensors with weights and strings."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError
from fastcssl.learn.encoders import EncoderConfig, untrained
from fastcssl.learn.nets import ANY_SIZE_PX, build_encoder

FORMAT_VERSION = "1"
OWN_KEYS = ("format_version", "architecture", "stem", "num_features")
SIZE_KEY = "built_for_px"  # only for encoders that take a single image size


class EncoderFileError(UserError):
    """Raised when an encoder file cannot be read, or holds something else."""


def save_encoder(path: Path | str, encoder: nn.Module, config: EncoderConfig, metadata: Mapping[str, str]) -> None:
    """Writes float32 weights and strings to a safetensors file, atomically. Equal contents give equal bytes."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"an encoder file's metadata are strings, but {key!r} is {value!r}; convert it.")
        if key in (*OWN_KEYS, SIZE_KEY):
            raise ValueError(f"save_encoder sets {key!r} itself; give your entry of the metadata another name.")
    size_px: int | None = getattr(encoder, "size_px", None)
    blank = _blank(config, size_px or ANY_SIZE_PX)
    tensors = {
        key: tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for key, tensor in encoder.state_dict().items()
    }
    if wrong := difference(blank.state_dict(), tensors):
        raise ValueError(
            f"the encoder to save is not a {_described(config)}: {wrong}; give the module that build_encoder returned, "
            f"without wrappers, and its config."
        )
    own = dict(zip(OWN_KEYS, (FORMAT_VERSION, config.name, config.stem, str(blank.num_features)), strict=True))
    if size_px is not None:
        own[SIZE_KEY] = str(size_px)
    write_atomically(Path(path), _with_sorted_metadata(save(tensors, {**metadata, **own})))


def load_encoder(path: Path | str) -> nn.Module:
    """Returns the encoder that `save_encoder` wrote, on the CPU, in eval mode, with `num_features`."""
    metadata, tensors = _read(Path(path), with_tensors=True)
    try:
        config = EncoderConfig(name=metadata["architecture"], stem=metadata["stem"])  # type: ignore[arg-type]
        size_px = int(metadata.get(SIZE_KEY, ANY_SIZE_PX))
        blank = _blank(config, size_px)
    except (ValueError, UserError) as error:
        raise EncoderFileError(f"{path} cannot be loaded: {error}") from error
    if wrong := difference(blank.state_dict(), tensors):
        raise EncoderFileError(
            f"{path} does not hold the {_described(config)} that it names: {wrong}. Export it again."
        )
    encoder = build_encoder(config, 0, size_px)
    encoder.load_state_dict(tensors, strict=True)
    return encoder.eval()


def describe_file(path: Path | str) -> dict[str, str]:
    """Returns the strings of an encoder file: its architecture, and the metadata that its run added."""
    return _read(Path(path), with_tensors=False)[0]


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise EncoderFileError(f"{path} is not a file. Give an encoder file, such as RUN/encoders/task0.safetensors.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()} if with_tensors else {}
    except OSError as error:
        raise EncoderFileError(f"{path} cannot be read ({error}). Check its permissions.") from error
    except SafetensorError as error:
        if _looks_pickled(path):
            raise EncoderFileError(
                f"{path} is a pickle (torch.save), which may run any code when opened. Give a safetensors file, "
                f"such as RUN/encoders/task0.safetensors."
            ) from error
        raise EncoderFileError(
            f"{path} is not a safetensors file, or it is incomplete ({error}). Copy or export it again."
        ) from error
    missing = [key for key in OWN_KEYS if key not in metadata]
    if missing:
        raise EncoderFileError(
            f"{path} does not say which encoder it holds: its metadata has no {', '.join(missing)}. Give a file that "
            f"fastcssl wrote, or call build_encoder and load_state_dict yourself."
        )
    if metadata["format_version"] != FORMAT_VERSION:
        raise EncoderFileError(
            f"{path} is an encoder file of format {metadata['format_version']!r}, but this fastcssl reads "
            f"{FORMAT_VERSION!r}. Use the fastcssl that wrote it."
        )
    return metadata, tensors


def _looks_pickled(path: Path) -> bool:
    """Guesses whether a file is a pickle, for an error message. A safetensors file may start with the same bytes."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def _blank(config: EncoderConfig, size_px: int = ANY_SIZE_PX) -> nn.Module:
    """Returns an encoder for its shapes only, without values where possible."""
    if config.name.startswith(("timm:", "torchvision:regnet")):  # these read values while they are built
        return build_encoder(config, 0, size_px)
    with torch.device("meta"):
        return untrained(config, size_px)


def _described(config: EncoderConfig) -> str:
    return f"{config.name} with the {config.stem} stem" if config.name.startswith("resnet") else config.name


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Describes how the tensors found differ from those wanted, in names, shapes and types; None if they do not."""

    def named(keys: list[str]) -> str:
        return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")

    parts = []
    if missing := [key for key in wanted if key not in found]:
        parts.append(f"missing keys {named(missing)}")
    if unexpected := [key for key in found if key not in wanted]:
        parts.append(f"unexpected keys {named(unexpected)}")
    for key, tensor in wanted.items():
        if key in found and (found[key].shape, found[key].dtype) != (tensor.shape, tensor.dtype):
            seen = f"{found[key].dtype} {list(found[key].shape)}"
            parts.append(f"{key} is {seen}, not {tensor.dtype} {list(tensor.shape)}")
            break
    return " and ".join(parts) or None


def _with_sorted_metadata(content: bytes) -> bytes:
    """Returns the file with sorted metadata, because safetensors writes it in an order that changes between calls."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors with spaces
    return len(text).to_bytes(8, "little") + text + content[end:]
