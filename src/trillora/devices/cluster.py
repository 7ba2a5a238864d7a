"""The processes of a multi-host run."""

from __future__ import annotations

import os

import jax


def join_cluster() -> None:
    """Connects to the other processes of a multi-host run, if environment variables name them: JAX_COORDINATOR_ADDRESS
    with JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the worker list of a Cloud TPU slice."""
    if jax.distributed.is_initialized():
        return
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if coordinator:
        jax.distributed.initialize(coordinator, int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"]))
    elif "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()
