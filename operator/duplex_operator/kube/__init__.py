"""The one way out to Kubernetes: plain JSON over HTTPS, bounded, counted, with typed failures."""
