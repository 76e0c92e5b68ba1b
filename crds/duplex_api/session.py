"""DuplexSession: one live two-way speech conversation."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, StrictInt, StrictStr, model_validator

from duplex_api.base import (
    DISTINCT,
    ApiModel,
    Count,
    DataKey,
    Flag,
    LabelName,
    LongCount,
    ObjectName,
    PositiveCount,
    Real,
    cel_rules,
)
from duplex_api.constants import API_VERSION, SESSION_KIND
from duplex_api.durations import Duration
from duplex_api.metadata import Condition, ObjectMeta, listed_by
from duplex_api.window import WindowPolicy

PROMPT_MAX_LENGTH = 32_768
INITIAL_TEXT_MAX_LENGTH = 8_192


class DesiredState(StrEnum):
    RUNNING = "Running"
    PARKED = "Parked"
    CLOSED = "Closed"


class SessionPhase(StrEnum):
    """Pending -> Queued -> Ready -> Active -> Parked -> Queued; any -> Ending -> Ended."""

    PENDING = "Pending"
    QUEUED = "Queued"
    READY = "Ready"
    ACTIVE = "Active"
    MOVING = "Moving"
    PARKED = "Parked"
    ENDING = "Ending"
    ENDED = "Ended"


class Modality(StrEnum):
    AUDIO = "audio"
    TEXT = "text"


class AudioFormat(StrEnum):
    """pcm: signed 16-bit little endian, mono, 24,000 samples a second."""

    PCM = "pcm"


BOTH_MODALITIES = "replies are always spoken, with their transcript: name both audio and text"


class PoolRef(ApiModel):
    """The DuplexPool whose pods run the session."""

    name: LabelName
    """Name of the pool."""
    namespace: LabelName | None = None
    """Its namespace. Default: the session's. Another one must be allowed by the pool's
    allowedNamespaces."""


class KeyRef(ApiModel):
    """A Secret or ConfigMap of the session's own namespace."""

    name: ObjectName
    """Name of the object."""
    key: DataKey | None = None
    """Which of its entries. Needed where it has several."""


class Voice(ApiModel):
    """Exactly one of the three."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "[has(self.name), has(self.secretRef), has(self.configMapRef)]"
                ".filter(given, given).size() == 1",
                "exactly one of name, secretRef, configMapRef is required",
            )
        )
    )

    name: LabelName | None = None
    """A voice of the pool's voice volume."""
    secret_ref: KeyRef | None = None
    """A Secret (at most 900 KiB) that carries the voice label."""
    config_map_ref: KeyRef | None = None
    """A ConfigMap (at most 900 KiB) that carries the voice label."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [self.name, self.secret_ref, self.config_map_ref]
        if sum(value is not None for value in given) != 1:
            raise ValueError("exactly one of name, secretRef, configMapRef is required")
        return self


class Camera(ApiModel):
    """Camera frames that the client may send. Their worst case is reserved at admission."""

    frames_per_unit: Annotated[StrictInt, Field(ge=1, le=2)] | None = None
    """Frames a second: 1 or 2."""
    high_resolution: Flag | None = None
    """Of two frames, the first is also seen in two slices when it is larger than one tile of 448 x
    448 pixels (198 instead of 66 tokens), as the public model does. false: no frame ever is."""


class Output(ApiModel):
    """What the model answers in."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("!has(self.modalities) || self.modalities.size() == 2", BOTH_MODALITIES)
        )
    )

    modalities: (
        Annotated[
            tuple[Modality, ...],
            Field(min_length=1, max_length=2),
            *DISTINCT,
        ]
        | None
    ) = None
    """Of a reply: its sound (audio) and its transcript (text). Both always come, so only both may
    be named."""
    audio_format: AudioFormat | None = None
    """pcm: signed 16-bit little endian, mono, 24,000 samples a second."""


