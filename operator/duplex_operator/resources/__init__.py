"""Builders of the Kubernetes objects that the operator makes."""
