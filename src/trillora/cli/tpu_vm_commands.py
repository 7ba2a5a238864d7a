"""`trillora launch tpu-vm`: a recipe on a rented TPU of Google Cloud, or as a job of SkyPilot or xpk."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from trillora.cli.options import Overrides, RecipeFile, Tiny, number_parser
from trillora.cli.output import print_json, progress_on_stderr, run_events
from trillora.events import Note

if TYPE_CHECKING:
    from trillora.events import Listener
    from trillora.launch.bundle import Bundle
    from trillora.launch.managed import ManagedJob
    from trillora.launch.tpu_vm import LaunchPlan

Step = Literal["create", "wait", "copy", "setup", "run", "follow", "fetch", "delete"]
Backend = Literal["cloud-tpu", "compute-engine"]
Engine = Literal["skypilot", "xpk"]
STEPS: tuple[str, ...] = get_args(Step)
CHECKED_STEPS = (None, "create", "run")  # preflight comes before these; the others change nothing that it judges

RentedSlice = Annotated[str, typer.Option("--on", metavar="SLICE", help="Slice to rent: v5e-8, v6e-8, v5p-16, 7x-8.")]
Results = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Folder for the results (default: runs/NAME).")
]
Execute = Annotated[
    bool, typer.Option("--run", help="Execute the commands, which costs money. Without it they are only printed.")
]
OneStep = Annotated[Step | None, typer.Option("--step", metavar="STEP", help=f"Only this step: {', '.join(STEPS)}.")]
Keep = Annotated[bool, typer.Option("--keep", help="Do not delete the machine at the end.")]
OnDemand = Annotated[
    bool, typer.Option("--on-demand", help="Rent at the full price; a spot machine may be taken away at any time.")
]
Zone = Annotated[str | None, typer.Option("--zone", metavar="ZONE", help="Zone (default: the chip's first one).")]
Project = Annotated[
    str | None, typer.Option("--project", metavar="ID", help="Project of Google Cloud (default: gcloud's).")
]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Name of the machine (default: trillora-RECIPE).")
]
RentedFrom = Annotated[
    Backend | None,
    typer.Option("--backend", metavar="API", help="Google's API: cloud-tpu or compute-engine (7x needs the latter)."),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        metavar="N",
        parser=number_parser(int, 0, 1000),
        help="How often a preempted machine is created again.",
    ),
]
As = Annotated[
    Engine | None,
    typer.Option("--as", metavar="ENGINE", help="Write the files for skypilot or xpk (GKE) instead; see --out."),
]
Cluster = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="GKE cluster for --as xpk, from `xpk cluster create`.")
]
SendToken = Annotated[
    bool, typer.Option("--send-token", help="Send this machine's Hugging Face token, for gated models.")
]
Force = Annotated[bool, typer.Option("--force", help="Launch although preflight says no, or in an unknown zone.")]
Json = Annotated[bool, typer.Option("--json", help="Print the commands as JSON; with --run, each event as one line.")]


def tpu_vm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    on: RentedSlice,
    out: Results = None,
    run: Execute = False,
    step: OneStep = None,
    keep: Keep = False,
    on_demand: OnDemand = False,
    zone: Zone = None,
    project: Project = None,
    name: Name = None,
    backend: RentedFrom = None,
    max_restarts: Restarts = 10,
    engine: As = None,
    cluster: Cluster = None,
    send_token: SendToken = False,
    tiny: Tiny = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train on a rented Cloud TPU: create it, copy, train, fetch the results, delete it.

    Without --run, prints every command and the cost, and does nothing. The machine is deleted however the command ends,
    unless --keep is given. A preempted run resumes on a new machine if train.checkpoint_dir is in a bucket. The exit
    code is the run's. With --send-token, the token in HF_TOKEN is copied to the machine as a file, and removed
    after the run.
    """
    from trillora.launch.bundle import make_bundle
    from trillora.launch.managed import make_job
    from trillora.launch.tpu_vm import TpuVm, make_plan

    token = _token() if send_token else None
    options: dict[str, Any] = {"zone": zone, "project": project, "name": name, "is_spot": not on_demand, "force": force}
    options["has_token"] = token is not None
    with progress_on_stderr() as listener:
        bundle = make_bundle(recipe, overrides or (), tiny=tiny, listener=listener)
        _say_what_is_not_sent(bundle.recipe.model.name, send_token, listener)
        folder = out or Path("runs") / bundle.name
        if engine is not None:
            job = make_job(bundle, on, **options)
            hours = _hours(bundle, on, force, listener)
            _show_job(job, folder, job.write(engine, folder, cluster, listener), hours, as_json)
            return
        plan = make_plan(bundle, on, out=folder, backend=backend, **options)
        if step in CHECKED_STEPS:
            plan = replace(plan, hours=_hours(bundle, on, force, listener))
    if not (run and as_json):
        _show_plan(plan, step, run, as_json)
    if not run:
        return
    with run_events(as_json) as listener:
        machine = TpuVm(plan, listener, token=token)
        code = machine.step(step) if step else machine.launch(keep=keep, max_restarts=max_restarts)
    if code:
        raise typer.Exit(code)


def _token() -> str:
    from trillora.export.hub import token_of_environment

    return token_of_environment()


def _say_what_is_not_sent(model: str, send_token: bool, listener: Listener) -> None:
    is_of_hub = "/" in model and not os.path.isdir(model)
    if is_of_hub and not send_token and os.environ.get("HF_TOKEN"):
        listener(Note("The token in HF_TOKEN is not sent. If the model or data is gated or private, add --send-token."))


def _hours(bundle: Bundle, slice_name: str, force: bool, listener: Listener) -> float | None:
    """How long the run takes, by preflight; None: not known. Raises an error if it does not fit, unless forced."""
    from trillora.launch.go import require_go

    answer = require_go(bundle.recipe, slice_name, force=force, listener=listener)
    return answer.run.hours if answer is not None and answer.run is not None else None


def _show_plan(plan: LaunchPlan, step: str | None, will_run: bool, as_json: bool) -> None:
    commands = [(name, command) for name, command in plan.commands() if step in (None, name)]
    costs, warnings = plan.costs(), plan.warnings()
    if as_json:
        listed = [{"step": name, "command": command} for name, command in commands]
        print_json({"commands": listed, "costs": costs, "warnings": warnings})
        return
    for name, command in commands:
        print(f"{name:<7} {command}")
    print("\nThe machine costs money from the end of `wait` to the end of `delete`.")
    for line in costs:
        print(f"  {line}")
    for line in warnings:
        print(f"Warning: {line}.")
    if not will_run:
        if refusal := plan.refusal():
            print(f"With --run this would be refused. {refusal.what[:-1]}: {refusal.where}. Do: {refusal.do}.")
        print("Nothing was created. Add --run to execute these commands.")


def _show_job(job: ManagedJob, folder: Path, command: str, hours: float | None, as_json: bool) -> None:
    costs = job.offer.costs(spot=job.is_spot, hours=hours)
    if as_json:
        print_json({"folder": str(folder), "command": command, "costs": costs, "results": job.results})
        return
    print(f"Files written to {folder}. Nothing was created. To launch the job, which costs money:")
    print(f"  cd {shlex.quote(str(folder))}\n  {command}")
    for line in costs:
        print(f"  {line}")
    print(f"It copies its results to {job.results}")
