"""`flashnext stop`: end a service and wait until it is gone."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from flashnext.console import print_data, print_json
from flashnext.errors import ServerError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def stop(
    port: Annotated[int | None, typer.Option(help="Which service, where there are several.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="How long to wait for its end.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Ask the supervisor to end, and wait for it and its children."""
    from flashnext import services
    from flashnext.proc import wait_until

    service = services.choose(port)
    os.kill(service.supervisor.pid, signal.SIGTERM)
    processes = (service.supervisor, *service.children)
    if not wait_until(lambda: not any(p.alive for p in processes), timeout_s=timeout_s):
        alive = [f"{p.name}: pid {p.pid}" for p in processes if p.alive]
        raise ServerError(
            f"still running after {timeout_s:g} s", context=alive, hint="end them with `kill -9 PID`"
        )
    if as_json:
        print_json({"stopped": service.profile, "port": service.port})
    else:
        print_data(f"stopped {service.profile} on port {service.port}")
