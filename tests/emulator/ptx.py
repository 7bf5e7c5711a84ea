"""Translates the PTX that nvcc makes of a kernel into C++ that runs on the emulator: what is compiled is checked.

Only what our kernels use is known; anything else is an error. `ptx_runtime.h` has the instructions that are not plain
arithmetic, and counts races, bank conflicts and memory sectors.
"""

import re
from dataclasses import dataclass, field

TYPES = {
    "pred": "bool",
    **dict.fromkeys(("b16", "u16", "f16"), "std::uint16_t"),
    "s16": "std::int16_t",
    **dict.fromkeys(("b32", "u32"), "std::uint32_t"),
    "s32": "std::int32_t",
    **dict.fromkeys(("b64", "u64"), "std::uint64_t"),
    "s64": "std::int64_t",
    "f32": "float",
    "u8": "std::uint8_t",
}
SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ctaid.x": "blockIdx.x",
    "%ctaid.y": "blockIdx.y",
    "%ntid.x": "blockDim.x",
}
# {0} is the target's value; operands come as values of the instruction's type.
BINARY = {
    "add": "{1} + {2}",
    "sub": "{1} - {2}",
    "mul": "{1} * {2}",
    "mul.lo": "{1} * {2}",
    "and": "{1} & {2}",
    "or": "{1} | {2}",
    "xor": "{1} ^ {2}",
    "div": "ptx::divided({1}, {2})",
    "div.rn": "{1} / {2}",
    "rem": "ptx::remainder({1}, {2})",
    "max": "ptx::larger({1}, {2})",
    "min": "ptx::smaller({1}, {2})",
    "mad.lo": "{1} * {2} + {3}",
    "fma.rn": "std::fma({1}, {2}, {3})",
    "fma.rm": "ptx::fma_down({1}, {2}, {3})",
    "add.rz": "ptx::add_towards_zero({1}, {2})",
    "bfi": "ptx::inserted({1}, {2}, {3}, {4})",
    "not": "~{1}",
    "neg": "-{1}",
    "abs": "std::fabs({1})",
    "mov": "{1}",
    "sqrt.rn": "std::sqrt({1})",
    "ex2.approx.ftz": "std::exp2({1})",
}
COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "neu": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "leu": "leu",
    "nan": "nan",
}
CONVERSIONS = {
    "cvt.rna.tf32.f32": ("b32", "f32", "::emulator::to_tf32({})"),
    "cvt.f32.f16": ("f32", "b16", "::emulator::from_float16({})"),
    "cvt.rn.f16.f32": ("b16", "f32", "ptx::to_float16({})"),
    "cvt.rn.bf16.f32": ("b16", "f32", "ptx::to_bfloat16({})"),
    "cvt.sat.f32.f32": ("f32", "f32", "__saturatef({})"),
    "cvt.rn.f32.s32": ("f32", "s32", "static_cast<float>({})"),
    "cvt.s64.s32": ("b64", "s32", "static_cast<std::int64_t>({})"),
    "cvt.u64.u32": ("b64", "u32", "static_cast<std::uint64_t>({})"),
    "cvt.u32.u64": ("b32", "u64", "static_cast<std::uint32_t>({})"),
    "cvta.to.global.u64": ("b64", "b64", "{}"),
}


@dataclass
class Kernel:
    name: str
    params: list[str]
    body: str
    first_line: int
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # name: alignment, bytes


def parse(text: str, wanted: list[str]) -> list[Kernel]:
    """The kernels whose names contain one of `wanted`."""
    kernels = []
    for match in re.finditer(r"\.entry (\w+)\((.*?)\)\n(?:\.\w+[^\n]*\n)*\{\n(.*?)\n\}\n", text, re.DOTALL):
        name, params, body = match.groups()
        if not any(word in name for word in wanted):
            continue
        names = re.findall(r"(\w+_param_\d+)", params)
        kernels.append(Kernel(name, names, body, text[: match.start(3)].count("\n") + 1))
    missing = [word for word in wanted if not any(word in kernel.name for kernel in kernels)]
    if missing:
        raise ValueError(f"no kernel is named {missing}")
    return kernels


