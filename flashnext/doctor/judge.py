"""From facts to findings. Pure: the same facts give the same findings, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from flashnext.artefacts import Artefact
from flashnext.doctor.facts import Facts
from flashnext.errors import FlashnextError
from flashnext.probe.gpu_use import Link

Level = Literal["ok", "warn", "fail"]
# Bytes per second of one lane, by generation: 3 to 5 as measured, the others by the standard's ratio.
_LANE = {1: 0.20e9, 2: 0.40e9, 3: 0.79e9, 4: 1.56e9, 5: 3.4e9, 6: 6.8e9}
_EXPERTS = 77.0e9  # what a prompt streams once per micro-batch, in bytes, of the qualified model
_SLOW_DISK = 500e6


class Finding(Artefact):
    """One line of a diagnosis; ``fix`` is what to do about it, empty for ok."""

    check: str
    level: Level
    text: str
    fix: str = ""


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order in which a person should mend them."""
    found: list[Finding] = []
    for check in (
        _build,
        _gpus,
        _driver,
        _links,
        _cards,
        _model,
        _fit,
        _memory,
        _modules,
        _disk,
        _port,
        _stray,
    ):
        found += check(facts)
    return found


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, level="ok", text=text)


def _warn(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, level="warn", text=text, fix=fix)


def _fail(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, level="fail", text=text, fix=fix)


def _cuda(facts: Facts) -> bool:
    return facts.loaded.profile.devices.kind == "cuda"


def _build(facts: Facts) -> Iterator[Finding]:
    backend = "cuda" if _cuda(facts) else "cpu"
    fitting = [b for b in facts.builds if b.backend == backend or backend == "cpu"]
    if fitting:
        yield _ok("build", f"{len(fitting)} installed for {backend}: {fitting[0].key[:12]}")
    else:
        yield _fail("build", f"no build for {backend} is installed", f"`flashnext build --backend {backend}`")


def _gpus(facts: Facts) -> Iterator[Finding]:
    want, devices = facts.loaded.profile.devices, facts.gpus.devices
    names = ", ".join(f"{d.name} ({d.memory_bytes >> 20} MiB)" for d in devices)
    if not _cuda(facts):
        yield _ok("gpu", f"virtual devices are enough for this profile; CUDA devices here: {names or 'none'}")
    elif not devices:
        fix = "install the NVIDIA driver; `nvidia-smi` must list the cards"
        yield _fail("gpu", f"no CUDA device: {facts.gpus.failure}", fix)
    elif len(devices) != want.count:
        fix = "choose the cards with CUDA_VISIBLE_DEVICES, or copy the profile and change devices.count"
        yield _fail("gpu", f"{want.count} devices wanted, {len(devices)} visible: {names}", fix)
    elif want.name is not None and any(want.name.lower() not in d.name.lower() for d in devices):
        yield _fail("gpu", f"not all are {want.name}: {names}", "serve a profile made for these cards")
    else:
        yield _ok("gpu", names)


def _driver(facts: Facts) -> Iterator[Finding]:
    level = facts.driver_cuda
    toolkit = next((n.version for n in facts.nvcc if n.version is not None), None)
    if level is None or toolkit is None or not facts.gpus.devices:
        return
    have = ".".join(map(str, toolkit[:2]))
    text = f"driver {facts.gpus.devices[0].driver} runs CUDA {level[0]}.{level[1]}, the toolkit is {have}"
    if tuple(toolkit[:2]) > level and toolkit[0] > level[0]:
        yield _fail("driver", text, "update the driver, or build with an older CUDA toolkit (CUDACXX=...)")
    elif tuple(toolkit[:2]) > level:
        yield _warn("driver", text, "update the driver: code for a newer minor version may not load")
    else:
        yield _ok("driver", text)


def _links(facts: Facts) -> Iterator[Finding]:
    for link in facts.links:
        if link.pcie_width is None or link.pcie_gen_max is None:
            continue
        yield _link(link, f"device {link.index}")


