"""Makes voice files: what the public front end says of a clip, computed once (contract E, G)."""
