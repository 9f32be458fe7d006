"""The torch side of the benchmark, on the CPU: it measures, checks its products, and float32 means float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, List

import pytest

torch: Any = pytest.importorskip("torch")

from gpumesh.devices import torch_cards  # noqa: E402
from gpumesh.devices.scoring import score_rates  # noqa: E402


def run(code: str, **environment: str) -> Any:
    """What a fresh process prints, as JSON: torch reads these variables when it is loaded."""
    given = {**os.environ, **environment}
    printed = subprocess.run([sys.executable, "-c", code], env=given, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    return json.loads(printed)


def test_the_whole_benchmark_runs_on_the_cpu_and_gives_a_score() -> None:
    looks: List[int] = []

    rates = torch_cards.measure(torch, "cpu", look=lambda: looks.append(1))

    assert set(rates) == {"float32", "bandwidth"}
    assert 1e8 < rates["float32"] < 1e14
    assert 1e8 < rates["bandwidth"] < 1e13
    assert 0 < score_rates(rates) < 100
    assert looks == [1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_measured_in_its_own_type(dtype: str) -> None:
    torch_cards.check_product(torch, "cpu", dtype)
    rate = torch_cards.Bench(torch, "cpu").matmul_rate(dtype, warm_seconds=0.01, budget_seconds=0.02, sizes=(64, 128))

    assert 1e6 < rate < 1e14


def test_copies_between_host_and_device_have_a_rate_each() -> None:
    to_device, from_device = torch_cards.Bench(torch, "cpu").host_rates(budget_seconds=0.05)

    assert 1e8 < to_device < 1e13
    assert 1e8 < from_device < 1e13


def test_no_more_than_what_is_free_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = torch_cards.Bench(torch, "cpu")
    sizes: List[int] = []
    monkeypatch.setattr(bench, "free_bytes", lambda: 6 * 128 * 128 * 4)
    monkeypatch.setattr(bench, "_rate_of", lambda size, *rest: sizes.append(size) or 1e15)

    bench.matmul_rate("float32", sizes=(64, 128, 256))

    assert set(sizes) == {64, 128}


def test_products_that_take_too_long_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = torch_cards.Bench(torch, "cpu")
    sizes: List[int] = []
    monkeypatch.setattr(bench, "_rate_of", lambda size, *rest: sizes.append(size) or 1e9)

    bench.matmul_rate("float32", sizes=(64, 128, 8192))

    assert set(sizes) == {64, 128}


class Wrong:
    """torch on a device that multiplies wrongly."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def rand(*size: int, **options: Any) -> Any:
        return torch.rand(*size, **options).as_subclass(WrongTensor)


class WrongTensor(torch.Tensor):  # type: ignore[misc, name-defined, unused-ignore]
    def __matmul__(self, other: Any) -> Any:
        product = torch.Tensor.__matmul__(self, other)
        return product if product.dtype == torch.float64 else product + 1


def test_a_device_that_multiplies_wrongly_is_found_out() -> None:
    with pytest.raises(torch_cards.WrongProduct, match="a float32 matrix product came out wrong"):
        torch_cards.check_product(Wrong(), "cpu", "float32")


def test_float32_stays_float32_whatever_the_environment_says() -> None:
    code = (
        "import json, os\n"
        "from gpumesh.devices import torch_cards\n"
        "torch = torch_cards.load_torch()\n"
        "print(json.dumps([torch.backends.cuda.matmul.allow_tf32, os.environ['NVIDIA_TF32_OVERRIDE']]))\n"
    )

    assert run(code, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1", NVIDIA_TF32_OVERRIDE="1") == [False, "0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for builds without GPUs, or machines without")
def test_without_gpus_torch_says_why() -> None:
    assert torch_cards.find_devices(torch) == () or torch_cards.find_devices(torch)[0].kind == "mps"
    assert torch_cards.why_no_cuda(torch)
