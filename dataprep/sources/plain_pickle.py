"""Reads the data in a pickle without executing it.

A pickle is a program, and unpickling a file from the internet runs it. CIFAR's batches need only a dozen instructions:
containers, numbers, strings, and one way to build a numpy array. This interpreter knows only those and calls nothing:
it recognises an array by the form of the expression that would build it.
"""

import pickletools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_ARRAY_BUILDERS = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}


class PlainPickleError(Exception):
    """A pickle is damaged or holds more than plain data. The text says why."""


@dataclass
class _Name:
    """A global that the program names. It is never looked up."""

    name: str


@dataclass
class _Call:
    """A call that the program would make. It is never made."""

    function: str
    args: tuple[Any, ...]
    array: "np.ndarray[Any, Any] | None" = field(default=None)


class _Mark:
    pass


def read_plain_pickle(file: Path) -> Any:
    """Returns the data in a pickle. Raises PlainPickleError if the pickle is damaged or holds anything else."""
    try:
        return _settle(_run(file.read_bytes()))
    except PlainPickleError:
        raise
    except OSError as error:
        raise PlainPickleError(f"it cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise PlainPickleError(f"it is damaged ({error})") from None


def _run(program: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def items_after_mark() -> list[Any]:
        for position in range(len(stack) - 1, -1, -1):
            if isinstance(stack[position], _Mark):
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise PlainPickleError("a mark is missing")

    for opcode, arg, _ in pickletools.genops(program):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        elif name == "STOP":
            return stack.pop()
        elif name in _LITERALS:
            stack.append(arg)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_Mark())
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(items_after_mark()))
        elif name == "LIST":
            stack.append(items_after_mark())
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else items_after_mark()
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else items_after_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(arg or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(arg or 0)])
        elif name == "GLOBAL":
            stack.append(_Name(str(arg)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module} {attribute}"))
        elif name == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(_reduce(function, args))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        else:
            raise PlainPickleError(f"it uses the instruction {name}, which plain data does not need")
    raise PlainPickleError("it ends early")


def _reduce(function: Any, args: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(args, tuple):
        raise PlainPickleError("it calls something that is not a named function")
    if function.name == "_codecs encode":  # this is how Python 3 writes bytes in old protocols
        text, encoding = args
        if encoding != "latin1":
            raise PlainPickleError(f"it encodes text as {encoding}")
        return text.encode("latin-1")
    if function.name in _ARRAY_BUILDERS or function.name == "numpy dtype":
        return _Call(function.name, args)
    raise PlainPickleError(f"it would call '{function.name}', which is refused")


def _build(target: Any, state: Any) -> None:
    if not isinstance(target, _Call):
        raise PlainPickleError("it sets the state of something that is not an array")
    if target.function == "numpy dtype":
        return  # the byte order of a one-byte type does not matter
    _, shape, dtype, is_fortran, data = state
    if not isinstance(dtype, _Call) or dtype.args[0] != "u1" or is_fortran:
        raise PlainPickleError("it holds an array that is not plain uint8")
    raw = data.encode("latin-1") if isinstance(data, str) else data
    target.array = np.frombuffer(raw, np.uint8).reshape(shape)


def _settle(value: Any) -> Any:
    """Returns the data with arrays in place of the calls that represented them, and byte-string keys as text."""
    if isinstance(value, _Call):
        if value.array is None:
            raise PlainPickleError("it holds an unfinished array")
        return value.array
    if isinstance(value, dict):
        return {_settle(k).decode() if isinstance(k, bytes) else _settle(k): _settle(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_settle(item) for item in value]
    return value
