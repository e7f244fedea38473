"""`flashnext status`: what is served, and how it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashnext.console import print_data, print_json, say

if TYPE_CHECKING:
    from flashnext.services import Service

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def status(
    port: Annotated[int | None, typer.Option(help="Only the service on this port.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Ended ones, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what is served, or how the last service ended. Exit code 0 when one is ready, else 8."""
    from flashnext import services

    found = [s for s in services.every() if port in (None, s.port)]
    live = {s.port: s.supervisor.alive for s in found}
    if not every:
        alive = [s for s in found if live[s.port]]
        found = alive or sorted(found, key=lambda s: s.started)[-1:]
    found = [s if live[s.port] else _ended(s) for s in found]
    if as_json:
        print_json([{**s.model_dump(mode="json"), "alive": live[s.port]} for s in found])
    elif not found:
        say("nothing is served, and nothing was")
    else:
        for service in found:
            _show(service, alive=live[service.port])
    if not any(live[s.port] and s.state == "ready" for s in found):
        raise typer.Exit(8)


def _ended(service: Service) -> Service:
    """A dead service as it is: a supervisor that was killed could not write so itself."""
    if service.state in ("stopped", "fatal"):
        return service
    reason = f"the supervisor was killed; it was {service.state}"
    return service.model_copy(update={"state": "killed", "reason": reason})


def _show(service: Service, *, alive: bool) -> None:
    mark = "" if service.kind == "qualified" else f" [{service.kind}]"
    print_data(f"{service.profile}{mark}  {service.state}  {service.url}  {service.reason}")
    if not alive:
        return
    from flashnext.serve.metrics import summary

    print_data(f"  pid {service.supervisor.pid}, since {service.started:%Y-%m-%d %H:%M:%S} UTC")
    print_data(f"  build {service.build[:12]}, restarts {service.restarts}, {_activity(service)}")
    speeds = summary(service.metrics)
    if speeds:
        print_data(f"  {', '.join(speeds)} (since the last start)")
    if service.lean:
        print_data(f"  lean prefill: {service.lean}")
    devices = {device["name"]: device for device in service.devices}
    for child in service.children:
        memory = devices.get(child.name)
        print_data(f"  {child.name}: pid {child.pid}{_memory(memory) if memory else ''}")
    for line in (*service.warnings, *service.deviations):
        print_data(f"  warning: {line}")
    print_data(f"  page {service.control}")
    print_data(f"  log {service.log}")


def _activity(service: Service) -> str:
    counters = service.counters
    if not counters.get("busy"):
        return "idle"
    if counters.get("written"):
        return f"writing, {counters['written']:.0f} tokens so far"
    read = f"{counters.get('read', 0):,.0f}"
    if not counters.get("prompt_tokens"):
        return f"reading the prompt, {read} tokens so far"
    share, tokens, left = (counters[f"prompt_{key}"] for key in ("share", "tokens", "left_s"))
    return f"reading the prompt, {read} of about {tokens:,.0f} tokens ({share:.0%}), about {left:,.0f} s left"


def _memory(device: dict[str, int | str]) -> str:
    used, total = (int(device.get(key, 0)) / 1024**2 for key in ("allocated_bytes", "memory_bytes"))
    return f", {used:,.0f} of {total:,.0f} MiB in use"
