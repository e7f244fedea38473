"""Placeholder until its stage lands."""

import typer

app = typer.Typer()