def _link(link: Link, name: str) -> Finding:
    width, best_width = link.pcie_width or 0, link.pcie_width_max or 16
    gen = link.pcie_gen_max or 0
    seconds = _EXPERTS / (_LANE.get(gen, _LANE[3]) * max(width, 1))
    at_best = _EXPERTS / (_LANE.get(max(gen, 3), _LANE[3]) * 16)
    cost = (
        f"one pass over the experts of the qualified model takes {seconds:.0f} s on it, "
        f"{at_best:.0f} s on sixteen lanes of generation {max(gen, 3)}"
    )
    text = f"{name}: PCIe generation {gen} x{width}"
    if width <= 4 or gen <= 1:
        return _fail(
            "pcie", f"{text}; {cost}", "move the card to a slot with sixteen lanes; look for a riser"
        )
    if width < best_width or gen <= 2:
        return _warn("pcie", f"{text} of x{best_width}; {cost}", "seat the card again; free the slot's lanes")
    if link.pcie_gen == 1:
        return _ok("pcie", f"{text}; at generation 1 now, as idle cards are")
    return _ok("pcie", text)


def _cards(facts: Facts) -> Iterator[Finding]:
    for link in facts.links:
        name = f"device {link.index}"
        if link.ecc:
            yield _warn(
                "ecc", f"{name}: ECC is on, which takes memory and speed", "`nvidia-smi -e 0`, reboot"
            )
        limit, default = link.power_limit_w, link.power_default_w
        if limit is not None and default is not None and limit < 0.7 * default:
            text = f"{name}: power limit {limit:.0f} W of {default:.0f} W"
            yield _warn("power", text, f"`nvidia-smi -i {link.index} -pl {default:.0f}` if speed matters")
    for device in facts.gpus.devices:
        holders = [h for h in facts.holders if h.uuid == device.uuid]
        ours = sum(h.used_bytes for h in holders if h.pid in facts.own)
        held = max(facts.used.get(device.index, 0) - ours, 0) >> 20
        most = facts.loaded.profile.devices.used_mib_max
        who = ", ".join(f"pid {h.pid} {h.name}" for h in holders if h.pid not in facts.own)
        text = f"device {device.index}: {held} MiB in use{f' by {who}' if who else ''}"
        text += f", {ours >> 20} MiB by a flashnext service" if ours else ""
        if _cuda(facts) and most is not None and held > most:
            yield _fail("vram", f"{text}, {most} allowed", "end those processes, or move the desktop away")
        elif _cuda(facts):
            yield _ok("vram", text)


def _model(facts: Facts) -> Iterator[Finding]:
    profile = facts.loaded.profile
    if facts.model is None and profile.model.synthetic is None:
        fix = "fetch the files into flashnext's models folder; serving never downloads"
        yield _fail("model", f"{profile.model.path} is not there", fix)
    elif facts.model is None:
        yield _ok("model", "synthetic: written at the first start")
    else:
        yield from _files(facts)


def _files(facts: Facts) -> Iterator[Finding]:
    found = facts.inspection
    if found is None or facts.model is None:
        return
    for problem in found.problems:
        yield _fail("model", problem.message, problem.hint)
    if found.ok:
        yield _ok("model", facts.model.name)
    if found.head.form != "none" and found.ok:
        how = "; it borrows the target's embeddings" if found.head.form == "shared" else ""
        yield _ok("draft head", f"{found.head.path.name}: {found.head.form}{how}")


def _fit(facts: Facts) -> Iterator[Finding]:
    if facts.fit is None:
        return
    if isinstance(facts.fit, FlashnextError):
        yield _fail("memory plan", facts.fit.message, facts.fit.advice)
        return
    for text in facts.fit.refusals:
        yield _fail("memory plan", text, facts.fit.change or "see `flashnext plan`")
    for text in facts.fit.warnings:
        yield _warn("memory plan", text, "see `flashnext plan`")
    if not facts.fit.refusals:
        yield _ok("memory plan", "the profile fits")


