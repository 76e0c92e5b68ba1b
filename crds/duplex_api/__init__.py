"""What a user may say about a live conversation: the contract of both Kubernetes kinds.

Everybody imports this package; it imports pydantic only. Two modules are kept for those who need
them: `manifest` reads YAML (and so imports a YAML parser), `crd` writes the schemas.
Defaults live here and nowhere else: the CRDs carry none for fields that a pool may preset.
"""
