"""The official client of Kubernetes, and what it raises in words."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from echelon.core.errors import UserError
from echelon.launch.places.cluster import ANSWER_S, PlaceSilent

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


def client_for(context: str) -> ApiClient:
    """Return a client for a context of the kubeconfig, for its current one, or for the cluster that this runs in.

    Raises:
        UserError: it is not installed, or not configured.
    """
    try:
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config import ConfigException, load_incluster_config, new_client_from_config
    except ImportError:
        raise UserError("--on k8s needs kubernetes: pip install 'echelon[kubernetes]'") from None
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and not context:
            inside = Configuration()
            load_incluster_config(client_configuration=inside)
            return ApiClient(inside)
        return new_client_from_config(context=context or None)
    except ConfigException as error:
        raise UserError(f"--on k8s: {' '.join(str(error).split())}: see `kubectl config view`") from None


def log_of(core: Any, namespace: str, pod: str, container: str) -> str | None:
    """Return what a pod's container has printed; None: it cannot be had, as where the pod's node is gone.

    Args:
        core: the client's core API.
    """
    from kubernetes.client import ApiException

    try:
        return str(core.read_namespaced_pod_log(pod, namespace, container=container, _request_timeout=ANSWER_S))
    except ApiException:
        return None


@contextmanager
def silent() -> Iterator[None]:
    """Let what the client raises be that the cluster does not answer now."""
    try:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError  # the client brings it
    except ImportError:
        raise UserError("--on k8s needs kubernetes: pip install 'echelon[kubernetes]'") from None
    try:
        yield
    except ApiException as error:
        raise PlaceSilent(f"kubernetes: {_message(error)}") from None
    except HTTPError as error:
        raise PlaceSilent(f"kubernetes: {' '.join(str(error).split())}") from None


@contextmanager
def in_words() -> Iterator[None]:
    """Let what the client raises be what the user is told."""
    try:
        with silent():
            yield
    except PlaceSilent as said:
        raise UserError(f"--on k8s: {said}") from None


def _message(error: Any) -> str:
    """Return what the API server says of a request that it refuses."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
