"""The operator: the only writer of Kubernetes. Observes, decides (pure), applies."""
