"""What the units of a turn say where a bench decides it: random weights say nothing sensible."""

from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary


def turn_script(
    vocabulary: Vocabulary, *, listening: int, speaking: int, text_tokens: int, last_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Token ids of one turn's units, again and again: so many that listen, then a reply of so many
    units with so many text tokens each, the last one with fewer and the turn's end."""
    text = [
        id_
        for id_ in range(vocabulary.size)
        if id_ not in vocabulary.special_ids
        and id_ not in vocabulary.bad_ids
        and len(vocabulary.token_bytes[id_]) > 1
    ][:text_tokens]
    listen = (vocabulary.listen,)
    speak = (vocabulary.speak, *text, vocabulary.chunk_eos)
    ends = (vocabulary.turn_eos, vocabulary.chunk_eos)
    last = (vocabulary.speak, *text[:last_tokens], *ends)
    return (listen,) * listening + (speak,) * (speaking - 1) + (last,)
