"""A client of the realtime door: what `duplex run` and `duplex demo` talk with."""
