"""YAML as kubectl reads it, into plain data with the line of every field.

PyYAML's own constructors differ from kubectl's parser where it matters to users: they accept a
key twice (the last wins), turn dates into objects and 1:30 into 90. Here scalars become JSON
values only, a repeated key is refused, and how much a text holds, or its aliases expand to, is
bounded while it is read.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import JsonValue

from duplex_api.problems import Problem

MAX_TEXT_BYTES = 1_048_576
"""Below what etcd takes for one object."""
MAX_VALUES = 50_000
"""Of all documents of a text together, keys included where they are written."""
MAX_DOCUMENTS = 16
MAX_DEPTH = 64
MAX_PATH_CHARACTERS = 1024
"""Each value's path is kept with its line."""
MAX_DIGITS = 128
"""Of an integer: what comes of it is read no further than a number of 64 bits."""


class YamlProblemError(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file. lines: dotted path -> 1-based line in the file."""

    value: JsonValue
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """Only composes nodes, and no more of them than a text may hold; what a plain scalar means is
    decided by the rules below."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._documents = self._nodes = 0

    def compose_document(self) -> yaml.Node | None:
        self._documents += 1
        if self._documents > MAX_DOCUMENTS:
            raise self._too_much("holds too many documents", f"at most {MAX_DOCUMENTS}")
        return super().compose_document()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MAX_VALUES:
            raise self._too_much("holds too many values", f"at most {MAX_VALUES}")
        return super().compose_node(parent, index)

    def _too_much(self, message: str, allowed: str) -> "YamlProblemError":
        line: int = self.get_mark().line + 1
        return YamlProblemError(Problem("", message, allowed, line))


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    (
        "bool",
        r"^(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
        "yYnNtTfFoO",
    ),
    (
        "int",
        r"^[-+]?(?:0b[01][01_]*|0o?[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|0|[1-9][0-9_]*)$",
        "-+0123456789",
    ),
    (
        "float",
        r"^[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$",
        "-+0123456789.",
    ),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def read_documents(text: str) -> tuple[Document, ...]:
    """The documents of a text, empty ones left out. Raises YamlProblemError."""
    if len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
        raise YamlProblemError(Problem("", "is too long", f"at most {MAX_TEXT_BYTES} bytes"))
    try:
        nodes = list(yaml.compose_all(_as_yaml(text), Loader=_Loader))
    except yaml.YAMLError as error:
        raise YamlProblemError(_syntax_problem(error)) from error
    except RecursionError as error:
        raise YamlProblemError(_too_deep("")) from error
    reader = _Reader()
    return tuple(document for node in nodes if (document := reader.read(node)).value is not None)


_NOT_THE_SAME = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    "|(\\\\.)|([\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff])"
)
"""In a JSON text: a character written as two halves, any other escape, and characters that YAML
takes for the end of a line or for nothing that can stand in a text."""


def _as_yaml(text: str) -> str:
    """JSON is taken as JSON, as kubectl does: written so that the YAML reader reads the same in the
    same line. Such characters stand inside strings alone, where an escape means the same."""
    if not text.lstrip(" \t\r\n").startswith("{"):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _NOT_THE_SAME.sub(_same_in_yaml, text)


def _same_in_yaml(found: re.Match[str]) -> str:
    high, low, escape, odd = found.groups()
    if high is not None:
        return f"\\U{0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00:08x}"
    return escape if escape is not None else f"\\u{ord(odd):04x}"


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return Problem(
            "", f"is not YAML: {error.problem}", "valid YAML", error.problem_mark.line + 1
        )
    return Problem("", f"is not YAML: {error}", "valid YAML")


def _too_deep(path: str) -> Problem:
    return Problem(path, "is nested too deeply", f"at most {MAX_DEPTH} levels")


class _Reader:
    """Turns the nodes of a text's documents into plain data. Lives for one text."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._values_left = MAX_VALUES

    def read(self, node: yaml.Node) -> Document:
        self._lines = {}
        return Document(self._value(node, "", 0), self._lines)

    def _value(self, node: yaml.Node, path: str, depth: int) -> JsonValue:
        self._values_left -= 1
        if self._values_left < 0:
            raise self._wrong(node, path, "expands to too many values", f"at most {MAX_VALUES}")
        if depth > MAX_DEPTH:
            raise YamlProblemError(_too_deep(path))
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._value(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(node.value)
            ]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, JsonValue]:
        merged: dict[str, JsonValue] = {}
        own: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            if key_node.tag.endswith(":merge"):
                for source in self._merge_sources(value_node, path):
                    for key, value in self._mapping(source, path, depth + 1).items():
                        merged.setdefault(key, value)
                continue
            key = self._key(key_node, path)
            inner = f"{path}.{key}" if path else key
            if len(inner) > MAX_PATH_CHARACTERS:
                allowed = f"at most {MAX_PATH_CHARACTERS} characters"
                raise self._wrong(key_node, path, "has a key whose path is too long", allowed)
            if key in own:
                raise self._wrong(key_node, inner, "is given twice", "once")
            self._lines[inner] = key_node.start_mark.line + 1
            own[key] = self._value(value_node, inner, depth + 1)
        return {**merged, **own}

    def _merge_sources(self, node: yaml.Node, path: str) -> Iterator[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                raise self._wrong(node, path, "merges something that is no mapping", "a mapping")
            self._values_left -= 1
            yield source

    def _key(self, node: yaml.Node, path: str) -> str:
        """A key as text. kubectl turns numbers and booleans into text as well."""
        if not isinstance(node, yaml.ScalarNode):
            raise self._wrong(node, path, "has a key that is no text", "text")
        return node.value

    def _scalar(self, node: yaml.Node, path: str) -> JsonValue:
        text: str = node.value
        try:
            match node.tag.rpartition(":")[2]:
                case "str" | "merge":
                    return text
                case "bool":
                    return text.lower() in ("y", "yes", "true", "on")
                case "null":
                    return None
                case "int":
                    return _integer(text)
                case "float":
                    return _number(text)
                case _:
                    pass
        except ValueError:
            pass  # Written with a tag that its text does not fit: wrong, as below.
        raise self._wrong(node, path, f"is {text[:40]!r} (tag {node.tag})", "a JSON value")

    def _wrong(self, node: yaml.Node, path: str, message: str, allowed: str) -> YamlProblemError:
        return YamlProblemError(Problem(path, message, allowed, node.start_mark.line + 1))


def _integer(text: str) -> int:
    """YAML 1.1 integers: a leading 0 is octal. Raises ValueError for one that is absurdly long."""
    digits = text.replace("_", "")
    if len(digits) > MAX_DIGITS:
        raise ValueError
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    for prefix, base in (("0b", 2), ("0x", 16), ("0o", 8)):
        if digits.startswith(prefix):
            return sign * int(digits[2:], base)
    return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)


def _number(text: str) -> JsonValue:
    """A float as JSON has it: whole ones are integers, ones beyond a double stay text."""
    number = float(text.replace("_", ""))  # ".inf" and ".nan" are no Python floats: ValueError
    if not math.isfinite(number):
        return text
    return int(number) if number.is_integer() else number
