"""How our models meet Kubernetes: camelCase on the wire, snake_case in Python, frozen.

Reading an object that the API server has stored ignores fields of a newer release; reading a
user's manifest refuses them (`manifest`), as `kubectl apply` does.
"""

from collections.abc import Hashable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
)
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of everything in the contract. Constructed in Python by snake_case names."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


Flag = StrictBool
Count = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
LongCount = Annotated[StrictInt, Field(ge=0, le=2**63 - 1)]
Real = StrictFloat
"""A JSON number. An integer is one too; a boolean or a string is not."""

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_IN_WORDS = "small letters, digits and inner hyphens"
_NAME_PATTERN = rf"^{_LABEL}(\.{_LABEL})*$"
_LABEL_PATTERN = rf"^{_LABEL}$"
_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"

PATTERNS_IN_WORDS = {
    _NAME_PATTERN: f"{_LABEL_IN_WORDS}, in parts between dots",
    _LABEL_PATTERN: _LABEL_IN_WORDS,
    _KEY_PATTERN: "letters, digits, hyphens, dots and underscores",
    QUANTITY_PATTERN: 'a number and a unit, for example "16Gi"',
}
"""What a user is told instead of a regular expression."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=_NAME_PATTERN)]
LabelName = Annotated[str, Field(min_length=1, max_length=63, pattern=_LABEL_PATTERN)]
DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=_KEY_PATTERN)]
"""A key inside a Secret or ConfigMap."""


_Item = TypeVar("_Item", bound=Hashable)


def _distinct(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
    if len(set(items)) < len(items):
        raise ValueError("has an item twice")
    return items


DISTINCT = (
    AfterValidator(_distinct),
    Field(json_schema_extra={"x-kubernetes-list-type": "set"}),
)
"""Metadata of a tuple whose items must differ, on the server too."""


def cel_rules(*rules: tuple[str, str]) -> dict[str, Any]:
    """Schema extra that carries CEL rules: (expression, sentence shown to the user) each.

    The API server evaluates them; the same condition stands in Python beside it, so that the
    stand-alone sidecar refuses what a cluster refuses.
    """
    return {
        "x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]
    }
