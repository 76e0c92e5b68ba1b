"""Whether a new owner gave a session the window that the lost one would have given it. Pure: reads
records, for whoever looks at a conversation from outside."""

from collections.abc import Sequence

from duplex_sidecar.ledger.records import Accepted, Committed, Record
from duplex_sidecar.model.minicpmo45.constants import UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.framing import FrameSize, reserve_append
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.prompting import plan_after
from duplex_sidecar.window.state import Rebuild

_SMALL = FrameSize(1, 1)
"""A single frame is never cut, whatever its size: one block."""


def window_is_the_same(
    facts: SessionFacts, before: Conversation, frames: int, recorded: Sequence[Record]
) -> bool:
    """Whether the first unit behind the kill was answered in the window that its owner from before
    the kill would have given it: as many units left, and a prompt as long to the token.

    before: as the ledger had it when the old owner was dead and the new one not there yet. frames:
    camera frames of that unit, none or a single one; the ledger keeps what was made of them, while
    the unit is in the window. recorded: the ledger at the end."""
    seq = before.seq + 1
    accepted = [one for one in recorded if isinstance(one, Accepted) and one.seq == seq]
    committed = [one for one in recorded if isinstance(one, Committed) and one.seq == seq]
    if not accepted or not committed:
        return False
    unit, made = accepted[0], committed[0].plan
    samples = unit.input.chunks * UNIT_SAMPLES
    slots = reserve_append(seq, samples, [_SMALL] * frames, 0).slots
    planned, window = plan_after(facts, before, slots, None)
    dropped = planned.drop_units if isinstance(planned, Rebuild) else 0
    return (made.prompt_tokens, made.dropped_units) == (window.prompt_tokens, dropped)
