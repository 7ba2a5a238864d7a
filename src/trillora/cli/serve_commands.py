"""The command that offers a run or a model to other programs: serve."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trillora.cli.options import Overrides, QuantizeBase, RunOrModel, TrustCode, number_parser
from trillora.cli.output import progress_on_stderr
from trillora.errors import TrilloraError

if TYPE_CHECKING:
    import socket

    from trillora.serving.served import Service

BatchRows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        metavar="N",
        parser=number_parser(int, 1, 1024),
        help="Answers to generate at the same time (default: what fits into memory, at most 32).",
    ),
]

MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        metavar="N",
        parser=number_parser(int, 2, 2**20),
        help="Maximum length of prompt and answer together, in tokens (default: the model's, at most 4096).",
    ),
]


def serve(
    name: RunOrModel,
    overrides: Overrides = None,
    *,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="FOLDER", help="Serve this adapter too. May be repeated."),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="N", parser=number_parser(int, 0, 65535), help="Port; 0 takes a free one.")
    ] = 8000,
    key_env: Annotated[
        str | None,
        typer.Option("--key-env", metavar="NAME", help="Environment variable with the key that clients must send."),
    ] = None,
    rows: BatchRows = None,
    max_length: MaxLength = None,
    queue: Annotated[
        int,
        typer.Option(
            "--queue", metavar="N", parser=number_parser(int, 0, 100_000), help="Maximum number of queued requests."
        ),
    ] = 256,
    quantize: QuantizeBase = None,
    page: Annotated[bool, typer.Option("--page", help="Also serve a web page to chat with the models.")] = False,
    base: Annotated[bool, typer.Option("--base", help="Serve only the base model.")] = False,
    trust: TrustCode = False,
) -> None:
    """Serve a run or a model over the OpenAI protocol."""
    if base and adapters:
        what = "--base and --adapter contradict each other."
        raise TrilloraError(what, where="--adapter", do="leave out one of them")
    from trillora.serving.http.address import open_socket, read_key

    key = read_key(host, key_env)
    given = [*(overrides or ()), *(["model.trust_remote_code=true"] if trust else [])]
    with closing(open_socket(host, port)) as opened:
        with progress_on_stderr() as listener:
            from trillora.early.runs import check_service

            check_service(name, given, adapters=adapters or (), only_base=base)
            from trillora.serving.served import open_service

            service = open_service(
                name,
                adapters=adapters or (),
                only_base=base,
                overrides=given,
                quantize=quantize,
                num_rows=rows,
                max_length=max_length,
                max_waiting=queue,
                listener=listener,
            )
        _run(service, opened, host, key, page_title=Path(name).absolute().name if page else None)


def _run(service: Service, opened: socket.socket, host: str, key: str | None, *, page_title: str | None) -> None:
    import asyncio
    import gc

    from trillora.generation.system_message import trained_with
    from trillora.serving.app import App
    from trillora.serving.http.address import is_loopback
    from trillora.serving.http.server import Server
    from trillora.serving.page.build import chat_page

    page = None
    if page_title is not None:
        page = chat_page(page_title, needs_key=key is not None, has_report=service.readable_report() is not None)
    app = App(service, key=key, only_loopback=is_loopback(host), page=page)
    server, engine = Server(app, service.engine, opened), service.engine
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{opened.getsockname()[1]}"

    def say() -> None:
        print(f"Models: {', '.join(service.models)}")
        for model in service.models.values():
            if model.system:
                print(f"{model.name}: {trained_with(model.system)} Clients have to send it.")
        print(f"Up to {engine.num_rows} answers at the same time, each of at most {engine.max_length} tokens.")
        print(
            f"Serving at {address}/v1" + (f", page at {address}/" if page is not None else "") + "  (Ctrl+C stops)",
            flush=True,
        )

    gc.freeze()  # what was loaded stays: looking through it takes half a second, in which no one is answered
    server.end_on_signals()
    asyncio.run(server.run_until_stopped(say))
    print("Stopped.")
