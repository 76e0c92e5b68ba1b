"""What is said of a session that is over: a sentence, with the ledger's word for why."""

import pytest

from duplex_sidecar.ledger.errors import SessionEnded
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.refusals import session_over, typed_refusals

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("", "The session has ended."),
        ("session_ended", "The session has ended."),
        ("idle_timeout", "The session has ended: idle_timeout."),
    ],
)
def test_a_session_that_is_over_is_told_so_in_a_sentence(word: str, sentence: str) -> None:
    assert session_over(word).detail == sentence
    with pytest.raises(ClientError) as over, typed_refusals():
        raise SessionEnded("s", word)
    assert (over.value.code, over.value.detail) == (ErrorCode.SESSION_ENDED, sentence)
