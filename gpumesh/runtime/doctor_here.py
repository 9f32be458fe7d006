"""Checks of this machine: each looks at one thing and says how it is. What the facts mean is in `doctor_judging`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import stat
import sys
from typing import Any, Dict, List, Tuple

from gpumesh.config import DEFAULT_PORT
from gpumesh.runtime import doctor_judging as judge
from gpumesh.runtime.findings import Finding, note, ok, warning
from gpumesh.version import __version__

REQUIRED = (
    "aiohttp", "cloudpickle", "cryptography", "msgpack", "nvidia-ml-py", "pathspec", "platformdirs", "psutil", "questionary", "rich",
    "typer", "zeroconf",
)  # fmt: skip
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (where objects are; nothing is written there)


def check_python() -> Finding:
    """Version and platform."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return judge.python(sys.version_info[:3], system, sys.executable)


def check_packages() -> List[Finding]:
    """What is installed."""
    required = {name: installed(name) for name in (*REQUIRED, *(() if sys.platform == "win32" else ("uvloop",)))}
    optional = {name: installed(name) for name, _, _ in judge.OPTIONAL}
    return judge.packages(__version__, required, optional)


def check_devices() -> List[Finding]:
    """Processors and GPUs, why some are not used, and whether torch goes with the driver. Asks the drivers in a process of its own."""
    from gpumesh.devices.detect import gpus_may_exist, local_facts
    from gpumesh.devices.probing import Survey, detect
    from gpumesh.model.resources import show_bytes

    cpus = [device for device in local_facts().devices if device.kind == "cpu"]
    survey = detect() if gpus_may_exist() else Survey()
    rows = [
        {
            "kind": device.kind.upper() if device.kind == "cpu" else f"{device.kind}:{device.index}",
            "name": device.name,
            "memory": show_bytes(device.memory) if device.memory else "",
            "problem": device.problem,
        }
        for device in (*cpus, *survey.devices)
    ]
    found = judge.devices(rows, survey.problem)
    torch, cuda, hip = torch_build()
    has_cards = sys.platform != "darwin" and (bool(survey.devices) or bool(survey.driver))
    about_torch = judge.torch_and_driver(torch, cuda, hip, survey.driver, has_cards)
    return [*found, about_torch] if about_torch is not None else found


def check_limits() -> List[Finding]:
    """Files that may be open, and memory that may be shared."""
    from gpumesh.model.resources import show_bytes
    from gpumesh.network.interfaces import in_container

    open_files = None
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_files = soft if soft != resource.RLIM_INFINITY else None
    shared = None
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage(_SHARED_MEMORY).total
    return judge.limits(open_files, shared, show_bytes(shared or 0), in_container=in_container())


def check_connection() -> Finding:
    """The saved connection, read without changing anything; its token is not told."""
    from gpumesh.network.address import parse_address
    from gpumesh.runtime.settings import connection_file

    file = connection_file()
    try:
        mode = stat.S_IMODE(os.stat(file).st_mode) if os.name == "posix" else None
        with open(file, encoding="utf-8") as opened:
            saved = json.load(opened)
        url = str(saved["url"])
        parse_address(url)
        if not isinstance(saved["token"], str):
            raise ValueError("its token is not text")
    except FileNotFoundError:
        return judge.saved_connection(file, "", None, "")
    except OSError as error:
        return judge.saved_connection(file, "", None, error.strerror or str(error))
    except KeyError as error:
        return judge.saved_connection(file, "", None, f"it has no {error.args[0]}")
    except (ValueError, TypeError) as error:
        problem = "it is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        return judge.saved_connection(file, "", None, problem)
    return judge.saved_connection(file, url, mode, "")


def check_addresses() -> List[Finding]:
    """Under which addresses others could find this machine."""
    from gpumesh.network.interfaces import host_addresses, in_container
    from gpumesh.network.ranking import rank

    every = host_addresses()
    ranked = rank(every)
    found = []
    if ranked:
        shown = ", ".join(f"{each.ip} ({each.interface}, {each.what})" for each in ranked)
        found.append(ok("addresses", f"others may find this machine at {shown}"))
    else:
        found.append(
            warning("addresses", "this machine is in no network; only programs on it can connect", "connect it to one")
        )
    left_out = [each for each in every if each.is_up and each not in ranked and each.kind != "loopback" and ":" not in each.ip]
    if left_out:
        shown = ", ".join(f"{each.ip} ({each.interface}, {each.what})" for each in left_out)
        found.append(note("addresses", f"not for others: {shown}"))
    if in_container():
        advice = "publish the port (docker run -p 8000:8000), and name the host's address: gpumesh serve --advertise ADDRESS"
        found.append(note("addresses", "this is a container; its addresses may be known to its host alone", advice))
    return found


def check_port(port: int = DEFAULT_PORT) -> Finding:
    """Who listens at the usual port here."""
    from gpumesh.network.occupant import free_port_after, occupant

    found = occupant("127.0.0.1", port)
    if not found.is_there:
        return ok("port", f"port {port} is free here")
    if found.is_mesh:
        return ok("port", f"port {port} here is taken by {found.text}")
    return note("port", f"port {port} here is taken by {found.text}", found.advice(free=free_port_after(port)))


def installed(package: str) -> str:
    """The version of a package, without loading it; "" if it is not installed."""
    from importlib import metadata

    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ""


def torch_build() -> Tuple[str, str, str]:
    """Version of torch, and of the CUDA and the ROCm that it is built for, without loading it; "" where there is none."""
    version = installed("torch")
    spec = importlib.util.find_spec("torch") if version else None
    if spec is None or not spec.origin:
        return version, "", ""
    built: Dict[str, Any] = {"cuda": "", "hip": ""}
    with contextlib.suppress(OSError), open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
        for match in re.finditer(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", file.read(), re.MULTILINE):
            built[match[1]] = match[2]
    return version, built["cuda"], built["hip"]
