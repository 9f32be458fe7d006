"""The bytes of every message, kept in golden.txt; run this file to append messages that have none yet.

What stands in golden.txt is a promise to peers of other versions: a line that must change means that the protocol did.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

from gpumesh.model.actors import ActorPlan
from gpumesh.model.jobs import JobSpec
from gpumesh.model.payloads import Bundle, Later, OutOfBand, Stored
from gpumesh.model.resources import CardReading, DeviceFacts, Requirement, WorkerFacts
from gpumesh.model.tasks import TaskSpec
from gpumesh.protocol import codec, frames, messages

GOLDEN = Path(__file__).with_name("golden.txt")

CARD = "GPU-9f8e7d6c-5b4a-3928-1706-f5e4d3c2b1a0"
FACTS = WorkerFacts(
    hostname="box",
    slots=2,
    cores=8,
    memory=16_000_000_000,
    score=55.5,
    devices=(
        DeviceFacts("cpu", 0, "AMD", 16_000_000_000, 0.5),
        DeviceFacts(
            "cuda",
            1,
            "RTX 3080",
            10_000_000_000,
            55.5,
            uuid=CARD,
            system_index=0,
            problem="paused by its owner",
            others=300_000_000,
            is_integrated=False,
            capability="8.6",
            rates=(("float32", 2.5e13), ("bandwidth", 7e11)),
        ),
    ),
    tags=(("room", "lab"),),
    python="3.11",
    platform="linux",
    gpumesh="0.1.0",
    pid=4242,
    problem="",
    versions=(("numpy", "2.1.3"),),
    installing=(("scikit-learn==1.5.*",),),
)
SPEC = TaskSpec(
    function=bytes(range(16)),
    name="train",
    requirement=Requirement(device="cuda", gpus=0.5, gpu_memory=1 << 30, tags=(("room", "lab"),), python="3.11"),
    timeout=1.5,
    retries=3,
    priority=-1,
    cost=2.0,
    idempotent=True,
    placement_timeout=60.0,
    code=bytes(range(16, 32)),
    packages=("scikit-learn==1.5.*",),
    place=False,
    script="sweep/train.py",
    backoff=0.25,
    plan=ActorPlan(
        token=(0x1A2B3C4D << 32) | 6,
        name="c",
        is_detached=True,
        max_concurrency=4,
        restart_seconds=60.0,
        group="shards",
        placement="spread",
        description=b"methods",
    ),
    actor=0,
    method="",
    is_stream=True,
    depth=2,
)
TASK = (0x1A2B3C4D << 32) | 17
OBJECT = (0x1A2B3C4D << 32) | 5
TRANSFER = (1 << 31) | 3

SAMPLES: Dict[str, Any] = {
    "Hello": messages.Hello("client", bytes(range(32)), "0.1.0", "3.11", "linux"),
    "Challenge": messages.Challenge(bytes(range(32, 64)), "9f8e7d6c", "0.1.0", "3.12"),
    "Proof": messages.Proof(b"\xaa" * 32),
    "Welcome": messages.Welcome(b"\xbb" * 32, 3),
    "Refused": messages.Refused("authentication", "the token was refused"),
    "Ping": messages.Ping(1),
    "Pong": messages.Pong(300),
    "Goodbye": messages.Goodbye("closed"),
    "UnknownMessage": messages.UnknownMessage(0x70),
    "RegisterWorker": messages.RegisterWorker("0123456789abcdef", tuple(FACTS)),
    "RegisterWorker of one that is back": messages.RegisterWorker(
        "0123456789abcdef", tuple(FACTS), ((tuple(SPEC), (CARD,), 1, ((TASK, 1),)),), ((TASK + 1, 2),)
    ),
    "RegisterClient": messages.RegisterClient(0x1A2B3C4D, "ann@box, python 4242"),
    "RegisterClient of one that is back": messages.RegisterClient(0x1A2B3C4D, "ann@box, python 4242", True),
    "WorkerChanged": messages.WorkerChanged(tuple(FACTS._replace(devices=(), problem="paused"))),
    "WorkerDraining": messages.WorkerDraining("shutting down"),
    "MeshChanged": messages.MeshChanged(5),
    "SessionResumed": messages.SessionResumed(True),
    "WorkerReadings": messages.WorkerReadings(
        (tuple(CardReading(CARD, 300_000_000, 2_300_000_000, 97.0, 71.0, 218.5)), tuple(CardReading("mps:0")))
    ),
    "DefineFunction": messages.DefineFunction(bytes(range(16)), b"body"),
    "DefineSpec": messages.DefineSpec(7, tuple(SPEC)),
    "SubmitTasks": messages.SubmitTasks(7, (TASK, TASK + 1), (b"one", b"two")),
    "SubmitTasks with buffers": messages.SubmitTasks(
        7, (TASK, TASK + 1), (OutOfBand([b"pickle", b"array"]), OutOfBand([b"second", b""]))
    ),
    "SubmitTasks whose values are elsewhere": messages.SubmitTasks(
        7,
        (TASK, TASK + 1),
        (Stored(OBJECT, 100_000), tuple(Bundle(b"call", ((0, Later(TASK)), ("data", Stored(OBJECT, 100_000))), (OBJECT + 1,)))),
    ),
    "SubmitTasks again": messages.SubmitTasks(7, (TASK, TASK + 1), (b"one", b"two"), True),
    "ResultsReceived": messages.ResultsReceived(512),
    "ResubmissionEnds": messages.ResubmissionEnds(),
    "CancelTasks": messages.CancelTasks((TASK, TASK + 1)),
    "TaskResults": messages.TaskResults("box", ((TASK, 0, b"value", 0.25), (TASK + 1, 5, {"reason": "cancelled"}, 0.0))),
    "TaskNotice": messages.TaskNotice(TASK, "no worker has a GPU"),
    "TaskOutput": messages.TaskOutput(TASK, 1, b"epoch 1\n", "box"),
    "RunTasks": messages.RunTasks(7, ((TASK, 1, b"one"), (TASK + 1, 2, b"two"))),
    "RunTasks on a card": messages.RunTasks(7, ((TASK, 1, b"one"),), (CARD,), 1),
    "RecallTasks": messages.RecallTasks(((TASK, 1), (TASK + 1, 2)), True, False),
    "TasksFinished": messages.TasksFinished(((TASK, 1, 0, b"value", 0.25), (TASK + 1, 2, 1, OutOfBand([b"error"]), 1.0))),
    "StreamItems": messages.StreamItems(TASK, 1, 3, (b"a", Stored(OBJECT, 100_000))),
    "StreamCredit": messages.StreamCredit(TASK, 67),
    "TaskWaits": messages.TaskWaits(TASK, True),
    "SlotGranted": messages.SlotGranted(TASK),
    "TasksWait": messages.TasksWait(((TASK, 1),), False),
    "ActorReady": messages.ActorReady(TASK, 2),
    "EndActor": messages.EndActor(),
    "CancelCalls": messages.CancelCalls((TASK + 1,), 5),
    "CreateDetached": messages.CreateDetached(7, bytes(range(16)), SPEC, b"arguments"),
    "KillActor": messages.KillActor(8, TASK, True),
    "RotateToken": messages.RotateToken(9, bytes(range(16)), 3600.0),
    "TokenRotated": messages.TokenRotated(9, "5f" * 32, True, ""),
    "ForgetResults": messages.ForgetResults((TASK, TASK + 1)),
    "RunnerReady": messages.RunnerReady(4243),
    "OpenStore": messages.OpenStore(),
    "StoreOffer": messages.StoreOffer("/dev/shm/gpumesh-1000/9f8e-4242/probe", bytes(range(16))),
    "CreateSegment": messages.CreateSegment(1, OBJECT, 100_000),
    "SegmentCreated": messages.SegmentCreated(1, "/dev/shm/gpumesh-1000/9f8e-4242/s1", ""),
    "SegmentCreated without room": messages.SegmentCreated(2, "", "the object store is full"),
    "PutObject": messages.PutObject(OBJECT, 100_000, "s1", None, (OBJECT + 1,)),
    "PutObject of a small value": messages.PutObject(OBJECT, 192, "", OutOfBand([b"pickle", b"array"]), ()),
    "ObjectStored": messages.ObjectStored(OBJECT, ""),
    "LocateObject": messages.LocateObject(4, OBJECT, 100_000),
    "ObjectAt": messages.ObjectAt(4, OBJECT, "/dev/shm/gpumesh-1000/9f8e-4242/s1", 100_000, None, ""),
    "ObjectAt of a small value": messages.ObjectAt(TRANSFER, OBJECT, "", 192, b"value", ""),
    "FetchObject": messages.FetchObject(TRANSFER, OBJECT, 8 << 20),
    "ObjectSent": messages.ObjectSent(TRANSFER),
    "TransferCredit": messages.TransferCredit(TRANSFER, 4 << 20),
    "CancelFetch": messages.CancelFetch(TRANSFER),
    "UnpinObjects": messages.UnpinObjects(((OBJECT, 1),)),
    "HoldRefs": messages.HoldRefs((OBJECT, OBJECT + 1)),
    "HoldRefs of a worker that has said all": messages.HoldRefs((), True),
    "ReleaseRefs": messages.ReleaseRefs(((OBJECT, 2),)),
    "DeleteObjects": messages.DeleteObjects((OBJECT,)),
    "FreeObjects": messages.FreeObjects((OBJECT,)),
    "SegmentsGone": messages.SegmentsGone(("s1", "s2")),
    "DefineCode": messages.DefineCode(bytes(range(16, 32)), b"archive", (bytes(range(32, 48)),)),
    "SubmitJob": messages.SubmitJob(
        8,
        tuple(
            JobSpec(
                "j-4bscpk1d",
                bytes(range(100, 116)),
                "sweep",
                "train.py",
                (tuple(SPEC._replace(script="train.py")),),
                2,
                "ann@box",
            )
        ),
    ),
    "JobPayloads": messages.JobPayloads(9, "j-4bscpk1d", 0, ((0, b'{"lr": 0.1}'), (0, b'{"lr": 0.2}'))),
    "ChangeJob": messages.ChangeJob(10, "j-4bscpk1d", "cancel"),
    "Query": messages.Query(1, "workers", {"all": True}),
    "Answer": messages.Answer(1, ({"name": "box", "score": 55.5, "tags": {}, "left": None},), ""),
    "Answer that there is none": messages.Answer(2, None, "there is no job 'j-4bscpk1d'", "unknown"),
}


def encode(message: Any) -> bytes:
    """One message as a whole frame."""
    tag, body, buffers = codec.Encoder().encode(message)
    return b"".join(bytes(part) for part in frames.encode_frame(tag, body, buffers))


def read() -> Dict[str, bytes]:
    """Title -> bytes. Everything after a `|` is for people."""
    found: Dict[str, List[str]] = {}
    title = ""
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            title = line
            assert title not in found, f"{title} stands twice in {GOLDEN.name}"
            found[title] = []
        else:
            found[title].append(line.partition("|")[0])
    return {title: bytes.fromhex("".join(lines)) for title, lines in found.items()}


def render(title: str, data: bytes, cuts: List[Tuple[int, str]]) -> str:
    """One section; `cuts` are (length, what it is), at most 24 bytes a line."""
    lines = [title]
    position = 0
    for length, what in cuts:
        for start in range(position, position + length, 24):
            part = data[start : min(start + 24, position + length)]
            shown = re.sub(r"[^ -~]", ".", part.decode("latin-1")).replace("|", "!")
            lines.append(f"  {part.hex(' '):<71} | {what if start == position else '':<9} {shown}".rstrip())
        position += length
    assert position == len(data)
    return "\n".join(lines) + "\n\n"


def cut_frame(data: bytes) -> List[Tuple[int, str]]:
    """Where the parts of one frame (not a chunk) lie."""
    _, _, flags, count = frames.HEADER.unpack_from(data)
    assert flags == 0
    sizes = [int.from_bytes(data[8 + 4 * i : 12 + 4 * i], "little") for i in range(count)]
    cuts = [(8, "header"), (4 * count, "table"), (len(data) - 8 - 4 * count - sum(sizes), "body")]
    return cuts + [(size, "buffer") for size in sizes]


if __name__ == "__main__":
    known = read()
    with GOLDEN.open("a", encoding="utf-8") as file:
        for title, sample in SAMPLES.items():
            if title not in known:
                data = encode(sample)
                file.write(render(title, data, cut_frame(data)))
