"""What of a session's meta goes into another ledger: every field has been thought of."""

import re
from pathlib import Path

import pytest

from duplex_sidecar.ledger import scripts
from duplex_sidecar.ledger.archive import FRESH, KEPT

pytestmark = pytest.mark.unit

_RELINKED = frozenset({"opening_hash", "floor_hash", "head", "bytes"})
"""The new id changes them."""
_WITHOUT = frozenset(
    {
        *("next_fence", "next_nonce", "next_replica", "next_address", "next_until", "next_asked"),
        *("failure_op", "failure_seq", "failure_count"),
        *("erased_at", "confirmed"),  # of a tombstone
    }
)
"""An import begins without these."""
_WRITE = re.compile(r"redis\.call\(\s*'HSET',\s*KEYS\[1\],")


def _arguments(text: str) -> list[str]:
    """Of a call whose opening bracket and first arguments are before `text`."""
    found, depth, quoted, word = list[str](), 0, False, ""
    for character in text:
        quoted ^= character == "'"
        if not quoted and depth == 0 and character in ",)":
            found.append(" ".join(word.split()))
            word = ""
            if character == ")":
                return found
            continue
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        word += character
    raise AssertionError("a call without an end")


def written_fields() -> set[str]:
    """Names that the scripts write into a session's meta."""
    fields: set[str] = set()
    for file in Path(scripts.__file__).parent.glob("*.lua"):
        text = file.read_text()
        for call in _WRITE.finditer(text):
            for name in _arguments(text[call.end() :])[::2]:
                ending = re.fullmatch(r"what \.\. '(\w+)'", name)
                if ending:
                    fields |= {f"{what}{ending[1]}" for what in ("respeak", "failure")}
                else:
                    assert re.fullmatch(r"'\w+'", name), f"{file.name}: {name}"
                    fields.add(name.strip("'"))
    return fields


def test_each_field_that_a_script_writes_is_kept_or_begins_anew_on_purpose() -> None:
    groups = (KEPT, frozenset(FRESH), _RELINKED, _WITHOUT)
    written = written_fields() | {"next_fence", "next_nonce"}
    assert len(written) > 40
    assert set().union(*groups) == written
    assert sum(map(len, groups)) == len(written), "a field is in two groups"
