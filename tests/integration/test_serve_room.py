"""`flashnext serve` refuses what cannot fit, before anything is launched."""

from __future__ import annotations

import json
import shutil
import time

import yaml
from serve_home import FakeHome, free_port

from tests.real_set import write_real_set


def test_devices_that_are_too_small(home: FakeHome) -> None:
    small = home.profile(devices={"memory_mib": 64}, context={"size": 4096, "micro_batch": 4096})
    begin = time.monotonic()
    done = home.run("serve", "--profile", str(small), "--port", str(free_port()))
    assert time.monotonic() - begin < 10  # two seconds of work, on a machine that does other things, too
    assert done.returncode == 4
    assert "error[memory-unfit]" in done.stderr
    assert "VGPU0:" in done.stderr and "64 MiB free" in done.stderr and "short by" in done.stderr
    assert "hint: lower context.micro_batch to " in done.stderr
    assert home.launches("server") == home.launches("vgpu") == []


def test_the_change_that_is_named_helps(home: FakeHome) -> None:
    demo, section = {"synthetic": "demo"}, {"size": 65_536, "kv_type": "f32"}
    data = yaml.safe_load(home.profile(context=section).read_text())
    data |= {"model": demo, "devices": data["devices"] | {"memory_mib": 160}}
    small = home.root / "small.yaml"
    small.write_text(yaml.safe_dump(data))
    refused = home.run("serve", "--profile", str(small), "--port", str(free_port()))
    size = int(refused.stderr.split("lower context.size to ")[1].split(";")[0])

    def fits(context: int) -> tuple[int, bool]:
        changed = data | {"context": data["context"] | {"size": context}}
        small.write_text(yaml.safe_dump(changed))
        plan = home.run("plan", "--profile", str(small), "--json")
        return plan.returncode, json.loads(plan.stdout)["fits"]

    assert fits(size) == (0, True)
    assert fits(size + 256) == (4, False)


def test_the_real_model_on_a_small_host(home: FakeHome) -> None:
    """Honest headers, holes for data: the numbers are said beside whatever else is wrong here."""
    folder = home.root / "files"
    folder.mkdir()
    model, head = write_real_set(folder)
    options = ("--profile", "2x3090", "--model", str(model), "--head", str(head))
    planned = json.loads(home.run("plan", *options, "--json").stdout)
    done = home.run("serve", *options, "--port", str(free_port()))
    assert done.returncode == 4
    fits_host = not any(line.startswith("host memory:") for line in planned["refusals"])
    assert fits_host != ("[memory-unfit]" in done.stderr)
    assert fits_host or "pinned 73,450 MiB" in done.stderr
    assert home.launches("server") == []
    shutil.rmtree(folder)