class Translator:
    """One kernel. Shared addresses are offsets; a static variable begins as far off as its alignment allows."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.lines, self.num_sites = kernel, [], 0
        self.registers: dict[str, str] = {}
        self.shared: dict[str, int] = {}
        self.static_end = 0
        self.sites: list[str] = []

    def run(self) -> str:
        for number, line in enumerate(self.kernel.body.split("\n"), self.kernel.first_line):
            self.line = number
            for statement in self.statements(line.split("//")[0].strip()):
                self.lines.append(self.translated(statement))
        sites = ", ".join(self.sites) or "{}"
        name = self.kernel.name
        return (
            f"static void run_{name}(const void* const* params) {{\n  (void)params;\n"
            + "\n".join(self.lines)
            + f"\n}}\nstatic const ptx::SiteName sites_{name}[] = {{{sites}}};\n"
            + f'static const ptx::Registration registered_{name}("{name}", run_{name}, {self.static_end}, '
            + f"sites_{name}, {len(self.sites)});\n"
        )

    @staticmethod
    def statements(line: str) -> list[str]:
        """Braces that hold operands belong to their statement, others open or close a scope."""
        line = re.sub(r"\{([^{};]*)\}", r"<\1>", line)
        return [part.strip() for part in re.split(r"(?<=[{}])|;|(?=\})", line) if part.strip()]

    def translated(self, statement: str) -> str:
        if statement in "{}":
            return statement
        if statement.startswith(".reg"):
            return self.declared(statement)
        if statement.startswith(".shared"):
            return self.placed(statement)
        if statement == '.pragma "nounroll"':
            return ""
        if statement.startswith("."):
            raise self.unknown(statement)
        if match := re.fullmatch(r"\$(\w+):", statement):
            return f"{match[1]}:;"
        guard = ""
        if match := re.match(r"@(!?)%(p\d+)\s+", statement):
            guard, statement = f"if ({match[1]}{match[2]}) ", statement[match.end() :]
        opcode, _, rest = statement.partition(" ")
        operands = (
            [part.strip() for part in re.split(r",(?![^<\[]*[>\]])", rest.replace("\t", " ").strip())] if rest else []
        )
        return f"  {guard}{{ {self.instruction(opcode.strip(), operands)} }}"

    def unknown(self, statement: str) -> ValueError:
        return ValueError(
            f"line {self.line} of the PTX, {statement!r}: not known to the translator. Teach it in ptx.py."
        )

    def declared(self, statement: str) -> str:
        match = re.fullmatch(r"\.reg \.(\w+)\s+(.*)", statement)
        if match is None or match[1] not in TYPES:
            raise self.unknown(statement)
        kind, names = match.groups()
        if ranged := re.fullmatch(r"%(\w+)<(\d+)>", names):
            declared = [f"{ranged[1]}{i}" for i in range(1, int(ranged[2]))]
        else:
            declared = [name.strip() for name in names.split(",")]
        self.registers.update(dict.fromkeys(declared, kind))
        return f"  {TYPES[kind]} {', '.join(declared)};" if declared else ""

    def placed(self, statement: str) -> str:
        match = re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", statement)
        if match is None:
            raise self.unknown(statement)
        alignment, name, count = int(match[1]), match[2], int(match[3])
        self.shared[name] = (self.static_end // (2 * alignment) * 2 + 1) * alignment
        self.static_end = self.shared[name] + count
        return ""

    def value(self, operand: str, kind: str) -> str:
        """An operand as a value of this type."""
        cpp = TYPES[kind]
        if operand in SPECIAL:
            return f"static_cast<{cpp}>({SPECIAL[operand]})"
        if re.fullmatch(r"0f[0-9A-F]{8}", operand):
            bits = f"0x{operand[2:]}u"
            return f"::emulator::float_of({bits})" if kind == "f32" else bits
        if re.fullmatch(r"-?\d+", operand):
            return f"static_cast<{cpp}>({operand}ll)"
        if operand in self.kernel.params:
            return f"reinterpret_cast<std::uint64_t>(params[{self.kernel.params.index(operand)}])"
        if operand in self.shared:
            return f"{self.shared[operand]}u"
        if operand.endswith("gpu6sharedE"):  # the one dynamic array
            return "ptx::dynamic_offset()"
        name = operand.removeprefix("%")
        if name not in self.registers:
            raise self.unknown(operand)
        held = self.registers[name]
        if held == kind or kind == "pred":
            return name
        if (held == "f32") != (kind == "f32"):
            return f"ptx::bits_as<{cpp}>({name})"
        return f"static_cast<{cpp}>({name})"

    def assign(self, target: str, kind: str, value: str) -> str:
        """`value` has the type `kind`; registers take integers of any signedness, wider ones extend."""
        name = target.removeprefix("%")
        held = self.registers[name]
        if (held == "f32") != (kind == "f32") and kind != "pred":
            return f"{name} = ptx::bits_as<{TYPES[held]}>(static_cast<{TYPES[kind]}>({value}));"
        return f"{name} = static_cast<{TYPES[held]}>(static_cast<{TYPES[kind]}>({value}));"

    def address(self, operand: str, kind: str) -> str:
        match = re.fullmatch(r"\[([%\w]+)(?:\+(-?\d+))?\]", operand)
        if match is None:
            raise self.unknown(operand)
        return f"{self.value(match[1], kind)} + {match[2] or 0}"

    def site(self, opcode: str) -> str:
        self.sites.append(f'{{"{opcode}", {self.line}}}')
        return str(len(self.sites) - 1)

    def instruction(self, opcode: str, operands: list[str]) -> str:
        words = opcode.split(".")
        here = f'::emulator::Site{{"{opcode}", {self.line}}}'
        if opcode in ("bra", "bra.uni"):
            return f"goto {operands[0].removeprefix('$')};"
        if opcode == "ret":
            return "return;"
        if opcode == "bar.sync":
            return f"ptx::barrier({here});"
        if words[0] in ("ld", "st"):
            return self.memory(opcode, words, operands)
        if words[0] == "setp" and len(words) == 3:
            return self.comparison(words[1], words[2], operands)
        if words[0] == "selp":
            kind = words[1]
            yes, no, which = self.value(operands[1], kind), self.value(operands[2], kind), operands[3].removeprefix("%")
            return self.assign(operands[0], kind, f"{which} ? {yes} : {no}")
        if words[0] in ("shl", "shr"):
            value, count = self.value(operands[1], words[1]), self.value(operands[2], "u32")
            function = "shifted_left" if words[0] == "shl" else "shifted_right"
            return self.assign(operands[0], words[1], f"ptx::{function}({value}, {count})")
        if opcode in ("mul.wide.s32", "mul.wide.u32"):
            wide = "std::int64_t" if words[-1] == "s32" else "std::uint64_t"
            a, b = self.value(operands[1], words[-1]), self.value(operands[2], words[-1])
            return self.assign(operands[0], "b64", f"static_cast<{wide}>({a}) * static_cast<{wide}>({b})")
        if opcode == "mov.b32" and operands[1].startswith("<"):
            low, high = (self.value(part.strip(), "b16") for part in operands[1][1:-1].split(","))
            return self.assign(operands[0], "b32", f"{low} | std::uint32_t{{{high}}} << 16")
        if opcode in ("mov.b32", "mov.b64") and operands[0].startswith("<"):
            half, shift = ("b16", 16) if opcode == "mov.b32" else ("b32", 32)
            source = self.value(operands[1], words[1])
            parts = [part.strip() for part in operands[0][1:-1].split(",")]
            return " ".join(
                self.assign(part, half, f"static_cast<{TYPES[half]}>({source} >> {i * shift})")
                for i, part in enumerate(parts)
            )
        if opcode in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):
            function = "to_float16" if "bf16" not in opcode else "to_bfloat16"
            high, low = (self.value(operand, "f32") for operand in operands[1:])
            return self.assign(
                operands[0], "b32", f"ptx::{function}({low}) | std::uint32_t{{ptx::{function}({high})}} << 16"
            )
        if opcode in CONVERSIONS:
            out, source, template = CONVERSIONS[opcode]
            return self.assign(operands[0], out, template.format(self.value(operands[1], source)))
        if words[0] in ("shfl", "vote", "ldmatrix", "mma", "cp"):
            return self.together(opcode, operands, here)
        name, kind = opcode.rpartition(".")[::2]
        if name in BINARY and (kind in TYPES):
            template = BINARY[name].replace("~", "!") if kind == "pred" else BINARY[name]
            values = [self.value(operand, kind) for operand in operands[1:]]
            return self.assign(operands[0], kind, template.format("", *values))
        raise self.unknown(f"{opcode} {', '.join(operands)}")

    def comparison(self, relation: str, kind: str, operands: list[str]) -> str:
        if relation not in COMPARISONS or kind not in TYPES:
            raise self.unknown(f"setp.{relation}.{kind}")
        target, a, b = operands[0].removeprefix("%"), self.value(operands[1], kind), self.value(operands[2], kind)
        if relation == "leu":
            return f"{target} = !({a} > {b});"
        if relation == "nan":
            return f"{target} = std::isnan({a}) || std::isnan({b});"
        return f"{target} = {a} {COMPARISONS[relation]} {b};"

    def memory(self, opcode: str, words: list[str], operands: list[str]) -> str:
        space, kind = words[1], words[-1]
        if space not in ("param", "global", "shared") or kind not in TYPES or (words[0] == "st" and space == "param"):
            raise self.unknown(opcode)
        where, data = (operands[1], operands[0]) if words[0] == "ld" else operands
        parts = [part.strip() for part in data[1:-1].split(",")] if data.startswith("<") else [data]
        if len(parts) != {"v2": 2, "v4": 4}.get(words[2], 1):
            raise self.unknown(opcode)
        address = self.address(where, "b32" if space == "shared" else "b64")
        site = "" if space == "param" else f"{self.site(opcode)}, "
        value = f"ptx::Values<{TYPES[kind]}, {len(parts)}>"
        if words[0] == "ld":
            loads = " ".join(self.assign(part, kind, f"got.at[{i}]") for i, part in enumerate(parts))
            return f"const auto got = ptx::load_{space}<{value}>({site}{address}); {loads}"
        values = ", ".join(f"static_cast<{TYPES[kind]}>({self.value(part, kind)})" for part in parts)
        return f"ptx::store_{space}({site}{address}, {value}{{{{{values}}}}});"

    def together(self, opcode: str, operands: list[str], here: str) -> str:
        """What lanes or threads do together, and copies."""
        if opcode == "shfl.sync.bfly.b32":
            target, source, lanes, bound, mask = operands[0].split("|")[0], *operands[1:]
            a, b, c, m = (self.value(operand, "b32") for operand in (source, lanes, bound, mask))
            return self.assign(target, "b32", f"ptx::shuffle_xor({here}, {a}, {b}, {c}, {m})")
        if opcode == "vote.sync.any.pred":
            mask = self.value(operands[2], "b32")
            return f"{operands[0][1:]} = ::emulator::ballot({here}, {mask}, {operands[1][1:]}) != 0;"
        if opcode.startswith("ldmatrix.sync.aligned.m8n8.x4.") and opcode.endswith("shared.b16"):
            transposed = "true" if ".trans." in opcode else "false"
            outs = [part.strip() for part in operands[0][1:-1].split(",")]
            loads = " ".join(self.assign(out, "b32", f"got[{i}]") for i, out in enumerate(outs))
            address = self.address(operands[1], "b32")
            return (
                f"std::uint32_t got[4]; ptx::load_matrices({self.site(opcode)}, got, {address}, {transposed}); {loads}"
            )
        if opcode.startswith("mma.sync.aligned."):
            shape = {
                "m16n8k16.row.col.f32.f16.f16.f32": "float16",
                "m16n8k16.row.col.f32.bf16.bf16.f32": "bfloat16",
                "m16n8k8.row.col.f32.tf32.tf32.f32": "tf32",
            }.get(opcode.removeprefix("mma.sync.aligned."))
            if shape is None:
                raise self.unknown(opcode)
            d, a, b, c = ([part.strip() for part in operand[1:-1].split(",")] for operand in operands)
            left, right = (", ".join(self.value(part, "b32") for part in parts) for parts in (a, b))
            sums = ", ".join(self.value(part, "f32") for part in c)
            stores = " ".join(self.assign(part, "f32", f"sum[{i}]") for i, part in enumerate(d))
            return (
                f"float sum[4] = {{{sums}}}; const std::uint32_t a[4] = {{{left}}}, b[2] = {{{right}}}; "
                f"ptx::multiply_{shape}(sum, a, b); {stores}"
            )
        if opcode == "cp.async.cg.shared.global":
            target, source = self.address(operands[0], "b32"), self.address(operands[1], "b64")
            count = self.value(operands[3], "u32")
            return f"ptx::copy_async({self.site(opcode)}, {target}, {source}, {operands[2]}, {count});"
        if opcode == "cp.async.commit_group":
            return "ptx::commit_copies();"
        if opcode == "cp.async.wait_group":
            return f"ptx::wait_for_copies({operands[0]});"
        raise self.unknown(opcode)


def translate(text: str, wanted: list[str]) -> str:
    return '#include "ptx_runtime.h"\n' + "\n".join(Translator(kernel).run() for kernel in parse(text, wanted))
