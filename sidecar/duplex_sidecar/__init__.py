"""The sidecar of a GPU pod: realtime doors, sessions, ledger client and the three-stage engine."""
