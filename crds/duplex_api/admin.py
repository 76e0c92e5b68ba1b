"""Words of a sidecar's admin API that whoever asks and whoever answers have to spell alike."""

ADMIN_PREFIX = "/admin/v1"
ADMIN_VERSION_HEADER = "Duplex-Admin-Version"
"""In requests and answers alike."""
ADMIN_VERSION = "1"

TOKEN_HASH = "tokenHash"
"""To run a session or make ready for it: sha256 of its client's token, in hex."""
VOICE_FILE = "voiceFile"
"""To the same: the file of the voice that the manifest names, in base64."""
RESUME = "resume"
"""To run a session: it has a history, and is not begun without it. Only where the feed's hello says
that it is understood: the first release's sidecars refuse it."""
GRACE_SECONDS = "graceSeconds"
"""To hand a session over, or to drain: how long the end of a turn is waited for."""
POD_UID = "podUID"
"""To proofs of death: of every replica of a pod. Also in the feed's hello."""
