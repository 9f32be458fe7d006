"""Which version of a package is installed here, and how that explains a value that cannot be rebuilt.

Nothing is imported to find out: the names of folders say it.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, Iterator, List, Sequence, Tuple

from gpumesh.errors import MeshError, SerializationError

# Those whose values travel, and whose versions then have to fit together.
WELL_KNOWN = ("jax", "numpy", "pandas", "polars", "pyarrow", "scikit-learn", "scipy", "tensorflow", "torch", "xarray")
NOT_INSTALLED = "not installed"
_MODULE_IN_TEXT = r"module '([\w.]+)'"  # "Can't get attribute 'Frame' on <module 'pandas' from ...>"
_ENDINGS = (".dist-info", ".egg-info")
_NOBODYS = frozenset(("", "__main__", "__mp_main__", "builtins", *sys.builtin_module_names))  # Modules of no package.
_known: Dict[Tuple[str, ...], Tuple[Tuple[str, str], ...]] = {}  # By sys.path.


def well_known_versions() -> Tuple[Tuple[str, str], ...]:
    """(package, version) of those that are installed, sorted. Reads each folder of `sys.path` once: about a millisecond."""
    path = tuple(sys.path)
    found = _known.get(path)
    if found is None:
        found = _known[path] = tuple(sorted(_installed(path, WELL_KNOWN).items()))
    return found


def version_of(module: str) -> str:
    """The version of the package that a module, imported or not, belongs to; "" if that is not known."""
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    version = getattr(loaded, "__version__", None)
    if isinstance(version, str):
        return version
    for package in (top, *_packages_of(top)):
        found = _installed(sys.path, (package,))
        if found:
            return found[package]
    return ""


def show_version(package: str) -> str:
    """`2.0`, `not installed`, or `installed without a version`: a package on this machine, for people."""
    version = version_of(package)
    if version:
        return version
    return "installed without a version" if _is_here(package) else NOT_INSTALLED


def loading_error(what: str, error: Exception) -> Exception:
    """Why a value could not be rebuilt here, with what is known of the package that is to blame.

    Args:
        what: The value, for people.
        error: What unpickling raised; one that says it all comes back as it is.
    """
    if isinstance(error, (MeshError, MemoryError)):
        return error
    module = _module_in(error) or _raised_in(error)
    package = "" if module.partition(".")[0] in _NOBODYS else package_of(module)
    here = show_version(module.partition(".")[0]) if package else ""
    version = f" ({package} is {here} here)" if package else ""
    if isinstance(error, ModuleNotFoundError) and module and here in ("", NOT_INSTALLED):
        reason = f"module '{module}' is not installed here; install '{package or module}' on this machine, or send plain data instead"
    elif isinstance(error, (ImportError, AttributeError)):
        reason = f"{error}{version}; the code differs between the machines: bring both to the same version"
    elif package:
        reason = (
            f"{type(error).__name__}: {error}{version}; if the versions differ between the machines, bring both to the same one"
        )
    else:
        reason = f"{type(error).__name__}: {error}; its class cannot be rebuilt from its pickle: give it a __reduce__, or send plain data"
    failure = SerializationError(f"{what} cannot be rebuilt here: {reason}")
    if package:
        failure.package, failure.version, failure.machine = package, here, host_name()
    return failure


def _module_in(error: Exception) -> str:
    """The module that an error of unpickling complains about; "" if it does not say."""
    if isinstance(error, ImportError) and isinstance(error.name, str):
        return error.name
    import re

    found = re.search(_MODULE_IN_TEXT, str(error)) if isinstance(error, (ImportError, AttributeError)) else None
    return found.group(1) if found else ""


def _raised_in(error: Exception) -> str:
    """The module of an installed package that raised it; "" for other code."""
    module = ""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__") or "")
        trace = trace.tb_next
    top = module.partition(".")[0]
    return module if top not in ("", "gpumesh") and version_of(top) else ""


def host_name() -> str:
    """What this machine calls itself."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket

    return socket.gethostname()


def package_of(module: str) -> str:
    """What people install to get a module: mostly its first name."""
    top = module.partition(".")[0]
    return {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "PyYAML"}.get(top, top)


def _is_here(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return package in sys.modules or find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _packages_of(top: str) -> List[str]:
    package = package_of(top)
    return [package] if package != top else []


def _installed(path: Sequence[str], packages: Sequence[str]) -> Dict[str, str]:
    """Versions of these packages; what stands first on the path is what is imported."""
    wanted = {_normal(package): package for package in packages}
    found: Dict[str, str] = {}
    for folder in path:
        for name, version in _distributions(folder or "."):
            package = wanted.get(_normal(name))
            if package is not None:
                found.setdefault(package, version)
    return found


def _distributions(folder: str) -> Iterator[Tuple[str, str]]:
    try:
        entries = os.listdir(folder)
    except OSError:
        return
    for entry in entries:
        if entry.endswith(_ENDINGS):
            name, dash, version = entry[: entry.rindex(".")].partition("-")
            if dash:
                yield name, version.partition("-py")[0]


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
