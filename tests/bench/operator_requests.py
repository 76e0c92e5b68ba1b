"""What an operator asks of the API server: for sessions, and without one."""

import re

UPKEEP = ("leases", "duplexpools", "pods", "poddisruptionbudgets")
"""What the operator asks for whether one session comes or none: its Lease, pools and their pods.
Everything else is counted as asked for sessions."""
_REQUESTS = re.compile(
    r'^duplex_operator_api_requests_total\{verb="(\w+)",resource="(\w+)"\} (\S+)$', re.MULTILINE
)


def requests_for_sessions(page: str) -> dict[str, float]:
    """Of an operator's metrics page, by "verb resource"."""
    found = {f"{verb} {plural}": float(count) for verb, plural, count in _REQUESTS.findall(page)}
    return {key: count for key, count in found.items() if key.split()[1] not in UPKEEP}
