"""Blobs of a unit beside the chain: packing, references and the check against the record. Pure."""

from collections.abc import Mapping

import msgspec

from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.records import MediaRef, MediaRefs, media_ref, sha256


class UnitMedia(msgspec.Struct, frozen=True):
    """pcm: s16le mono 16 kHz exactly as encoded. rows: the encoder's audio rows, raw tensor bytes.
    frames: camera frames as received. After a trim the trimmed part is empty."""

    pcm: bytes = b""
    rows: bytes = b""
    frames: tuple[bytes, ...] = ()

    def refs(self) -> MediaRefs:
        return MediaRefs(
            pcm=media_ref(self.pcm) if self.pcm else None,
            rows=media_ref(self.rows) if self.rows else None,
            frames=tuple(media_ref(frame) for frame in self.frames),
        )


class Trim(msgspec.Struct, frozen=True):
    """What a commit may drop: blobs and entries of units below these numbers. Floors never go down;
    `keep everything` is 1. window_below: rows and frames. pcm_below: PCM (encoder's reset mark).
    records_below: chain entries; the hash at that floor is kept."""

    window_below: int = 1
    pcm_below: int = 1
    records_below: int = 1

    def check(self, seq: int) -> None:
        """Raises ValueError if the commit of unit `seq` would drop its own entries, or an entry
        whose blobs are kept."""
        if max(self.window_below, self.pcm_below) > seq + 1:
            raise ValueError(f"trim at unit {seq} reaches beyond it")
        if self.records_below > min(seq, self.window_below, self.pcm_below):
            raise ValueError(f"entries below {self.records_below} are still needed")


_blob_encoder = msgspec.msgpack.Encoder()
_blob_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])


def pack_blobs(blobs: tuple[bytes, ...]) -> bytes:
    """Several blobs in one field; none = b""."""
    return _blob_encoder.encode(blobs) if blobs else b""


def unpack_blobs(
    session: str, name: str, data: bytes, refs: tuple[MediaRef, ...]
) -> tuple[bytes, ...]:
    """The blobs, each checked against its reference. Raises `LedgerCorrupt` naming `name`."""
    if not refs:
        return ()
    try:
        blobs = _blob_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise LedgerCorrupt(session, name, str(error)) from error
    if len(blobs) != len(refs):
        raise LedgerCorrupt(session, name, f"{len(blobs)} blobs, the record names {len(refs)}")
    for number, (blob, ref) in enumerate(zip(blobs, refs, strict=True)):
        check_blob(session, f"{name} number {number}", blob, ref)
    return blobs


def check_blob(session: str, name: str, data: bytes | None, ref: MediaRef) -> bytes:
    """The blob, checked by length and hash."""
    if data is None:
        raise LedgerCorrupt(session, name, "blob is missing")
    if len(data) != ref.length_bytes or sha256(data) != ref.sha256:
        raise LedgerCorrupt(session, name, "blob differs from its record")
    return data


Media = Mapping[int, UnitMedia]
"""Blobs by unit."""
