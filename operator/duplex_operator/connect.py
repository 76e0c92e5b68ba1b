"""How the API server is reached: the pod's service account, or a kubeconfig."""

import kopf


def connection() -> kopf.ConnectionInfo:
    """Read anew on each call: tokens of service accounts are replaced on disk. Raises
    kopf.LoginError where there is neither."""
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(
        settings=settings
    )
    if found is None:
        raise kopf.LoginError("there is neither a service account nor a kubeconfig")
    return found
