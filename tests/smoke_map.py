"""A small map over an embedded mesh, run by CI under each Python with the package installed alone: no test tools needed."""

from __future__ import annotations

import sys

from gpumesh import GPUMesh, accelerate


def square(number: int) -> int:
    """Something to compute."""
    return number * number


def main() -> None:
    """Map, one call, one exception."""
    with GPUMesh.local(workers=2) as mesh:
        stream = accelerate(mesh)(square).map(range(200))
        assert list(stream) == [n * n for n in range(200)]
        assert accelerate(mesh)(lambda text: text.upper()).remote("mesh").result(timeout=30) == "MESH"
        try:
            accelerate(mesh)(square).remote(None).result(timeout=30)
        except TypeError:
            pass
        else:
            raise AssertionError("the task's exception did not arrive")
    sys.stdout.write(f"map, call and exception on Python {sys.version.split()[0]}\n")


if __name__ == "__main__":
    main()
