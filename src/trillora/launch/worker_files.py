"""What is copied to every worker of a rented machine: the bundle, four short scripts, and who the workers are.

    chat/bundle.tar          recipe, data, wheel, requirements.txt with the exact packages
    chat/setup.sh            installs Python and these packages; does nothing the second time
    chat/start.sh NUMBER     starts worker.sh, detached from the connection
    chat/worker.sh NUMBER    trains; writes worker.log and exit-code
    chat/follow.sh LINE      prints the log from this line on, until the run ends, then `trillora-exit-code 0`
    chat/workers/0.env       JAX_COORDINATOR_ADDRESS=10.0.0.2:8482 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0

SkyPilot and xpk start workers themselves. They get bundle.tar, setup.sh and job.sh, which does all of it.

A token of Hugging Face is a file of its own, `hf-token` with mode 600, and is removed when the run ends. It is in no
command, log, metadata or variable.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from trillora.devices.cluster import PORT, Cluster
from trillora.events import Listener, ignore_events
from trillora.launch.bundle import RECIPE, Bundle
from trillora.launch.install import TOKEN_FILE, UV
from trillora.locks.sets import PREFERRED_PYTHON

EXIT_MARK = "trillora-exit-code"
KILLED = 137  # the exit code of a process that could not write its own

SETUP = """\
#!/bin/bash
# Installs Python {python} and the bundle, unless this very bundle is installed.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$HOME/.local/bin:$PATH"
wanted="$(sha256sum bundle.tar | cut -d ' ' -f 1)"
if [ "$(cat installed 2>/dev/null || true)" = "$wanted" ]; then
  echo "already installed"
  exit 0
fi
if ! command -v uv >/dev/null; then
  if ! python3 -m pip --version >/dev/null 2>&1; then
    sudo apt-get -o DPkg::Lock::Timeout=300 -qq update
    sudo apt-get -o DPkg::Lock::Timeout=300 -qq install -y python3-pip
  fi
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user {uv}  # Ubuntu 24.04 refuses it otherwise
fi
rm -rf job installed
mkdir job
tar --extract --file bundle.tar --directory job
[ -x venv/bin/python ] || uv venv --quiet --python {python} venv
PYTHONPATH="$(echo job/trillora-*.whl)" venv/bin/python -P -m trillora.launch.install job tpu
echo "$wanted" > installed
echo "installed"
"""

START = """\
#!/bin/bash
# start.sh NUMBER: starts this worker's process, detached from the connection.
set -euo pipefail
cd "$(dirname "$0")"
if [ -f pid ] && kill -0 "$(cat pid)" 2>/dev/null; then
  echo "already running"
  exit 0
fi
rm -f exit-code
setsid nohup bash worker.sh "$1" > worker.log 2>&1 < /dev/null &
echo $! > pid
echo "started"
"""

WORKER = """\
#!/bin/bash
# worker.sh NUMBER: trains, or resumes. Exit code 75: saved before its end; the same command resumes it.
cd "$(dirname "$0")"
set -a
. "workers/$1.env"
set +a
if [ -f {token} ]; then
  export HF_TOKEN_PATH="$PWD/{token}"
fi
trap true TERM  # the run saves and ends by itself; this script waits for it
code=0
venv/bin/trillora train job/{recipe} --out run || code=$?
rm -f {token}
echo "$code" > .exit-code
mv .exit-code exit-code
"""

FOLLOW = """\
#!/bin/bash
# follow.sh LINE: prints the log from this line on until the run ends, then its exit code.
cd "$(dirname "$0")"
pid="$(cat pid)"
tail --lines=+"$1" --follow --pid="$pid" worker.log 2>/dev/null
printf '\\n{mark} %s\\n' "$(cat exit-code 2>/dev/null || echo {killed})"
"""

JOB = """\
#!/bin/bash
# Installs, trains or resumes, and copies the results to the bucket. Exit code 75: saved before its end.
cd "$(dirname "$0")"
bash setup.sh || exit
venv/bin/trillora train job/{recipe} --out run &
child=$!
stopping=
trap 'trap "" TERM; stopping=yes; kill -TERM "$child"' TERM  # the run saves and ends by itself
wait "$child"
code=$?
if [ -n "$stopping" ]; then  # the signal ended the first `wait`
  wait "$child"
  code=$?
fi
if [ -d run/adapter ] || [ -f run/group.json ]; then  # of one adapter or several; written by the first worker only
  venv/bin/python - {results} <<'EOF' || [ "$code" -ne 0 ] || code=1
import sys

import fsspec

files, place = fsspec.core.url_to_fs(sys.argv[1])
files.put("run/", place.rstrip("/") + "/", recursive=True)
print("results copied to", sys.argv[1])
EOF
fi
exit "$code"
"""


def setup_script() -> str:
    return SETUP.format(python=PREFERRED_PYTHON, uv=UV)


def job_script(results: str) -> str:
    """`results` is the URL of the folder for the run's files."""
    return JOB.format(recipe=RECIPE, results=shlex.quote(results))


def write_files(folder: Path, bundle: Bundle, addresses: Sequence[str], listener: Listener = ignore_events) -> None:
    """Writes all files but the token. `addresses`: one per worker, in their order."""
    (folder / "workers").mkdir(parents=True)
    bundle.write_tar(folder / "bundle.tar", listener)
    scripts = {
        "setup.sh": setup_script(),
        "start.sh": START,
        "worker.sh": WORKER.format(token=TOKEN_FILE, recipe=RECIPE),
        "follow.sh": FOLLOW.format(mark=EXIT_MARK, killed=KILLED),
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
    for number in range(len(addresses)):
        variables = worker_environment(addresses, number)
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in variables.items()]
        (folder / "workers" / f"{number}.env").write_text("".join(lines))


def worker_environment(addresses: Sequence[str], number: int) -> dict[str, str]:
    """The variables with which a worker finds the others; none for a machine of one worker."""
    if len(addresses) == 1:
        return {}
    return Cluster(f"{addresses[0]}:{PORT}", len(addresses), number).variables()
