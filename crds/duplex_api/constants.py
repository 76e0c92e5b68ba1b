"""The API's address. Every name that Kubernetes knows us by is written once, here."""

API_GROUP = "duplex.dev"
API_VERSION_NAME = "v1alpha1"
API_VERSION = f"{API_GROUP}/{API_VERSION_NAME}"

SESSION_KIND = "DuplexSession"
SESSION_PLURAL = "duplexsessions"
SESSION_SINGULAR = "duplexsession"
SESSION_SHORT_NAME = "dxs"

POOL_KIND = "DuplexPool"
POOL_PLURAL = "duplexpools"
POOL_SINGULAR = "duplexpool"
POOL_SHORT_NAME = "dxp"

CATEGORIES = ("duplex",)
"""`kubectl get duplex` lists both kinds."""
