"""The verbs of the Makefile, the same at a desk and in CI. Not part of the product."""
