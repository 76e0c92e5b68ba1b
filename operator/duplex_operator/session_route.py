"""A session's route record, kept as its status is: what the gateways let clients in by."""

from duplex_api.routes import RouteRecord
from duplex_operator.context import Context
from duplex_operator.decide.status import phase_for_clients
from duplex_operator.objects import SessionObject
from duplex_operator.observe import Known, route_keep_ms


async def keep_route(context: Context, session: SessionObject, known: Known) -> None:
    """Writes it where it says something new, or is half as old as it may get. A session without a
    token has none. Raises LedgerAwayError."""
    if known.token is None:
        return
    status = session.status
    record = RouteRecord(
        token_sha256=known.token.sha256,
        phase=phase_for_clients(status),
        pool=str(session.pool_key),
        session=str(session.meta.key),
        queue_position=status.queue_position,
        reason=status.reason,
    )
    now_ms, keep_ms = context.now_ms(), route_keep_ms(session)
    if record == known.route and now_ms - known.route_at_ms < keep_ms // 2:
        return
    await context.routes.write(session.meta.uid, record, keep_ms)
    known.route, known.route_at_ms = record, now_ms
