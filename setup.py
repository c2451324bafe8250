"""Builds the C extension. The package metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent


def _kernels(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(HERE)) for path in (HERE / "dpengine" / "kernels").glob(pattern))


# Optional: without a compiler, NumPy and torch are used. No fused multiply-add: results must be bit-identical.
NATIVE = Extension(
    "dpengine.kernels.native",
    sources=_kernels("*.c"),
    depends=_kernels("*.h"),
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
    optional=True,
)

setup(ext_modules=[NATIVE])
