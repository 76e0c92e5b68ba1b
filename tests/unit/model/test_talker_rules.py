import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.plain_talker import END, TALKER, next_code

from duplex_sidecar.model.minicpmo45.decode import Sampling
from duplex_sidecar.model.minicpmo45.talker import (
    BUDGETS,
    CODEC_EOS,
    CODEC_SIZE,
    MAX_UNIT_CODES,
    TALKER_SAMPLING,
    EosRule,
    UnitKind,
    UnitRules,
    decode_rules,
    encode_rules,
    eos_rule,
    recent_codes,
    unit_kind,
)
from duplex_sidecar.model.minicpmo45.talker_context import (
    ContextFault,
    PromptAction,
    TalkerContext,
    TalkerContextError,
    plan_condition,
)
from duplex_sidecar.model.minicpmo45.talker_sampling import CodeRow, choose_codes, penalise_codes

pytestmark = pytest.mark.unit

GREEDY = Sampling(greedy=True, temperature=0.0, top_k=0, top_p=1.0)


def rules(
    kind: UnitKind,
    recent: tuple[int, ...] = (),
    sampling: Sampling = GREEDY,
    seed: str = "session:3",
) -> UnitRules:
    return UnitRules(kind, recent, sampling, seed)


def generate(unit: UnitRules, logits: torch.Tensor) -> list[int]:
    codes: list[int] = []
    while True:
        code = int(choose_codes(logits, [CodeRow(unit, tuple(codes))])[0])
        if code == CODEC_EOS:
            return codes
        codes.append(code)


def test_kinds_and_budgets() -> None:
    assert unit_kind(turn_start=True, turn_end=True) is UnitKind.END
    assert unit_kind(turn_start=True, turn_end=False) is UnitKind.START
    assert unit_kind(turn_start=False, turn_end=False) is UnitKind.MID
    assert MAX_UNIT_CODES == 103
    assert all(eos_rule(kind, b.max_codes - 1) is EosRule.FORCE for kind, b in BUDGETS.items())


def test_a_middle_unit_has_exactly_25_codes() -> None:
    eager = torch.zeros(1, CODEC_SIZE)
    eager[0, CODEC_EOS] = 50.0
    assert len(generate(rules(UnitKind.MID), eager)) == 25
    assert generate(rules(UnitKind.START), eager) == []
    never = torch.zeros(1, CODEC_SIZE)
    never[0, CODEC_EOS] = -50.0
    assert len(generate(rules(UnitKind.START), never)) == 25
    assert len(generate(rules(UnitKind.END), never)) == 103


def test_the_end_of_a_turn_is_not_cut_right_after_a_second() -> None:
    masked = [step for step in range(104) if eos_rule(UnitKind.END, step) is EosRule.MASK]
    assert masked == [*range(25, 30), *range(50, 55), *range(75, 80), *range(100, 103)]


def test_padding_columns_are_never_chosen_and_logits_stay() -> None:
    logits = torch.zeros(1, CODEC_SIZE + 6)
    logits[0, CODEC_SIZE + 2] = 90.0
    logits[0, 17] = 3.0
    before = logits.clone()
    assert choose_codes(logits, [CodeRow(rules(UnitKind.MID), ())]).tolist() == [17]
    assert torch.equal(logits, before)


def test_the_penalty_counts_the_last_16_codes() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    history = [2, *[0] * 3, *[1] * 2, *[3] * 11]
    got = penalise_codes(logits, [history])[0]
    expected = torch.tensor([2 / 1.05**3, -2 * 1.05**2, 2.0, 2 / 1.05**11])
    assert torch.allclose(got, expected)
    assert torch.equal(penalise_codes(logits, [[]]), logits)
    assert recent_codes((1,) * 15, (2, 3)) == ((1,) * 14 + (2, 3))


def test_a_batch_chooses_what_its_rows_choose_alone() -> None:
    torch.manual_seed(5)
    rows = [
        CodeRow(rules(kind, recent, sampling, f"s:{seed}"), codes)
        for kind in UnitKind
        for recent in ((), (5, 5, 6))
        for sampling in (GREEDY, TALKER_SAMPLING)
        for seed, codes in ((1, ()), (2, (9, 8)), (3, (1,) * 25))
    ]
    logits = torch.randn(len(rows), CODEC_SIZE) * 2
    together = choose_codes(logits, rows).tolist()
    alone = [int(choose_codes(logits[i : i + 1], [rows[i]])[0]) for i in range(len(rows))]
    assert together == alone


@pytest.mark.parametrize("kind", UnitKind)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_whole_unit_is_what_the_plain_choice_gives(kind: UnitKind, sampled: bool) -> None:
    """Code by code, from logits in which few codes compete and the end is often the best one."""
    generator = torch.Generator().manual_seed(len(kind) + sampled)
    recent = (7, 7, 8, 9) if kind is not UnitKind.START else ()
    sampling = TALKER_SAMPLING if sampled else GREEDY
    unit = rules(kind, recent, sampling, "session:4")
    codes: list[int] = []
    ended: set[bool] = set()
    for _ in range(250):
        logits = torch.randn(1, CODEC_SIZE, generator=generator)
        logits[0, :20] += 6
        logits[0, CODEC_EOS] += 7 * (len(codes) % 7 == 6)
        code = int(choose_codes(logits, [CodeRow(unit, tuple(codes))])[0])
        plain = TALKER if sampled else None
        assert code == next_code(logits[0].tolist(), kind, recent, codes, plain, unit.seed)
        ended.add(code == END)
        codes = [] if code == END else [*codes, code]
    assert ended == {True, False}


