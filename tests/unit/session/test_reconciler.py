"""Streams that belong to no session are closed, and only those."""

import pytest

from duplex_sidecar.session.reconciler import orphans

pytestmark = pytest.mark.unit


def test_a_stream_of_nobody_is_suspected_first_and_closed_then() -> None:
    held = {"a/1/1", "b/4/2", "c"}
    close, suspects = orphans(held, {"a"}, set())
    assert (close, suspects) == (set(), {"b/4/2", "c"})
    close, suspects = orphans(held, {"a"}, suspects)
    assert (close, suspects) == ({"b/4/2", "c"}, set())


def test_a_session_that_came_meanwhile_keeps_its_stream() -> None:
    _, suspects = orphans({"a/1/1"}, set(), set())
    assert orphans({"a/1/1"}, {"a"}, suspects) == (set(), set())
