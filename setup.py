"""The C extension. The metadata of dpengine are in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent


def _kernels(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(HERE)) for path in (HERE / "dpengine" / "kernels").glob(pattern))


# Optional: without a C compiler NumPy and torch compute the same. No product may be fused with a sum: bits must agree.
NATIVE = Extension(
    "dpengine.kernels.native",
    sources=_kernels("*.c"),
    depends=_kernels("*.h"),
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"],
    optional=True,
)

setup(ext_modules=[NATIVE])
