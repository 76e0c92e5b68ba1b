"""A small vocabulary for the tests of the model's rules."""

import pytest

from duplex_sidecar.model.minicpmo45.vocabulary import REQUIRED_TOKENS, Vocabulary

WORDS = (" one", " two", " three", "a", "é".encode()[:1], "é".encode()[1:], " longer word", "!")


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Ids 0..9: the required control tokens in order; 10..17: words; 18 special; 19 bad."""
    words = [word.encode() if isinstance(word, str) else word for word in WORDS]
    return Vocabulary(
        control_ids={token: id_ for id_, token in enumerate(REQUIRED_TOKENS)},
        special_ids=frozenset({18}),
        bad_ids=frozenset({19}),
        token_bytes=(*(token.value.encode() for token in REQUIRED_TOKENS), *words, b"<s>", b"bad"),
    )
