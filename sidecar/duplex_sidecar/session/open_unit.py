"""A unit that is accepted and not committed yet: what the ledger keeps so that it can be redone."""

import msgspec

from duplex_sidecar.framing.append import Append


class OpenUnit(msgspec.Struct, frozen=True):
    """append: without its PCM and frames, which are blobs of their own (the frames' rows are).
    encoder_mark_samples: from which a restore replays, after this unit."""

    append: Append
    encoder_mark_samples: int


encode_open_unit = msgspec.msgpack.Encoder().encode
decode_open_unit = msgspec.msgpack.Decoder(OpenUnit).decode
