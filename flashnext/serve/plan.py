"""Everything one start needs, decided before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flashnext.proc import environment
from flashnext.profile import command
from flashnext.profile.load import Loaded


@dataclass(frozen=True)
class Plan:
    """A profile that was checked against build, model and host. Pure data and pure functions of it."""

    loaded: Loaded
    place: command.Place
    vgpu: str | None
    vgpu_threads: int
    build_key: str
    build_features: tuple[str, ...]
    log: Path
    api_key: str | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        host = self.loaded.profile.server.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.place.port}"

    @property
    def address(self) -> tuple[str, int]:
        """Where our own probes connect to: the bound address, loopback where it is bound to all."""
        host = self.loaded.profile.server.host
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), self.place.port

    @property
    def rehearses(self) -> bool:
        """Does ready need a begin and an end of the memory transaction?"""
        return self.loaded.profile.phase_prefill is not None

    def vgpu_lines(self) -> list[list[str]]:
        """Command lines of the virtual GPUs, none for cuda profiles."""
        if self.vgpu is None:
            return []
        count = self.loaded.profile.devices.count
        return [
            command.vgpu_argv(self.loaded.profile, self.vgpu, index, self.vgpu_threads)
            for index in range(count)
        ]

    def server_line(self, endpoints: tuple[str, ...]) -> list[str]:
        return command.argv(self.loaded.profile, replace(self.place, endpoints=endpoints))

    def server_env(self) -> dict[str, str]:
        return environment(command.env(self.loaded.profile, self.place))

    def vgpu_env(self) -> dict[str, str]:
        return environment({"XDG_CONFIG_HOME": self.place.config_home})
