"""Pure decisions: what was observed in, an action with its reason out. No I/O, no clock."""
