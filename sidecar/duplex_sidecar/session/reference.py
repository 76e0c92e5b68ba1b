"""The reference voice in a session's prompt: its rows are made once, when the session opens, and
kept in the opening record. Whoever takes the session up later encodes nothing again."""

from duplex_sidecar.ledger.records import OpeningDraft
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.opening import reference_positions
from duplex_sidecar.stages.envelope import EncoderReference, Tensor
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.stages.interface import EncoderStage


async def reference_rows(encoder: EncoderStage, draft: OpeningDraft) -> Tensor | None:
    """Rows [n, hidden] for the draft's n reference positions, None if it has none. Raises
    ClientError (not_ready: try again) when the encoder cannot make them."""
    positions = reference_positions(draft)
    if not positions:
        return None
    try:
        rows = (await encoder.reference(EncoderReference(draft.voice))).rows
    except StageError as error:
        raise ClientError(ErrorCode.NOT_READY, f"reference voice: {error}") from error
    if rows.shape[0] != positions:
        reason = f"reference voice: {rows.shape[0]} rows for {positions} positions"
        raise ClientError(ErrorCode.NOT_READY, reason)
    return rows
