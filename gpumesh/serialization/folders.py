"""What of a folder travels: everything but caches, version control, environments, our own secrets, and what `.gitignore` names.

Sizes and times only; nothing is read except the ignore files.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from typing import Any, Callable, Dict, Iterable, Iterator, List, Set, Tuple

from gpumesh.model.records import NamedTuple

EXCLUDED_FOLDERS = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache", ".pytest_cache", ".ruff_cache",
     ".hypothesis", "node_modules", ".ipynb_checkpoints"}
)  # fmt: skip
ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})  # A folder that holds one is an environment.
EXCLUDED_FILES = (".pyc", ".pyo")
OUR_FOLDER = (
    "gpumesh"  # In the user's folders for settings and state, which lie in a home folder that is somebody's project, ...
)
OUR_SECRETS = frozenset(
    {"connection.json", "service-token", "identity.pem"}
)  # ... these hold what opens the mesh, and go nowhere.
MAX_FILES = 200_000  # A walk that goes on longer has left the project.


class Entry(NamedTuple):
    """One file that travels."""

    name: str  # Relative to the folder, with "/" between the parts.
    path: str
    nbytes: int
    mtime_ns: int
    is_executable: bool


class Listing(NamedTuple):
    """The files of a folder, sorted by name; and the folders looked at, with the times that tell of new files in them."""

    entries: List[Entry]
    folders: Dict[str, int]
    unreadable: List[str]


def list_folder(folder: str, *, deep: bool, keep: Iterable[str] = ()) -> Listing:
    """Look through a folder.

    Args:
        deep: With all that is below; otherwise the files directly in it.
        keep: Paths that travel even if an ignore file names them: the code imports them.
    """
    found: List[Entry] = []
    folders: Dict[str, int] = {}
    unreadable: List[str] = []
    ignores: Dict[str, str] = {}  # Folder -> its ignore file.
    waiting: List[Tuple[str, str, Tuple[Tuple[int, int], ...]]] = [(folder, "", ())]
    while waiting:
        path, prefix, above = waiting.pop()
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                continue  # A link to a folder that this one lies in.
            items = sorted(os.scandir(path), key=lambda item: item.name)
        except OSError:
            unreadable.append(path)
            continue
        folders[path] = status.st_mtime_ns
        if prefix and not ENVIRONMENT_MARKS.isdisjoint(item.name for item in items):
            continue
        for item in items:
            if item.name == ".gitignore":
                ignores[path] = item.path
            if item.name in EXCLUDED_FOLDERS or item.name.endswith(EXCLUDED_FILES):
                continue
            if item.name in OUR_SECRETS and os.path.basename(path) == OUR_FOLDER:
                continue
            try:
                status = item.stat()
            except OSError:  # A link to nowhere, or to itself.
                continue
            if stat.S_ISDIR(status.st_mode):
                if deep:
                    waiting.append((item.path, f"{prefix}{item.name}/", (*above, identity)))
            elif stat.S_ISREG(status.st_mode):
                if not os.access(item.path, os.R_OK):
                    unreadable.append(item.path)
                    continue
                is_executable = bool(status.st_mode & stat.S_IXUSR)
                found.append(Entry(prefix + item.name, item.path, status.st_size, status.st_mtime_ns, is_executable))
        if len(found) > MAX_FILES:
            break  # Whoever counts them refuses.
    found = _without_ignored(folder, found, ignores, set(keep))
    found.sort()
    return Listing(found, folders, unreadable)


def list_file(path: str) -> List[Entry]:
    """A single file, in the same shape; empty when it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [Entry(os.path.basename(path), path, status.st_size, status.st_mtime_ns, bool(status.st_mode & stat.S_IXUSR))]


def _without_ignored(folder: str, entries: List[Entry], ignores: Dict[str, str], keep: Set[str]) -> List[Entry]:
    """Leave out what the ignore files in a folder, and those above it in the same repository, name."""
    outer = dict(_ignores_above(folder))
    patterns = {where: _read_patterns(file) for where, file in {**outer, **ignores}.items()}
    if not _may_match([line for lines in patterns.values() for line in lines], folder, entries):
        return entries
    rules = _Rules({where: lines for where, lines in patterns.items() if lines})
    if rules.names(folder + os.sep):
        rules = _Rules({where: lines for where, lines in patterns.items() if lines and where not in outer})
    return [entry for entry in entries if entry.path in keep or not rules.names(entry.path)]