class Sampling(ApiModel):
    """How the Thinker draws the tokens of its replies."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "!has(self.greedy) || !self.greedy"
                " || !(has(self.temperature) || has(self.topK) || has(self.topP))",
                "greedy excludes temperature, topK and topP",
            )
        )
    )

    greedy: Flag | None = None
    """true: always the likeliest token. Excludes temperature, topK and topP."""
    temperature: Annotated[Real, Field(gt=0, le=2)] | None = None
    """Higher is more varied."""
    top_k: Annotated[StrictInt, Field(ge=1, le=1000)] | None = None
    """Draws among this many of the likeliest tokens."""
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    """Draws among the likeliest tokens that together have this share of the probability."""
    seed: LongCount | None = None
    """Equal seeds and equal input give equal draws. Default: drawn when the session opens."""

    @model_validator(mode="after")
    def _greedy_alone(self) -> Self:
        if self.greedy and not (
            self.temperature is None and self.top_k is None and self.top_p is None
        ):
            raise ValueError("greedy excludes temperature, topK and topP")
        return self


class Lifecycle(ApiModel):
    """How long things may take."""

    idle_timeout: Duration | None = None
    """Ends the session after this long without input, connected or not."""
    disconnect_grace: Duration | None = None
    """Parks the session when its client has been away this long."""
    max_duration: Duration | None = None
    """Ends the session this long after it opened."""
    park_after: Duration | None = None
    """Parks a connected session that has sent nothing for this long."""
    ttl_after_finished: Duration | None = None
    """Deletes the object this long after the session ended."""
    retention: Duration | None = None
    """How long the ledger outlives its last use, at least 10s. A parked session ends with it. What
    it was when the conversation began counts."""


class SessionSpec(ApiModel):
    """What is wanted of the conversation."""

    pool_ref: PoolRef
    window_preset: LabelName | None = None
    """A window preset of the pool. Default: the pool's default preset."""
    window: WindowPolicy | None = None
    """Field by field, over the preset."""
    prompt: Annotated[StrictStr, Field(max_length=PROMPT_MAX_LENGTH)] | None = None
    """What the model is told before the conversation starts."""
    initial_text: Annotated[StrictStr, Field(max_length=INITIAL_TEXT_MAX_LENGTH)] | None = None
    """Said to the model as the user's first words."""
    voice: Voice | None = None
    camera: Camera | None = None
    """Absent: camera frames are refused."""
    output: Output | None = None
    sampling: Sampling | None = None
    priority: Annotated[StrictInt, Field(ge=-1000, le=1000)] | None = None
    """Higher is placed first; equal ones in order of arrival."""
    lifecycle: Lifecycle | None = None
    desired_state: DesiredState | None = None
    """Running (default), Parked, or Closed, which is final."""
    token_secret_ref: KeyRef | None = None
    """The client's token. Default: the operator makes one."""


IMMUTABLE_SESSION_FIELDS = (
    "pool_ref",
    "window_preset",
    "window",
    "prompt",
    "initial_text",
    "voice",
    "camera",
    "output",
    "sampling",
    "token_secret_ref",
)
"""Fixed when the session is made: a conversation cannot change under its own history."""


class Placement(ApiModel):
    """Where the session runs. An intent; the lease is the truth."""

    pod: ObjectName
    """Name of the pod."""
    pod_uid: Annotated[StrictStr, Field(alias="podUID", max_length=64)]
    """Its uid: another pod of that name is another one."""
    fence: LongCount
    """Number of the placement. It only grows; the ledger takes nothing under a smaller one."""


class LastRebuild(ApiModel):
    """The last time that the model's view was computed anew, for example after a slide."""

    cause: Annotated[StrictStr, Field(max_length=63)]
    """Why, in one word."""
    cost_ms: Annotated[Real, Field(ge=0)]
    """How long it took, in milliseconds."""
    trace_id: Annotated[
        Annotated[StrictStr, Field(max_length=32)] | None, Field(alias="traceID")
    ] = None
    """The trace that it is part of, in hex."""


class AudioQuality(ApiModel):
    """As the client hears it."""

    underruns: LongCount
    """Times that audio came later than it had to be played."""
    longest_gap_ms: LongCount
    """The longest silence that this made, in milliseconds."""


class TokenSecret(ApiModel):
    """The Secret with the client's token."""

    name: ObjectName
    """Name of the Secret, in the session's namespace."""
    key: DataKey
    """Which of its entries is the token."""


class SessionStatus(ApiModel):
    """How things stand, as the operator tells it."""

    observed_generation: LongCount | None = None
    """The metadata.generation that this status is about."""
    phase: SessionPhase | None = None
    reason: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Why the phase is what it is, in one word; how it ended, once it has."""
    message: Annotated[StrictStr, Field(max_length=32_768)] | None = None
    """The same in a sentence."""
    conditions: (
        Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=listed_by("type"))]
        | None
    ) = None
    """Accepted, Placed, Ready, Connected, LedgerDurable, KeepingPace, WindowHealthy; once it has
    happened LedgerRewound, Ended."""
    placement: Placement | None = None
    """Absent while the session has no slot."""
    last_placement: Placement | None = None
    """Where it ran before; no larger fence was given out then."""
    ledger_id: Annotated[StrictStr, Field(max_length=253)] | None = None
    """The session's name in the ledger, and for clients (?session=): the object's uid."""
    endpoint: Annotated[StrictStr, Field(max_length=2048)] | None = None
    """Where clients dial."""
    token_secret: TokenSecret | None = None
    queue_position: PositiveCount | None = None
    """Its place among those that wait for a slot of its pool, from 1. Written now and then."""
    window: WindowPolicy | None = None
    """The policy in force, every field named, pinned at first placement."""
    units: LongCount | None = None
    """Seconds of input that were answered. Written now and then, like all counters here."""
    rebuilds: LongCount | None = None
    """How often the model's view was computed anew on the present pod."""
    last_rebuild: LastRebuild | None = None
    epoch: Count | None = None
    """How often the voice began anew: with each reply, and after a loss."""
    audio: AudioQuality | None = None


class DuplexSession(ApiModel):
    """A live two-way speech conversation with an omni model."""

    api_version: StrictStr = API_VERSION
    kind: StrictStr = SESSION_KIND
    metadata: ObjectMeta
    spec: SessionSpec
    status: SessionStatus | None = None