def test_a_row_of_nan_harms_no_other_row() -> None:
    torch.manual_seed(6)
    logits = torch.randn(3, CODEC_SIZE)
    rows = [CodeRow(rules(UnitKind.END, (), TALKER_SAMPLING, f"s:{i}"), ()) for i in range(3)]
    clean = choose_codes(logits, rows).tolist()
    logits[1] = float("nan")
    broken = choose_codes(logits, rows).tolist()
    assert broken[::2] == clean[::2]
    assert 0 <= broken[1] < CODEC_SIZE


def test_rules_travel_as_msgpack_and_wrong_ones_are_refused() -> None:
    unit = rules(UnitKind.END, (1, 2, 6560), TALKER_SAMPLING)
    assert decode_rules(encode_rules(unit)) == unit
    with pytest.raises(ValueError, match="6561 is not a codec code"):
        decode_rules(encode_rules(rules(UnitKind.MID, (CODEC_EOS,))))
    with pytest.raises(ValueError, match="recent codes"):
        rules(UnitKind.MID, (1,) * 17)
    with pytest.raises(msgspec.ValidationError):
        decode_rules(msgspec.msgpack.encode({"kind": "middle"}))


def plan(
    context: TalkerContext | None,
    length: int,
    codes: int = 25,
    *,
    seq: int | None = None,
    reserve: int = 26,
    start: bool = False,
    limit: int = 4096,
    lost: bool = False,
) -> tuple[PromptAction, TalkerContext]:
    following = 0 if context is None else context.condition_seq + 1
    planned = plan_condition(
        context,
        condition_seq=following if seq is None else seq,
        condition_len=length,
        confirmed_codes=codes,
        reserve=reserve,
        turn_start=start,
        limit=limit,
        stream_lost=lost,
    )
    return planned.action, planned.after


def test_exactly_at_the_limit_extends_and_above_rebuilds_once() -> None:
    context = TalkerContext(prompt_len=4000, condition_len=12, condition_seq=7)
    at_limit = 4096 - 26 - 25 - 4000
    assert plan(context, at_limit)[0] is PromptAction.EXTEND
    action, after = plan(context, at_limit + 1)
    assert action is PromptAction.RECOMPUTE
    assert after == TalkerContext(12 + 25 + at_limit + 1, at_limit + 1, 8)
    assert plan(after, 10)[0] is PromptAction.EXTEND


def test_a_turn_start_replaces_and_a_lost_stream_rebuilds() -> None:
    assert plan(None, 9) == (PromptAction.REPLACE, TalkerContext(9, 9, 0))
    context = TalkerContext(prompt_len=100, condition_len=12, condition_seq=7)
    assert plan(context, 9, start=True) == (PromptAction.REPLACE, TalkerContext(9, 9, 8))
    assert plan(context, 9, lost=True) == (
        PromptAction.RECOMPUTE,
        TalkerContext(12 + 25 + 9, 9, 8),
    )


@pytest.mark.parametrize(
    ("length", "codes", "seq", "limit", "fault"),
    [
        (9, 25, 9, 4096, ContextFault.SEQUENCE_NOT_CONTIGUOUS),
        (4096 - 25, 25, 8, 4096, ContextFault.CONDITION_TOO_LONG),
        (9, 104, 8, 200, ContextFault.TOO_MANY_CONFIRMED_CODES),
        (130, 103, 8, 200, ContextFault.WINDOW_TOO_LONG),
    ],
)
def test_a_condition_that_cannot_enter_is_named(
    length: int, codes: int, seq: int, limit: int, fault: ContextFault
) -> None:
    context = TalkerContext(prompt_len=150, condition_len=12, condition_seq=7)
    with pytest.raises(TalkerContextError) as caught:
        plan(context, length, codes, seq=seq, limit=limit)
    assert caught.value.fault is fault


@given(
    st.lists(
        st.tuples(
            st.integers(2, 21), st.integers(0, 103), st.sampled_from((26, 104)), st.booleans()
        )
    )
)
def test_the_prompt_never_outgrows_the_limit_and_rebuilds_are_rare(
    conditions: list[tuple[int, int, int, bool]],
) -> None:
    limit = 512
    context: TalkerContext | None = None
    for length, codes, reserve, start in conditions:
        action, after = plan(context, length, codes, reserve=reserve, start=start, limit=limit)
        assert after.prompt_len + reserve <= limit
        if action is PromptAction.RECOMPUTE:
            assert context is not None
            assert context.prompt_len + codes + length + reserve > limit
        context = after
