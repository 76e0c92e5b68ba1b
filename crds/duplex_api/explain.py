"""pydantic's errors as problems a user can act on: wire path, what is wrong, what is allowed."""

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from duplex_api.base import PATTERNS_IN_WORDS
from duplex_api.problems import Problem

_NO_NUMBER = ("float_type", "int_type", "finite_number")
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_NO_BOUND = 2**31 - 1
"""What is only as large as its type is bounded by nothing that helps."""
_SHOWN_CHARACTERS = 40
"""Longer texts are not shown: a prompt does not belong into an error message or a log."""


def explain_errors(model: type[BaseModel], error: ValidationError) -> Iterator[Problem]:
    """One problem per error of validating wire data against `model`."""
    for details in error.errors(include_url=False):
        yield _explain(model, details)


def _explain(model: type[BaseModel], details: ErrorDetails) -> Problem:
    path = wire_path(details["loc"])
    given: Any = details["input"]
    match details["type"]:
        case "extra_forbidden":
            known = _fields_at(model, details["loc"][:-1])
            close = difflib.get_close_matches(str(details["loc"][-1]), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return Problem(path, f"unknown field{hint}", ", ".join(known))
        case "missing":
            return Problem(path, "is required", "a value")
        case "value_error":
            return Problem(path, str(details.get("ctx", {}).get("error", details["msg"])), "")
        case "enum" | "literal_error" if isinstance(given, bool):
            expected = str(details.get("ctx", {}).get("expected", ""))
            return Problem(
                path,
                "is a boolean: YAML reads a bare on, off, yes or no as one; quote it",
                expected,
            )
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(path, _shown(given), "an object")
        case "string_pattern_mismatch" if words := PATTERNS_IN_WORDS.get(
            details.get("ctx", {}).get("pattern", "")
        ):
            return Problem(path, _shown(given), words)
        case _:
            allowed = re.sub(r"^(Input|\w+) should (be )?", "", details["msg"])
            if details["type"] in _NO_NUMBER:
                allowed = ", ".join((allowed, *_bounds_at(model, details["loc"])))
            return Problem(path, _shown(given), allowed)


def wire_path(location: tuple[int | str, ...]) -> str:
    """("spec", "a", 0) -> "spec.a[0]". Keys of a mapping that pydantic marks are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else part
    return path


def _shown(given: Any) -> str:
    if isinstance(given, str):
        short = len(given) <= _SHOWN_CHARACTERS
        return f"is {given!r}" if short else f"is a text of {len(given)} characters"
    if given is None or isinstance(given, bool | int | float):
        return f"is {json.dumps(given)}"
    return "is a list" if isinstance(given, list) else "is an object"


def _bounds_at(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterator[str]:
    """Of the number at `location`, in words."""
    named: Any = None
    for part in location:
        for field in model.model_fields.values():
            if field.alias == part:
                named, model = field, _model_in(field.annotation) or model
    if named is not None:
        for each in (*_constraints(named.annotation), *named.metadata):
            for name, words in _BOUNDS.items():
                bound = getattr(each, name, None)
                if bound is not None and bound < _NO_BOUND:
                    yield f"{words} {bound}"


def _constraints(annotation: Any) -> Iterator[Any]:
    """What stands beside the types in `Annotated[...] | None`."""
    for inner in get_args(annotation):
        yield from getattr(inner, "metadata", ())
        yield from _constraints(inner)


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Wire names of the fields that the object at `location` may have."""
    for part in location:
        for field in model.model_fields.values():
            if field.alias == part:
                model = _model_in(field.annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model | None`, `tuple[Model, ...]`, `dict[str, Model]`, Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
