"""The unit ledger: everything needed to go on elsewhere, append-only, in Redis or Valkey."""