def _ignores_above(folder: str) -> Iterator[Tuple[str, str]]:
    """Ignore files from the folder's parent up to the root of the repository; none without a repository."""
    found: List[Tuple[str, str]] = []
    above = folder
    while not os.path.exists(os.path.join(above, ".git")):
        parent = os.path.dirname(above)
        if parent == above:
            return
        above = parent
        file = os.path.join(above, ".gitignore")
        if os.path.isfile(file):
            found.append((above, file))
    yield from found


def _read_patterns(file: str) -> List[str]:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            return [line.rstrip("\n") for line in lines if line.strip() and not line.startswith("#")]
    except OSError:
        return []


def _may_match(patterns: List[str], folder: str, entries: List[Entry]) -> bool:
    """Whether any pattern could name any of these. Errs on the side of yes; a no saves loading what really knows."""
    lasts = {_last_part(pattern) for pattern in patterns if not pattern.startswith("!")}
    if "" in lasts:
        return True
    parts = set(folder.split(os.sep))
    for entry in entries:
        parts.update(entry.name.split("/"))
    names = {last for last in lasts if not _SPECIAL.intersection(last)}
    ends = tuple(last[1:] for last in lasts - names if last[0] == "*" and not _SPECIAL.intersection(last[1:]))
    if not names.isdisjoint(parts) or any(part.endswith(ends) for part in parts):
        return True
    others = [last for last in lasts - names if last[1:] not in ends]
    return any(fnmatch.fnmatchcase(part, other) for other in others for part in parts)


_SPECIAL = frozenset("*?[")


def _last_part(pattern: str) -> str:
    """The part of an ignore pattern that the last name of a path must match, made a little more generous; "" if not sure."""
    if "\\" in pattern or _ODD_SET.search(pattern):
        return ""
    return _SET.sub("?", pattern.rstrip().rstrip("/").rpartition("/")[2])


_SET = re.compile(r"\[.*?\]")
_ODD_SET = re.compile(r"\[[!^]?\]|\[[^]]*/")  # A bracket inside of the brackets, or a name that ends in them.


class _Rules:
    """What a set of ignore files says, each about what lies below it; the deepest that says anything decides."""

    def __init__(self, patterns: Dict[str, List[str]]) -> None:
        import pathspec

        compiled: List[Tuple[str, Any]] = [
            (where + os.sep, pathspec.GitIgnoreSpec.from_lines(lines)) for where, lines in patterns.items()
        ]
        self._files = sorted(compiled, key=lambda item: -len(item[0]))
        self._known: Dict[str, bool] = {}

    def names(self, path: str) -> bool:
        """Whether a file, or a folder above it, is ignored."""
        top = self._files[-1][0] if self._files else path
        below = path[len(top) :].split(os.sep)
        for count in range(1, len(below)):
            if self._decide(top + os.sep.join(below[:count]) + os.sep):
                return True
        return self._decide(path)

    def _decide(self, path: str) -> bool:
        if path not in self._known:
            self._known[path] = self._look(path)
        return self._known[path]

    def _look(self, path: str) -> bool:
        for where, spec in self._files:
            if path.startswith(where) and path != where:
                decided = spec.check_file(path[len(where) :].replace(os.sep, "/")).include
                if decided is not None:
                    return bool(decided)
        return False


def biggest(entries: List[Tuple[str, int]], count: int, show: Callable[[int], str]) -> str:
    """The heaviest of (name, bytes) for a message; small files count together, as their folder."""
    total = sum(size for _, size in entries)
    sums: Dict[str, List[Tuple[int, str]]] = {}
    for name, size in entries:
        is_small = size * 100 < total and "/" in name
        sums.setdefault(name.rpartition("/")[0] + "/" if is_small else name, []).append((size, name))
    groups = [
        (sum(size for size, _ in group), group[0][1] if len(group) == 1 else f"{key} ({len(group)} files)")
        for key, group in sums.items()
    ]
    groups.sort(key=lambda group: (-group[0], group[1]))
    return ", ".join(f"{label} {show(size)}" for size, label in groups[:count])