def _memory(facts: Facts) -> Iterator[Finding]:
    limits = facts.limits
    if limits.memlock_bytes is None:
        yield _ok("memlock", "no limit")
    elif _cuda(facts):
        text = f"RLIMIT_MEMLOCK is {limits.memlock_bytes >> 10} KiB"
        yield _warn("memlock", text, "`ulimit -l unlimited`; `flashnext service` sets it for a service")
    for port, size in facts.service_memlock.items():
        if size is None:
            yield _ok("memlock", f"no limit for the service on port {port}")
        elif _cuda(facts):
            text = f"the service on port {port} runs with a limit of {size >> 10} KiB"
            yield _warn("memlock", text, "LimitMEMLOCK=infinity in its unit, then restart it")
    if limits.wsl:
        text = f"WSL pins about half of its {limits.total_bytes >> 20} MiB"
        yield _warn("wsl", text, "give the virtual machine more memory in .wslconfig, or run Linux itself")
    if limits.cgroup_bytes is not None:
        text = f"a memory cgroup allows {limits.cgroup_bytes >> 20} MiB"
        yield _warn("cgroup", text, "raise the container's or the slice's limit if the plan does not fit")
    if limits.numa_nodes > 1 and not limits.numactl:
        text = f"{limits.numa_nodes} NUMA nodes and no numactl: weights land on one node's memory"
        yield _warn("numa", text, "install numactl; it is used by itself then")
    else:
        how = ", interleaved by numactl" if limits.numa_nodes > 1 else ""
        yield _ok("numa", f"{limits.numa_nodes} node{'s' if limits.numa_nodes > 1 else ''}{how}")
    if facts.huge_pages == "never":
        fix = "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root"
        yield _warn("hugepages", "transparent huge pages are off", fix)
    elif facts.huge_pages is not None:
        yield _ok("hugepages", facts.huge_pages)


def _modules(facts: Facts) -> Iterator[Finding]:
    modules = facts.modules
    if modules is not None:
        speed = f" at {min(modules.speeds)} MT/s" if modules.speeds else ""
        text = f"{modules.count} modules on {modules.channels} channels{speed}"
        if modules.channels < 2:
            yield _warn("modules", text, "decode reads experts from memory: fill every channel")
        else:
            yield _ok("modules", text)
    if facts.memory_errors is not None and any(facts.memory_errors):
        corrected, lost = facts.memory_errors
        text = f"{corrected} corrected and {lost} uncorrected memory errors since boot"
        fix = "run a memory test; lower the memory's clock, or change the module"
        yield (_fail if lost else _warn)("memory errors", text, fix)
    sensor = facts.module_sensor
    if sensor is not None:
        text = f"the hottest memory module has {sensor.degrees:.0f} C"
        if sensor.alarm or (sensor.limit is not None and sensor.degrees >= sensor.limit):
            limit = (
                f", its limit is {sensor.limit:.0f}"
                if sensor.limit is not None
                else ", too hot by its own alarm"
            )
            yield _warn("module heat", text + limit, "hot modules are slowed down: bring air to them")
        else:
            yield _ok("module heat", text)
    if facts.throttled:
        text = f"the processor throttled {facts.throttled} times for heat since boot"
        yield _warn("throttling", text, "look at coolers and airflow: misses of the expert cache run on it")


def _disk(facts: Facts) -> Iterator[Finding]:
    speed = facts.disk_bytes_per_s
    if speed is None or facts.model is None:
        return
    text = f"{speed / 1e6:,.0f} MB/s from the model's file system"
    if speed < _SLOW_DISK and _cuda(facts):
        minutes = 111.3e9 / speed / 60
        fix = "keep the model on an NVMe disk of its own"
        yield _warn("disk", f"{text}: loading takes about {minutes:.0f} minutes", fix)
    else:
        yield _ok("disk", text)


def _port(facts: Facts) -> Iterator[Finding]:
    server = facts.loaded.profile.server
    if facts.port is None:
        yield _ok("port", f"{server.host}:{server.port} is free")
    elif server.port in facts.service_memlock:
        yield _ok("port", f"{server.host}:{server.port}: a flashnext service has it (`flashnext status`)")
    else:
        fix = "stop that process, or serve with `--port N` (0 finds a free one)"
        yield _warn("port", f"{server.host}:{server.port}: {facts.port}", fix)


def _stray(facts: Facts) -> Iterator[Finding]:
    for file in facts.stray_files:
        if file.is_relative_to("/etc"):
            yield _fail("stray config", f"{file} is read by llama-server whatever is asked", "move it away")
        else:
            fix = "nothing to do for flashnext; other tools read it"
            yield _warn("stray config", f"{file} is there, and kept out", fix)
    if facts.stray_variables:
        names = ", ".join(facts.stray_variables)
        text = f"set in this shell, and not passed on: {names}"
        yield _warn("variables", text, "unset them; what is served is what the profile says")
