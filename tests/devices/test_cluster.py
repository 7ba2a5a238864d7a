"""Who takes part in a run on several hosts: from variables, from a metadata server, and from neither on notebooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from loopback import POLL

from trillora.devices.cluster import Cluster, find_cluster
from trillora.errors import TrilloraError

PREFIX = "/computeMetadata/v1/instance/attributes/"
# What Kaggle's image has in this variable when a session starts without its TPU.
WARNING = "WARNING: could not determine TPU worker hostnames, please check the accelerator setting of this session"


class Metadata(BaseHTTPRequestHandler):
    """Answers like Google's metadata server: attributes, and 404 for those it does not have."""

    attributes: ClassVar[dict[str, str]] = {}
    failures = 0  # answers with 503 before the first good one
    asked = 0

    def do_GET(self) -> None:
        kind = type(self)
        kind.asked += 1
        value = kind.attributes.get(self.path.removeprefix(PREFIX))
        is_allowed = self.headers["Metadata-Flavor"] == "Google"
        code = 503 if kind.asked <= kind.failures else 403 if not is_allowed else 404 if value is None else 200
        self.send_response(code)
        self.end_headers()
        if code == 200:
            self.wfile.write((value or "").encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[tuple[type[Metadata], dict[str, str]]]:
    """A metadata server, and the environment of a machine that uses it."""
    kind = type("OneTest", (Metadata,), {"attributes": {}, "failures": 0, "asked": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(POLL,), daemon=True).start()
    yield kind, {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5", "a:0:10.0.0.2,b:1:10.0.0.3,c:2:10.0.0.4,d:3:10.0.0.5"]
)
def test_workers_of_a_tpu_vm_are_named_by_the_metadata_server(
    metadata: tuple[type[Metadata], dict[str, str]], endpoints: str
) -> None:
    server, environment = metadata
    server.attributes = {"agent-worker-number": "2", "worker-network-endpoints": endpoints}
    found = find_cluster(environment)
    assert found == Cluster("10.0.0.2:8482", 4, 2)
    again = find_cluster(found.variables())  # what the launcher writes is read back
    assert again == found
    assert find_cluster({**environment, "JAX_COORDINATOR_PORT": "9000"}) == Cluster("10.0.0.2:9000", 4, 2)
    server.asked, server.failures = 0, 1
    assert find_cluster(environment) == found, "one answer of a busy server must not split the slice"


def test_one_worker_joins_no_cluster(metadata: tuple[type[Metadata], dict[str, str]]) -> None:
    server, environment = metadata
    assert find_cluster(environment) is None  # an ordinary VM: 404
    server.attributes = {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.2"}
    assert find_cluster(environment) is None
    server.attributes = {"agent-worker-number": "0", "worker-network-endpoints": "<html>, sorry"}
    assert find_cluster(environment) is None
    assert server.asked == 5
    assert find_cluster({"TPU_SKIP_MDS_QUERY": "1"}) is None
    assert find_cluster({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None


@pytest.mark.parametrize(
    "notebook",
    [
        {"COLAB_RELEASE_TAG": "release-colab", "COLAB_TPU_1VM": "1", "TPU_WORKER_HOSTNAMES": "localhost"},
        {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": WARNING},
        {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", "TPU_WORKER_ID": "0"},
    ],
)
def test_notebooks_never_join_and_are_not_asked(
    metadata: tuple[type[Metadata], dict[str, str]], notebook: dict[str, str]
) -> None:
    server, environment = metadata
    server.attributes = {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.2,10.0.0.3"}
    assert find_cluster({**environment, **notebook}) is None
    assert server.asked == 0


def test_only_a_list_of_addresses_counts() -> None:
    bare = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "1"}
    assert "," in WARNING  # which a simple test takes for a list
    assert find_cluster({**bare, "TPU_WORKER_HOSTNAMES": WARNING}) is None
    gke = {**bare, "TPU_WORKER_HOSTNAMES": "run-0.svc,run-1.svc"}
    assert find_cluster(gke) == Cluster("run-0.svc:8482", 2, 1)
    slices = {
        "MEGASCALE_COORDINATOR_ADDRESS": "run-slice-0.svc:8080",
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
    }
    assert find_cluster({**gke, **slices}) == Cluster("run-slice-0.svc:8482", 6, 5)


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not set"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is 'two'"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "Process 2 is not one of 2"),
    ],
)
def test_incomplete_variables_are_an_error(variables: dict[str, str], what: str) -> None:
    with pytest.raises(TrilloraError, match=what):
        find_cluster({"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8482", **variables})
