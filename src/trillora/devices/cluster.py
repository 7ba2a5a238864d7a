"""The processes of a run on several hosts: who they are, and how this one joins them.

Every host of a slice runs the same command. Process 0 listens, the others connect to it. Who they are is found in this
order; a run that finds no other is a run of one process:

    JAX_COORDINATOR_ADDRESS=10.0.0.2:8482 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=1    written by `trillora launch tpu-vm`
    TPU_WORKER_HOSTNAMES=t-0.svc,t-1.svc TPU_WORKER_ID=1                          GKE
    worker-network-endpoints, agent-worker-number                                 metadata server of a Cloud TPU VM

Colab and Kaggle have TPUs of one host and set some of these variables anyway, one even to a warning text. They are
never joined, and a list counts only if every word in it is an address.
"""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events

PORT = 8482  # jax's own choice for Cloud TPU
JOIN_SECONDS = 300  # jax's own limit
NOTEBOOKS = ("COLAB_RELEASE_TAG", "COLAB_TPU_1VM", "KAGGLE_KERNEL_RUN_TYPE")  # platforms with TPUs of one host
MAX_METADATA = 1 << 20  # bytes
METADATA_TRIES = 3
METADATA_SECONDS = 5.0  # for one answer of the server, which is on the same machine
# A host name or an IPv4 address, with or without a port.
_ADDRESS = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(?::[0-9]{1,5})?")


@dataclass(frozen=True)
class Cluster:
    coordinator: str  # address and port of process 0
    num_processes: int
    process_id: int

    def variables(self) -> dict[str, str]:
        """The environment in which `find_cluster` finds this cluster."""
        return {
            "JAX_COORDINATOR_ADDRESS": self.coordinator,
            "JAX_NUM_PROCESSES": str(self.num_processes),
            "JAX_PROCESS_ID": str(self.process_id),
        }


def join_cluster(listener: Listener = ignore_events) -> None:
    """Connects to the other processes of the run, if there are any. Must precede every use of a device."""
    import jax  # here, because the launcher writes these variables and needs no jax

    if jax.distributed.is_initialized():
        return
    cluster = find_cluster(os.environ)
    if cluster is None:
        return
    listener(Note(f"Process {cluster.process_id} of {cluster.num_processes} joins at {cluster.coordinator}"))
    try:
        jax.distributed.initialize(
            cluster.coordinator, cluster.num_processes, cluster.process_id, initialization_timeout=JOIN_SECONDS
        )
    except RuntimeError as error:
        raise TrilloraError(
            f"The {cluster.num_processes} processes of this run did not find each other within {JOIN_SECONDS} s.",
            where=f"process {cluster.process_id}, coordinator {cluster.coordinator}",
            do="start the same command on every host of the slice at the same time, and let them reach that port",
        ) from error


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment or the metadata server describes; None for a run of one process. Call it after
    jax was imported: jax sets TPU_SKIP_MDS_QUERY on a machine without TPU."""
    if coordinator := environment.get("JAX_COORDINATOR_ADDRESS"):
        found = Cluster(coordinator, _number(environment, "JAX_NUM_PROCESSES"), _number(environment, "JAX_PROCESS_ID"))
    elif any(name in environment for name in NOTEBOOKS):
        return None
    elif len(hosts := _addresses(environment.get("TPU_PROCESS_ADDRESSES") or _hostnames(environment))) > 1:
        found = _of_slices(hosts, _number(environment, "TPU_WORKER_ID"), environment)
    elif "TPU_SKIP_MDS_QUERY" not in environment:
        named = _from_metadata(environment)
        if named is None:
            return None
        found = named
    else:
        return None
    if not 0 <= found.process_id < found.num_processes:
        raise TrilloraError(
            f"Process {found.process_id} is not one of {found.num_processes} processes, which are counted from 0.",
            where="JAX_PROCESS_ID, TPU_WORKER_ID",
            do="give every host its own number, from 0 to one less than the number of hosts",
        )
    return found if found.num_processes > 1 else None


def _of_slices(hosts: list[str], worker: int, environment: Mapping[str, str]) -> Cluster:
    """Hosts belong to one slice. GKE names the others with MEGASCALE variables, counted as jax counts them."""
    coordinator = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    port = environment.get("JAX_COORDINATOR_PORT") or PORT
    slices = _number(environment, "MEGASCALE_NUM_SLICES", 1)
    process_id = worker + _number(environment, "MEGASCALE_SLICE_ID", 0) * len(hosts)
    return Cluster(f"{coordinator.partition(':')[0]}:{port}", len(hosts) * slices, process_id)


def _hostnames(environment: Mapping[str, str]) -> str:
    return environment.get("TPU_WORKER_HOSTNAMES", "")


def _addresses(text: str) -> list[str]:
    """The addresses of a list with commas; none at all if it contains anything else."""
    words = [word.strip() for word in text.split(",")]
    return words if all(_ADDRESS.fullmatch(word) for word in words) else []


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default)).strip()
    if not re.fullmatch("[0-9]{1,6}", text):
        raise TrilloraError(
            f"{name} is {text[:30]!r}, but a run on several hosts needs a number there."
            if text
            else f"{name} is not set.",
            where="environment",
            do="set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID together, or none of them",
        )
    return int(text)


def _from_metadata(environment: Mapping[str, str]) -> Cluster | None:
    """The workers of a Cloud TPU VM. They are listed as addresses, or as `name:id:address`."""
    server = environment.get("GCE_METADATA_IP") or "metadata.google.internal"
    number = _metadata(server, "agent-worker-number")
    if number is None:
        return None
    listed = (_metadata(server, "worker-network-endpoints") or "").split(",")
    hosts = _addresses(",".join(worker.split(":")[2] if worker.count(":") == 2 else worker for worker in listed))
    if len(hosts) < 2:
        return None
    return _of_slices(hosts, _number({"agent-worker-number": number}, "agent-worker-number"), environment)


def _metadata(server: str, key: str) -> str | None:
    """An attribute of this machine; None if the server does not know it, or does not answer."""
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine: never by proxy
    for attempt in range(METADATA_TRIES):
        if attempt:
            time.sleep(0.5)
        try:
            with opener.open(request, timeout=METADATA_SECONDS) as answer:
                return str(answer.read(MAX_METADATA).decode("utf-8", "replace")).strip()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
        except OSError:
            continue
    return None
