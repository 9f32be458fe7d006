"""A coordinator's figures in the text form of Prometheus. Reads nothing by itself."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Tuple

Sample = Tuple[Mapping[str, str], float]


def render(figures: Dict[str, Any]) -> str:
    """`Coordinator.figures()` as text/plain; version=0.0.4."""
    lines: List[str] = []

    def add(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# HELP gpumesh_{name} {help_text}")
        lines.append(f"# TYPE gpumesh_{name} {kind}")
        lines.extend(f"gpumesh_{name}{_labels(labels)} {_number(value)}" for labels, value in samples)

    def one(name: str, kind: str, help_text: str, value: float) -> None:
        add(name, kind, help_text, [({}, value)])

    workers = figures["workers"]
    alive = [row for row in workers if row["alive"]]
    objects = figures["objects"]
    versions = {"version": figures["version"], "python": figures["python"], "mesh": figures["mesh"]}
    add("info", "gauge", "Versions of the coordinator, and which mesh this is.", [(versions, 1)])
    one("uptime_seconds", "gauge", "Since the coordinator has started.", figures["uptime"])
    add("workers", "gauge", "Workers by state.", _by_state(figures["worker_states"]))
    one(
        "slots",
        "gauge",
        "Tasks that may run at the same time on the workers that are here.",
        sum(row["slots"] for row in alive),
    )
    add("tasks", "gauge", "Tasks that have not ended, by state.", _by_state(figures["task_states"]))
    one("tasks_ended_total", "counter", "Tasks that have ended since the coordinator has started.", figures["ended"])
    one("clients", "gauge", "Clients that are connected.", figures["clients"])
    one("connections", "gauge", "Connections of workers and clients.", figures["connections"])
    one("handshakes", "gauge", "Connections that have not shown who they are.", figures["handshakes"])
    one("refusals_total", "counter", "Connections and proofs that were refused.", figures["refused"])
    one("objects", "gauge", "Objects that the coordinator's host keeps.", objects.get("objects", 0))
    places = [({"place": place}, float(objects.get(place, 0))) for place in ("memory", "free", "disk")]
    add("object_bytes", "gauge", "Bytes of these objects, by where they are; free: segments that wait for the next.", places)
    one("object_limit_bytes", "gauge", "Bytes of objects that may be in memory.", objects.get("limit", 0))
    named = [({"worker": row["id"], "hostname": row["hostname"]}, row) for row in workers]
    add("worker_up", "gauge", "1: the worker is here.", [(labels, row["alive"]) for labels, row in named])
    add(
        "worker_score",
        "gauge",
        "Of the worker's best device; 100 is the reference card.",
        [(labels, row["score"]) for labels, row in named],
    )
    add("worker_running", "gauge", "Tasks that run on the worker.", [(labels, row["running"]) for labels, row in named])
    add("worker_tasks_total", "counter", "Tasks that the worker has done.", [(labels, row["done"]) for labels, row in named])
    return "\n".join(lines) + "\n"


def _by_state(counts: Mapping[str, int]) -> List[Sample]:
    return [({"state": state}, count) for state, count in counts.items()]


def _labels(labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
