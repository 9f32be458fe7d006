"""What torch says of the devices that it can use, and how fast they are. For probe processes only: it loads torch and touches the cards.

The rules of an honest measurement: warm up by time; let the clock run over a whole batch of products and stop it when the device has
finished; random data in [-1, 1], for zeros draw less power and run faster; operands in turn, together larger than any cache; float32
means float32 and never TF32; half precision in the type that the card has. The figures are those of a burst after a short warm-up,
which is what tasks of seconds see; under load for minutes some cards fall by up to a sixth (H200: 828 to 703 TFLOPS).
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import Any, Callable, Dict, List, Tuple

from gpumesh.devices.detect import cpu_name
from gpumesh.devices.gpus import from_torch, host_memory
from gpumesh.devices.scoring import half_type
from gpumesh.model.resources import DeviceFacts

WARM_SECONDS = 0.4  # Clocks go up within it; the first product also pays for context, library and kernel.
RATE_SECONDS = 0.35  # For each element type.
COPY_SECONDS = 0.2
HOST_SECONDS = 0.1  # For each direction.
BATCH_SECONDS = 0.05  # Between two looks at the clock: a thousand times what a launch costs.
SIZES = (1024, 2048, 4096, 8192)  # Small ones undershoot on large cards, large ones take too long on small cards.
PRODUCT_SECONDS = 0.05  # The longest single product.
SETS = 2  # Pairs of operands used in turn: from 4096 on more than twice the largest cache (B200: 126 MB).
COPY_BYTES = 512 << 20
HOST_BYTES = 64 << 20
MEMORY_SHARE = 0.5  # Of what is free on the device, at most.
CHECK_SIZE = 256
# Relative error (Frobenius norm) above which a product is wrong: ten times what rounding makes of random data, were float32 done as TF32.
TOLERANCE = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}


class WrongProduct(ValueError):
    """The device multiplies matrices wrongly."""


def load_torch() -> Any:
    """Import torch with float32 meaning float32.

    Raises:
        ImportError: It is not installed, or does not load.
    """
    # Both variables turn float32 products into TF32, four to eight times as fast and ten bits wide; 0 forbids that below torch too.
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def find_devices(torch: Any) -> Tuple[DeviceFacts, ...]:
    """The GPUs that torch can use, by torch's numbers, with scores guessed from their names.

    Initialises CUDA, HIP or Metal in this process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A driver that does not work is a warning here, and no device.
        if torch.cuda.is_available():
            kind = "rocm" if getattr(torch.version, "hip", None) else "cuda"
            return tuple(_cuda_facts(torch, kind, index) for index in range(torch.cuda.device_count()))
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        return (_mps_facts(torch),)
    return ()


