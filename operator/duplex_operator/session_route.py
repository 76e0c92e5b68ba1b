"""A session's route record, kept as its status is: what the gateways let clients in by.

A token that was changed stays in it beside the new one until a message has come under that. The
sidecar refuses the old one from then on, and so do the gateways, which look into the ledger, too;
here it is noticed a little later.

One that is changed back is named twice until the sidecar has been told: only then is it certain
that nothing comes under the one in between any more.
"""

from duplex_api.routes import RouteRecord
from duplex_operator.context import Context
from duplex_operator.decide.status import phase_for_clients
from duplex_operator.objects import SessionObject
from duplex_operator.observe import Known, route_keep_ms

SOONEST_LOOK_S, LATEST_LOOK_S = 2.0, 60.0


async def keep_route(context: Context, session: SessionObject, known: Known) -> float | None:
    """Writes it where it says something new, or is half as old as it may get. A session without a
    token has none. Returns after how many seconds to look whether a token that was replaced lets
    nobody in any more. Raises LedgerAwayError."""
    token = known.token
    if token is None:
        return None
    if known.replaced:
        let_in = await context.routes.token_let_in(session.meta.uid)
        if known.token is not token:
            return SOONEST_LOOK_S  # changed once more meanwhile: what was seen says nothing of that
        untold = known.memory.token_untold and session.status.placement is not None
        known.replaced = "" if let_in == token.sha256 and not untold else let_in
    status = session.status
    record = RouteRecord(
        token_sha256=known.replaced or token.sha256,
        token_sha256_next=token.sha256 if known.replaced else None,
        phase=phase_for_clients(status),
        pool=str(session.pool_key),
        session=str(session.meta.key),
        queue_position=status.queue_position,
        reason=status.reason,
    )
    now_ms, keep_ms = context.now_ms(), route_keep_ms(session)
    if record != known.route or now_ms - known.route_at_ms >= keep_ms // 2:
        await context.routes.write(session.meta.uid, record, keep_ms)
        known.route, known.route_at_ms = record, now_ms
    return look_s(now_ms - known.replaced_at_ms) if known.replaced else None


def look_s(since_ms: int) -> float:
    """The longer nobody has said anything under the new token, the less often it is looked for."""
    return min(max(since_ms / 4000, SOONEST_LOOK_S), LATEST_LOOK_S)
