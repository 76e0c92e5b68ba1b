"""What a checker says of a history."""

from enum import StrEnum

import msgspec


class Rule(StrEnum):
    """What must hold; each names the way in which it was broken."""

    ACKNOWLEDGED_INPUT_LOST = "acknowledged_input_lost"
    ACKNOWLEDGED_BEFORE_DURABLE = "acknowledged_before_durable"
    LEDGER_UNREADABLE = "ledger_unreadable"
    SESSION_OF_ANOTHER = "session_of_another"
    UNITS_NOT_CONTIGUOUS = "units_not_contiguous"
    CONFIRMED_WRITE_GONE = "confirmed_write_gone"
    CHAIN_FORKED = "chain_forked"
    EXECUTED_TWICE = "executed_twice"
    FENCE_OF_TWO_REPLICAS = "fence_of_two_replicas"
    WRITE_AFTER_LOSS = "write_after_loss"
    EVENT_BEFORE_JOURNAL = "event_before_journal"
    EVENT_DIFFERS_FROM_JOURNAL = "event_differs_from_journal"
    SEQUENCE_REUSED = "sequence_reused"
    EVENT_MISSING = "event_missing"
    EVENT_REPEATED = "event_repeated"
    AUDIO_MISSING = "audio_missing"
    AUDIO_REPEATED = "audio_repeated"
    UNIT_NOT_SAID = "unit_not_said"
    UNIT_SAID_TWICE = "unit_said_twice"
    PLAYED_BEFORE_COMMIT = "played_before_commit"
    PLAYED_BEYOND_COMMITTED = "played_beyond_committed"
    TRIMMED_UNPLAYED = "trimmed_unplayed"
    COMMAND_APPLIED_TWICE = "command_applied_twice"
    COMMAND_BEFORE_DURABLE = "command_before_durable"
    EPOCH_OUT_OF_ORDER = "epoch_out_of_order"
    SPOKE_WITHOUT_LEASE = "spoke_without_lease"
    WINDOW_DIFFERS = "window_differs"
    ANSWER_DIFFERS = "answer_differs"
    HIDDEN_RETRY = "hidden_retry"
    WAIT_ELSEWHERE = "wait_elsewhere"


LOSSES = frozenset(
    {
        Rule.ACKNOWLEDGED_INPUT_LOST,
        Rule.EVENT_MISSING,
        Rule.AUDIO_MISSING,
        Rule.UNIT_NOT_SAID,
        Rule.CONFIRMED_WRITE_GONE,
        Rule.LEDGER_UNREADABLE,
    }
)
DUPLICATES = frozenset(
    {Rule.SEQUENCE_REUSED, Rule.EVENT_REPEATED, Rule.AUDIO_REPEATED, Rule.UNIT_SAID_TWICE}
)


class Violation(msgspec.Struct, frozen=True):
    """text: for people, with the numbers that show it; never content."""

    rule: Rule
    session: str
    text: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in a history. refused_zombie_writes: scripts of an owner that had lost its
    lease. redos: notes that a unit is submitted again. resends: operations that were sent more than
    once. takeovers: a session's lease given to another replica than before. cuts: replies that a
    client stopped or took back."""

    sessions: int = 0
    commands: int = 0
    frames: int = 0
    acknowledged_units: int = 0
    committed_units: int = 0
    events: int = 0
    refused_zombie_writes: int = 0
    redos: int = 0
    resends: int = 0
    takeovers: int = 0
    cuts: int = 0

    def plus(self, other: "Counts") -> "Counts":
        mine, its = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Counts(**{name: mine[name] + its[name] for name in mine})


class Minimums(msgspec.Struct, frozen=True, kw_only=True):
    """A history in which less happened proves nothing."""

    acknowledged_units: int = 1
    events: int = 1
    refused_zombie_writes: int = 0
    redos: int = 0
    resends: int = 0
    takeovers: int = 0

    def missing(self, counts: Counts) -> list[str]:
        """Sentences about what did not happen often enough."""
        return [
            f"{name}: {getattr(counts, name)}, at least {wanted} wanted"
            for name, wanted in msgspec.structs.asdict(self).items()
            if getattr(counts, name) < wanted
        ]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """not_judged: rules that had nothing to go by, with why."""

    name: str
    counts: Counts
    violations: tuple[Violation, ...]
    not_judged: tuple[str, ...] = ()

    @property
    def rules(self) -> frozenset[Rule]:
        return frozenset(violation.rule for violation in self.violations)

    @property
    def lost(self) -> int:
        return sum(violation.rule in LOSSES for violation in self.violations)

    @property
    def duplicated(self) -> int:
        return sum(violation.rule in DUPLICATES for violation in self.violations)