def why_no_cuda(torch: Any) -> str:
    """Why this torch can use no CUDA or ROCm device; "" if it can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_sentence(error)
    return first_sentence(caught[-1].message) if caught else "torch finds no such device"


def is_built_for_gpus(torch: Any) -> bool:
    """Whether this build of torch could use any NVIDIA or AMD GPU at all."""
    return bool(getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None))


# What `gpus.from_torch` wants to know, as far as this build has it.
_PROPERTIES = ("name", "total_memory", "major", "minor", "gcnArchName", "multi_processor_count", "is_integrated", "uuid")


def _cuda_facts(torch: Any, kind: str, index: int) -> DeviceFacts:
    try:
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return from_torch({}, kind=kind, index=index, host=host_memory(), problem=f"cannot be opened ({first_sentence(error)})")
    known = {name: getattr(found, name) for name in _PROPERTIES if hasattr(found, name)}
    return from_torch(known, kind=kind, index=index, host=host_memory(), others=total - free)


def _mps_facts(torch: Any) -> DeviceFacts:
    host = host_memory()
    try:
        name = str(torch.backends.mps.get_name())
    except (AttributeError, RuntimeError):  # Added lately.
        name = cpu_name()
    try:
        memory = int(torch.mps.recommended_max_memory())
    except (AttributeError, RuntimeError):  # Added in 2024. Metal offers two thirds to three quarters of the memory.
        memory = host.total * 2 // 3
    return from_torch({"name": name, "total_memory": memory}, kind="mps", index=0, host=host)


def check_product(torch: Any, device: str, dtype: str) -> None:
    """Multiply once on the device and compare with the CPU.

    Raises:
        WrongProduct: It differs by more than rounding explains.
        RuntimeError: The device cannot do it; a build without kernels for it says so here first.
    """
    kind = getattr(torch, dtype)
    left, right = (torch.rand(CHECK_SIZE, CHECK_SIZE, dtype=torch.float32) * 2 - 1 for _ in range(2))
    left, right = left.to(kind), right.to(kind)  # Rounded once, on the CPU, so that both multiply the same numbers.
    there = (left.to(device) @ right.to(device)).cpu().double()
    here = left.double() @ right.double()
    error = float((there - here).norm() / here.norm())
    if not error <= TOLERANCE[dtype]:
        raise WrongProduct(f"a {dtype} matrix product came out wrong (relative error {error:.2g})")


def measure(
    torch: Any, device: str, *, kind: str = "cpu", capability: str = "", look: Callable[[], None] = lambda: None
) -> Dict[str, float]:
    """Measure one device for about two seconds.

    Args:
        device: As torch names it: "cuda:0", "mps", "cpu".
        kind: "cuda", "rocm", "mps" or "cpu"; with `capability` it decides the half precision.
        look: Called directly after each burst of products, when what hinders the device shows.

    Returns:
        "float32" and, where the device has it, "bfloat16" or "float16" in FLOP/s; "bandwidth" of a copy on the device, read and
        written bytes counted, "to_device" and "from_device" in bytes/s.

    Raises:
        WrongProduct: It calculates wrongly.
        RuntimeError: It cannot do it: no kernels, no memory, lost.
    """
    bench = Bench(torch, device)
    half = half_type(kind, capability)
    types = ["float32", half] if half else ["float32"]
    for dtype in types:
        check_product(torch, device, dtype)
    rates: Dict[str, float] = {}
    for dtype in reversed(types):  # Half first: its warm-up serves both.
        rates[dtype] = bench.matmul_rate(dtype, warm_seconds=WARM_SECONDS if not rates else WARM_SECONDS / 4)
        look()
    rates["bandwidth"] = bench.copy_bandwidth()
    if kind != "cpu":
        rates["to_device"], rates["from_device"] = bench.host_rates()
    return rates


class Bench:
    """One device under measurement."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self._sync: Callable[[], None] = lambda: None
        if device.startswith("cuda"):
            self._sync = lambda: torch.cuda.synchronize(device)
        elif device == "mps":
            self._sync = torch.mps.synchronize

    def free_bytes(self) -> int:
        """What may be used for measuring now."""
        torch = self._torch
        if self._device.startswith("cuda"):
            return int(torch.cuda.mem_get_info(self._device)[0] * MEMORY_SHARE)
        if self._device == "mps" and hasattr(torch.mps, "recommended_max_memory"):
            return int((torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) * MEMORY_SHARE)
        return 1 << 30

    def matmul_rate(
        self,
        dtype: str,
        *,
        warm_seconds: float = WARM_SECONDS,
        budget_seconds: float = RATE_SECONDS,
        sizes: Tuple[int, ...] = SIZES,
    ) -> float:
        """FLOP/s of matrix products (2 n**3 each): the better median of the two largest sizes that the device does in time.

        Args:
            sizes: n, ascending. Those are tried whose operands fit and whose product takes at most `PRODUCT_SECONDS`.
        """
        item = 4 if dtype == "float32" else 2
        free = self.free_bytes()
        fitting = [size for size in sizes if SETS * 3 * size * size * item <= free] or [sizes[0]]
        rate = self._rate_of(fitting[0], dtype, warm_seconds / 2, BATCH_SECONDS)
        quick = [size for size in fitting if 2.0 * size**3 / rate <= PRODUCT_SECONDS] or fitting[:1]
        best = 0.0
        for number, size in enumerate(quick[-2:]):
            best = max(best, self._rate_of(size, dtype, warm_seconds / 2 if number == 0 else 0.0, budget_seconds / 2))
        return best

    def _rate_of(self, size: int, dtype: str, warm_seconds: float, budget_seconds: float) -> float:
        torch, kind = self._torch, getattr(self._torch, dtype)
        with torch.no_grad():
            sets = [
                tuple(self._uniform(size, kind) for _ in range(2)) + (torch.empty(size, size, dtype=kind, device=self._device),)
                for _ in range(SETS)
            ]

            def multiply(count: int) -> None:
                for number in range(count):
                    left, right, out = sets[number % SETS]
                    torch.mm(left, right, out=out)

            return 2.0 * size**3 * self._per_second(multiply, warm_seconds, budget_seconds)

    def _uniform(self, size: int, dtype: Any) -> Any:
        random = self._torch.rand(size, size, dtype=self._torch.float32, device=self._device)
        return random.mul_(2).sub_(1).to(dtype)

    def copy_bandwidth(self, *, budget_seconds: float = COPY_SECONDS, most_bytes: int = COPY_BYTES) -> float:
        """Bytes/s of copies within the device's memory, read and written ones counted."""
        torch = self._torch
        count = max(1 << 20, min(most_bytes, self.free_bytes() // 2))
        source = torch.rand(count // 4, dtype=torch.float32, device=self._device)
        target = torch.empty_like(source)

        def copy(times: int) -> None:
            for _ in range(times):
                target.copy_(source)

        return 8.0 * int(source.numel()) * self._per_second(copy, BATCH_SECONDS, budget_seconds)

    def host_rates(self, *, budget_seconds: float = HOST_SECONDS) -> Tuple[float, float]:
        """Bytes/s of copies from the host to the device and back, from page-locked memory where there is such."""
        torch = self._torch
        here = torch.rand(HOST_BYTES // 4, dtype=torch.float32)
        if self._device.startswith("cuda"):
            here = here.pin_memory()
        there = torch.empty_like(here, device=self._device)

        def send(times: int) -> None:
            for _ in range(times):
                there.copy_(here, non_blocking=True)

        def fetch(times: int) -> None:
            for _ in range(times):
                here.copy_(there, non_blocking=True)

        to_device = HOST_BYTES * self._per_second(send, 0.0, budget_seconds)
        return to_device, HOST_BYTES * self._per_second(fetch, 0.0, budget_seconds)

    def _per_second(self, run: Callable[[int], None], warm_seconds: float, budget_seconds: float) -> float:
        """How often a second it can be done: the median over batches of `BATCH_SECONDS` or one, each waited for as a whole."""
        run(1)
        self._sync()
        warm_until = time.perf_counter() + warm_seconds
        count, took = 1, 0.0
        while True:  # At least once: it also finds out how many make a batch.
            started = time.perf_counter()
            run(count)
            self._sync()
            ended = time.perf_counter()
            took = max(1e-9, (ended - started) / count)
            wanted = max(1, min(count * 10, int(BATCH_SECONDS / took)))
            if ended >= warm_until and wanted <= 2 * count:
                break
            count = wanted
        count = max(1, int(BATCH_SECONDS / took))
        rates: List[float] = []
        until = time.perf_counter() + budget_seconds
        while True:
            started = time.perf_counter()
            run(count)
            self._sync()
            ended = time.perf_counter()
            rates.append(count / (ended - started))
            if ended >= until:
                return statistics.median(rates)


def first_sentence(error: object) -> str:
    """One line of what torch says, which goes on for paragraphs."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line.partition(". ")[0][:200]
