"""The words and places that must not stand in the project."""

import pytest

from scripts.check_text import complaints

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "line",
    [
        "def re_" + "prefill(): ...",
        "kind: Duplex" + "Sessions",
        "from x import code_to" + "_wav",
        "path = '/" + "work/main'",
        "see https://pypi" + ".org/p/x",
        "image: ghcr" + ".io/x/y",
        "open('/" + "tmp/x')",
    ],
)
def test_what_must_not_stand_there_is_found(line: str) -> None:
    found = list(complaints("some/file.py", f"fine\n{line}\n"))
    assert len(found) == 1
    assert found[0].startswith("some/file.py:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "reprefill is the strategy",
        "kubectl get duplexsessions",
        "the network/roots of a framework/",
        "${HOME}/work/x",
        "kind: DuplexSession",
        "barge_in",
    ],
)
def test_other_text_is_left_alone(line: str) -> None:
    assert list(complaints("some/file.py", line)) == []
