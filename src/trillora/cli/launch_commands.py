"""The commands that take a recipe to rented hardware: launch colab, launch kaggle, launch tpu-vm."""

from __future__ import annotations

import typer

from trillora.cli import tpu_vm_commands

launch = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Take a recipe to Colab, Kaggle or a Cloud TPU.",
)
launch.command("tpu-vm")(tpu_vm_commands.tpu_vm)
