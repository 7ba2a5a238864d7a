"""A recipe as a job of SkyPilot or xpk, which create machines again by themselves when they are lost.

    job = make_job(bundle, "v6e-8")
    job.write("skypilot", folder)        # writes task.yaml and scripts; returns "sky jobs launch task.yaml"
    job.write("xpk", folder, "my-tpus")  # writes scripts; returns "xpk workload create --cluster=my-tpus ..."

Both start a job again that ends with exit code 75 (saved before its end), and it resumes from the bucket. Its machine
is gone afterwards, so the results are copied to the bucket too: gs://my-bucket/chat-results for the checkpoint folder
gs://my-bucket/chat.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from trillora.errors import EXIT_STOPPED, TrilloraError
from trillora.events import Listener, ignore_events
from trillora.files.atomic import new_folder
from trillora.launch.bundle import Bundle
from trillora.launch.offers import Offer, checked_name, checked_project, choose_zone, default_name, find_offer
from trillora.launch.worker_files import job_script, setup_script
from trillora.recipe import yaml

MAX_RESTARTS = 5
IMAGE = "python:3.12"  # xpk adds the folder to it


@dataclass(frozen=True)
class ManagedJob:
    """Everything that the files of a job depend on."""

    bundle: Bundle
    offer: Offer
    name: str
    results: str  # URL
    zone: str | None  # None: any zone
    project: str | None
    is_spot: bool
    has_token: bool

    def write(self, engine: str, folder: Path, cluster: str | None = None, listener: Listener = ignore_events) -> str:
        """Writes the job's folder, and returns the command that launches it there. `cluster` is for xpk."""
        if engine == "xpk":
            command, files = shlex.join(self.xpk_command(cluster or "")), {}
        else:
            command = "sky jobs launch task.yaml" + (" --secret HF_TOKEN" if self.has_token else "")
            files = {"task.yaml": self.skypilot_task()}
        self._write(folder, files, listener)
        return command

    def skypilot_task(self) -> str:
        """A task file. SkyPilot runs both scripts on every host; these find each other by the metadata server."""
        if self.offer.chip.type_prefix is None:
            what = f"SkyPilot does not offer {self.offer.slice.name}: it uses the Cloud TPU API."
            raise TrilloraError(what, where="--as skypilot", do="use --as xpk, or another slice, such as --on v6e-8")
        place = f"gcp/{self.zone.rpartition('-')[0]}/{self.zone}" if self.zone else "gcp"
        # Without runtime_version, a v5e gets the image of v5p.
        arguments = {"runtime_version": self.offer.runtime_version, "gcp_queued_resource": True}
        recovery = {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [EXIT_STOPPED]}
        lines = [
            f"# {self.name}: sky jobs launch task.yaml",
            f"name: {self.name}",
            "workdir: .",
            "resources:",
            f"  infra: {place}",
            f"  accelerators: tpu-{self.offer.accelerator_type}",
            f"  accelerator_args: {yaml.write(arguments)}",
            f"  use_spot: {yaml.write(self.is_spot)}",
            f"  job_recovery: {yaml.write(recovery)}",
            *(["secrets: {HF_TOKEN: null}"] if self.has_token else []),
            "setup: bash setup.sh",
            "run: bash job.sh",
        ]
        return "\n".join(lines) + "\n"

    def xpk_command(self, cluster: str) -> list[str]:
        """The words of the command. It runs in the job's folder. With `--dry-run --output-manifest-file=FILE`
        it only writes the JobSet that it would create."""
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,62}", cluster):
            what = f"'{cluster[:60]}' is not the name of a cluster." if cluster else "xpk needs a cluster of GKE."
            do = "add --cluster NAME, see `xpk cluster list`; `xpk cluster create` makes one"
            raise TrilloraError(what, where="--as xpk", do=do)
        tpu_type = self.offer.accelerator_type if self.offer.chip.type_prefix else f"tpu{self.offer.slice.name}"
        return [
            *("xpk", "workload", "create"),
            f"--cluster={cluster}",
            f"--workload={self.name}",
            f"--tpu-type={tpu_type}",
            f"--base-docker-image={IMAGE}",
            "--script-dir=.",
            "--command=bash job.sh",
            f"--max-restarts={MAX_RESTARTS}",
            f"--restart-on-exit-codes={EXIT_STOPPED}",
            f"--zone={self.zone or self.offer.zones[0]}",
            *([f"--project={self.project}"] if self.project else []),
        ]

    def _write(self, folder: Path, files: dict[str, str], listener: Listener) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            do = "use another --out, or remove it"
            raise TrilloraError("The folder for the job's files is not empty.", where=str(folder), do=do)
        scripts = {"setup.sh": setup_script(), "job.sh": job_script(self.results)}
        with new_folder(folder) as making:
            self.bundle.write_tar(making / "bundle.tar", listener)
            for name, text in {**scripts, **files}.items():
                (making / name).write_text(text)


def make_job(
    bundle: Bundle,
    slice_name: str,
    *,
    name: str | None = None,
    zone: str | None = None,
    project: str | None = None,
    is_spot: bool = True,
    has_token: bool = False,
    force: bool = False,
) -> ManagedJob:
    """Checks what can be checked without Google. A job without a bucket is refused: nothing of it would be left."""
    place = bundle.recipe.train.checkpoint_dir
    if not place or "://" not in place:
        raise TrilloraError(
            "A job needs a bucket: its machine is deleted when it ends, and with it the results.",
            where="train.checkpoint_dir",
            do="add to the command: train.checkpoint_dir=gs://BUCKET/FOLDER",
        )
    offer = find_offer(slice_name)
    return ManagedJob(
        bundle=bundle,
        offer=offer,
        name=checked_name(name or default_name(bundle.name)),
        results=f"{place.rstrip('/')}-results",
        zone=choose_zone(offer, zone, force=force) if zone else None,
        project=checked_project(project),
        is_spot=is_spot,
        has_token=has_token,
    )
