"""Rules of the Talker's codec codes (contract section D, "Budgets"). Pure; the batched choice that
follows them is `talker_sampling.choose_codes`.

A unit's rules travel with its condition as msgpack and say everything apart from the logits, so a
redone unit gives the same codes.
"""

from enum import StrEnum

import msgspec

from duplex_sidecar.model.minicpmo45.decode import MAX_SEED_CHARACTERS, Sampling

CODEC_SIZE = 6562
"""Codes of the Talker's vocabulary, the end code included."""
CODEC_EOS = CODEC_SIZE - 1
CODES_PER_SECOND = 25
CODEC_PENALTY = 1.05
CODEC_PENALTY_WINDOW_CODES = 16
TALKER_SAMPLING = Sampling(greedy=False, temperature=0.8, top_k=25, top_p=0.85)

_DRAIN_GUARD_CODES = 5
"""At a turn end the end code is masked for the first codes of every later second, so that the last
chunk is never shorter than the vocoder can take."""


class UnitKind(StrEnum):
    """What a Talker unit is within its turn. A unit that starts and ends a turn is an END."""

    START = "start"
    MID = "mid"
    END = "end"


class Budget(msgspec.Struct, frozen=True):
    """Codes of one unit, the end code included: at most `max_codes` steps, and no end code in the
    first `min_codes` steps (but a forced one in the last step)."""

    max_codes: int
    min_codes: int


BUDGETS = {
    UnitKind.START: Budget(max_codes=26, min_codes=0),
    UnitKind.MID: Budget(max_codes=26, min_codes=26),
    UnitKind.END: Budget(max_codes=104, min_codes=0),
}
MAX_UNIT_CODES = BUDGETS[UnitKind.END].max_codes - 1
"""Most codes that one unit can have, without the end code."""


def unit_kind(*, turn_start: bool, turn_end: bool) -> UnitKind:
    """Kind of a unit by its place in the turn; the end of a turn decides before its start."""
    if turn_end:
        return UnitKind.END
    return UnitKind.START if turn_start else UnitKind.MID


class EosRule(StrEnum):
    """What happens to the end code at one step."""

    FREE = "free"
    MASK = "mask"
    FORCE = "force"


def eos_rule(kind: UnitKind, produced_codes: int) -> EosRule:
    """Rule for the step after `produced_codes` codes of the unit.

    The last step always forces the end code: an engine may drop the last token of a resumed
    stream, and so it can never drop a code.
    """
    budget = BUDGETS[kind]
    if produced_codes >= budget.max_codes - 1:
        return EosRule.FORCE
    if produced_codes < budget.min_codes:
        return EosRule.MASK
    late = produced_codes >= CODES_PER_SECOND
    if kind is UnitKind.END and late and produced_codes % CODES_PER_SECOND < _DRAIN_GUARD_CODES:
        return EosRule.MASK
    return EosRule.FREE


class UnitRules(msgspec.Struct, frozen=True):
    """Everything that decides the codes of one unit, apart from the logits.

    recent_codes: the turn's last codes before the unit, oldest first, at most
    `CODEC_PENALTY_WINDOW_CODES`; empty at a turn start. seed: names the draws of the unit.
    """

    kind: UnitKind
    recent_codes: tuple[int, ...]
    sampling: Sampling
    seed: str

    def __post_init__(self) -> None:
        if len(self.seed) > MAX_SEED_CHARACTERS:
            raise ValueError(f"seed is longer than {MAX_SEED_CHARACTERS} characters")
        if len(self.recent_codes) > CODEC_PENALTY_WINDOW_CODES:
            raise ValueError(f"more than {CODEC_PENALTY_WINDOW_CODES} recent codes")

    @property
    def budget(self) -> Budget:
        """Limits of the unit; `max_codes` is the engine's max_tokens."""
        return BUDGETS[self.kind]


_rules_decoder = msgspec.msgpack.Decoder(UnitRules)


def encode_rules(rules: UnitRules) -> bytes:
    """Rules as msgpack, the form in which they travel (`TalkerFeed.rules`)."""
    return msgspec.msgpack.encode(rules)


def decode_rules(data: bytes) -> UnitRules:
    """Rules from msgpack. Raises ValueError when malformed or when a code is not one."""
    rules = _rules_decoder.decode(data)
    for code in rules.recent_codes:
        if not 0 <= code < CODEC_EOS:
            raise ValueError(f"{code} is not a codec code")
    return rules


def recent_codes(before: tuple[int, ...], codes: tuple[int, ...]) -> tuple[int, ...]:
    """The penalty window after a unit: the last 16 of the codes before and of the unit's own."""
    return (*before, *codes)[-CODEC_PENALTY_WINDOW_CODES:]
