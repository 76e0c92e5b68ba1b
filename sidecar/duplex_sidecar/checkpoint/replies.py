"""What the tiny Thinker is taught to do: a small machine over the last token and what was heard.

At the start of a unit it listens while somebody speaks and speaks when it is quiet. Then each token
allows the ones that may follow it in a handful of sentences; a full stop ends the turn, a sentence
without one goes on in the next unit. A turn that the user speaks into ends at once (there the
policy makes `tts_bos` of the wish to listen).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from duplex_sidecar.checkpoint.rehearsal import Moment
from duplex_sidecar.checkpoint.tokenizer import DuplexTokenizer
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

FULL_STOP = "."
SENTENCES = (
    " yes, I hear you.",
    " good, I see.",
    " no, thank you.",
    " take your time.",
    " right, see you tomorrow.",
    " please bring some tea.",
    " we like the old song.",
    " well, let me think about that",
    " now look at the blue sky and",
    " three apples and one book",
    " it was a long way but",
    " I will listen when",
    " there are four of them by",
    " tell me more about your house and the old clock on the green hill.",
)
"""Each word is one token. The last one is longer than a unit may be, so the text limit cuts it."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """followers: tokens that may come after a token within a unit."""

    listen: int
    speak: int
    followers: Mapping[int, frozenset[int]]

    def state_of(self, moment: Moment) -> int:
        """What decides: the last token of the unit, or (negative) what was heard at its start."""
        if moment.emitted_ids:
            return moment.emitted_ids[-1]
        return -1 if moment.heard.silent else -2

    def allowed(self, moment: Moment) -> frozenset[int]:
        """Tokens that are right at this moment."""
        if moment.emitted_ids:
            return self.followers[moment.emitted_ids[-1]]
        return frozenset((self.speak if moment.heard.silent else self.listen,))


def make_teacher(tokenizer: DuplexTokenizer, vocabulary: Vocabulary) -> Teacher:
    """The machine for this tokenizer's ids."""
    followers: dict[int, set[int]] = {
        vocabulary.tts_bos: {vocabulary.turn_eos},
        vocabulary.turn_eos: {vocabulary.listen},
        vocabulary.speak: set(),
    }
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence)
        followers[vocabulary.speak].add(ids[0])
        for id_, following in pairwise(ids):
            followers.setdefault(id_, set()).add(following)
        end = vocabulary.turn_eos if sentence.endswith(FULL_STOP) else vocabulary.chunk_eos
        followers.setdefault(ids[-1], set()).add(end)
    return Teacher(
        listen=vocabulary.listen,
        speak=vocabulary.speak,
        followers={id_: frozenset(ids) for id_, ids in followers.items()},
    )
