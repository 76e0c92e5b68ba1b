"""What the demo claims of stage 2 behind its kill, checked against every chunk that came. Pure."""

from collections.abc import Sequence

from duplex_sidecar.client.conversation import Replies


def epoch_begins_anew(replies: Sequence[Replies], last_unit: int) -> bool:
    """Whether the first sound behind `last_unit` is of a newer epoch than all before it, which
    counts its chunks from 0. In mid-turn the first of them are what sounded of the turn already:
    the new epoch hears that muted. True too where nothing sounded any more."""
    before = [one for one in replies if one.input_s <= last_unit]
    behind = [one for one in replies if one.input_s > last_unit]
    if not behind:
        return True
    first = behind[0]
    muted = [one for one in before if one.turn == first.turn]
    begins = 0 < first.sequence <= len(muted) if first.from_sample else first.sequence == 0
    in_order = [one.sequence for one in behind if one.epoch == first.epoch]
    return (
        begins
        and first.epoch > max((one.epoch for one in before), default=-1)
        and first.from_sample == sum(len(one.pcm_s16le) // 2 for one in muted)
        and in_order == list(range(first.sequence, first.sequence + len(in_order)))
    )
