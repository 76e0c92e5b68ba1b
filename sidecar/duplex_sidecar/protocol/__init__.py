"""Commands, events and errors between doors and sessions. Pure: no wire format, no model."""
