"""F61: a full object store frees what nobody needs, moves the rest to disk, and says so when that is full too; then it goes on."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

from gpumesh import GPUMesh, accelerate
from gpumesh.errors import ObjectStoreFullError

MB = 1_000_000


@pytest.fixture
def spill_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch, spill_dir: Path) -> Iterator[GPUMesh]:
    monkeypatch.setenv("GPUMESH_OBJECT_MEMORY", "200MB")
    monkeypatch.setenv("GPUMESH_SPILL_DIR", str(spill_dir))
    with GPUMesh.local(workers=1, slots=2) as started:
        yield started


def ten_megabytes(number: int) -> Any:
    return np.full(10 * MB // 8, float(number))


def first_and_last(array: Any) -> Any:
    return float(array[0]), float(array[-1])


def test_objects_that_are_referred_to_go_to_disk_and_come_back(mesh: GPUMesh) -> None:
    refs = [mesh.put(ten_megabytes(number)) for number in range(50)]
    found = mesh.objects()
    assert found["memory"] <= 200 * MB
    assert found["disk"] >= 290 * MB
    assert [float(mesh.get(ref)[-1]) for ref in refs] == list(range(50))
    assert list(accelerate(mesh)(first_and_last).map(refs)) == [(number, number) for number in range(50)]


def test_objects_that_nobody_refers_to_are_freed_at_once(mesh: GPUMesh) -> None:
    for number in range(50):
        ref = mesh.put(ten_megabytes(number))
    assert float(mesh.get(ref)[0]) == 49
    assert mesh.objects()["disk"] == 0


def test_ten_producers_at_once_get_through(mesh: GPUMesh) -> None:
    with ThreadPoolExecutor(10) as producers:
        refs = list(producers.map(lambda number: mesh.put(ten_megabytes(number)), range(50)))
    made = [accelerate(mesh)(ten_megabytes).remote(number) for number in range(20)]
    assert [float(mesh.get(ref)[0]) for ref in refs] == list(range(50))
    assert [float(future.result(30)[0]) for future in made] == list(range(20))


def test_an_object_larger_than_the_store_is_refused_with_both_sizes_and_the_rest_goes_on(mesh: GPUMesh) -> None:
    with pytest.raises(ObjectStoreFullError, match=r"240 MB.*200 MB") as refused:
        mesh.put(np.zeros(30 * MB))
    assert "--object-memory" in str(refused.value)
    make = accelerate(mesh)(np.zeros)
    with pytest.raises(ObjectStoreFullError, match=r"240 MB.*200 MB"):
        make.remote(30 * MB).result(30)
    with pytest.raises(ObjectStoreFullError, match=r"240 MB.*200 MB"):
        accelerate(mesh)(first_and_last).remote(np.zeros(30 * MB))
    assert make.remote(3).result(30).tolist() == [0, 0, 0]
    assert float(mesh.get(mesh.put(ten_megabytes(7)))[0]) == 7


class TestTinyDisk:
    @pytest.fixture
    def spill_dir(self, tmp_path: Path) -> Iterator[Path]:
        if os.geteuid() != 0:
            pytest.skip("mounting a small file system needs root")
        folder = tmp_path / "disk"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], check=False).returncode:
            pytest.skip("no file system can be mounted here")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)

    def test_a_full_disk_is_an_error_that_names_folder_limit_and_holders_and_ends_with_them(self, mesh: GPUMesh) -> None:
        refs = []
        with pytest.raises(ObjectStoreFullError) as full:
            for number in range(50):
                refs.append(mesh.put(ten_megabytes(number)))
        assert 18 <= len(refs) <= 26
        text = str(full.value)
        assert "200 MB" in text
        assert mesh.objects()["folder"] in text
        assert "references" in text
        assert float(mesh.get(refs[-1])[0]) == len(refs) - 1
        del refs[5:]
        assert [float(mesh.get(ref)[0]) for ref in refs] == list(range(5))
        more = [mesh.put(ten_megabytes(number)) for number in range(10)]
        assert [float(mesh.get(ref)[0]) for ref in more] == list(range(10))
