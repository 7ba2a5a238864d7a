"""The devices that jax finds, asked for in another process: jax may hang or crash when it starts, and it would take the
chips away from a run.

    found_by([python, "-P", "-c", CODE], environment, 120)  ->  {"platform": "tpu", "kind": "TPU v6 lite", "count": 8}

A notebook imports this from the wheel before anything is installed: standard library only.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

CODE = """\
import json, jax
devices = jax.devices()
print(json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}))
"""


def found_by(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """What `command`, a Python that runs `CODE`, printed; or {"error": text}."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-4000:] or f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))
