"""What a client gets first: the session as it stands, then what it missed."""

import logging

import msgspec

from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import ResyncRequired, Sequenced, SessionOpened
from duplex_sidecar.session.outbox import Outbox
from duplex_sidecar.session.replay import replay_after

log = logging.getLogger(__name__)


async def greet(
    outbox: Outbox,
    ledger: Ledger,
    opened: SessionOpened,
    last_sequence: int | None,
    ever: int | None,
) -> bool:
    """last_sequence: the newest event that the client has seen; None: it wants none of the old
    ones. ever: see `replay_after`. What happens meanwhile waits in the outbox. True: the ledger has
    lost events that the client has seen."""
    replay: list[Sequenced] = []
    resync: ResyncRequired | None = None
    if last_sequence is not None:
        try:
            # A server that went back may have lost what this owner still knows.
            await ledger.mend(opened.session)
            replay, resync = await replay_after(ledger, opened.session, last_sequence, ever)
        except LedgerUnavailable:
            outbox.fail(ErrorCode.LEDGER_UNAVAILABLE)
            return False
        except (LedgerError, msgspec.MsgspecError) as error:
            log.error("events cannot be replayed: %s", type(error).__name__)
            outbox.fail(ErrorCode.LEDGER_CORRUPT)
            return False
    outbox.release(replay, [opened] if resync is None else [opened, resync])
    return resync is not None and resync.ledger_rewound
