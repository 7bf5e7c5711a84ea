"""What a Markdown document says that can be checked: its blocks of code, its links, its headings, its commands."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHELL = ("", "sh", "bash", "console")  # blocks of other languages are no commands; plain text is marked `text`

# What has commands. Other Markdown has links.
COMMANDED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *COMMANDED,
    ROOT / "CHANGELOG.md",
    *(path for folder in ("benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.md"))),
]


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line of code
    text: str


def blocks(text: str) -> list[Block]:
    found, inside, begin, language = [], False, 0, ""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if inside:
            found.append(Block(language, begin + 1, "\n".join(lines[begin:number]) + "\n"))
        else:
            begin, language = number + 1, line.strip().strip("`").strip()
        inside = not inside
    if inside:
        raise ValueError(f"the block that begins in line {begin} does not end")
    return found


def prose(text: str) -> str:
    """Without code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.DOTALL | re.MULTILINE))


def links(text: str) -> list[str]:
    """Targets of [text](target), ![text](target) and [name]: target."""
    found = re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", prose(text))
    return found + re.findall(r"^\[[^\]]+\]:\s*(\S+)", prose(text), re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them, and of <a id=...>."""
    found: set[str] = set()
    without_code = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+\s+(.*?)\s*#*$", without_code, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        unique = slug
        while unique in found:
            unique, number = f"{slug}-{number}", number + 1
        found.add(unique)
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


# ---- Commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    line: int
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(text: str, variables: Mapping[str, str]) -> Iterator[Command]:
    """Every command of the blocks, in order: loops run, comments and what follows a pipe are left out.

    Shell as documents use it: `for`, assignments, `export`, `;`, `&&`, lines that go on after a backslash.
    """
    known = dict(variables)
    for block in blocks(text):
        if block.language in SHELL:
            yield from _run(list(_tokens(block)), known)


def _tokens(block: Block) -> Iterator[tuple[int, str]]:
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines, (0, ""))[1]
        if block.language == "console":
            if not line.startswith("$ "):
                continue  # what a command prints
            line = line[2:]
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        try:
            yield from [(number, word) for word in lexer]
        except ValueError as error:
            raise ValueError(f"line {number} is no command ({error}); mark a block of plain text as text") from None
        yield number, ";"


def _run(tokens: list[tuple[int, str]], variables: dict[str, str]) -> Iterator[Command]:
    at = 0
    while at < len(tokens):
        line, word = tokens[at]
        if word in (";", "&&", "&"):
            at += 1
        elif word == "for":
            do = _index(tokens, "do", at)
            done = _index(tokens, "done", at)
            name = tokens[at + 1][1]
            for _, item in tokens[at + 3 : do]:
                if item != ";":
                    yield from _run(tokens[do + 1 : done], variables | {name: _expanded(item, variables)})
            at = done + 1
        else:
            end = next((i for i in range(at, len(tokens)) if tokens[i][1] in (";", "&&", "|", "&", "||")), len(tokens))
            words = [_expanded(text, variables) for _, text in tokens[at:end]]
            yield from _simple(line, words, variables)
            if end < len(tokens) and tokens[end][1] == "|":  # what is done with the output is not ours
                end = next(i for i in range(end, len(tokens)) if tokens[i][1] in (";", "&&"))
            at = end


def _index(tokens: list[tuple[int, str]], word: str, start: int) -> int:
    """Where a loop's `do` or `done` is, past those of loops inside."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += tokens[at][1] == "for"
        if tokens[at][1] == word and depth == 1:
            return at
        depth -= tokens[at][1] == "done"
    raise ValueError(f"line {tokens[start][0]}: a loop without {word}")


def _simple(line: int, words: list[str], variables: dict[str, str]) -> Iterator[Command]:
    if words[0] == "export":
        words = words[1:]
    env: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if words:
        yield Command(line, tuple(words), env)
    else:
        variables |= env


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """What is not known stays as it is, and no rule will take it."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word)
