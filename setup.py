"""Metadata of dpengine, and their only place: pyproject.toml holds the settings of the tools."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).resolve().parent
LIGHTNING = ["lightning>=2.4"]
PLOTS = ["matplotlib>=3.8"]


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

setup(
    name="dpengine",
    version="0.1.0",
    description="PyTorch training with differential privacy, in the loop that you already have",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0 AND CC-BY-4.0",  # the code, and the census data in dpengine/data/adult
    license_files=["LICENSE", "dpengine/data/adult/SOURCE.md"],
    python_requires=">=3.11",
    packages=find_packages(include=["dpengine", "dpengine.*"]),
    ext_modules=[NATIVE],
    package_data={
        "dpengine": ["py.typed"],
        "dpengine.kernels": ["*.c", "*.h"],
        "dpengine.data": ["adult/*.xz", "adult/*.md"],
        "dpengine.report": ["*.json", "*.jinja"],
    },
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "scipy>=1.11",
        "opt-einsum>=3.4",
        "dp-accounting>=0.6,<0.7",
        "safetensors>=0.4",
        "tqdm>=4.66",
        "jinja2",
    ],
    extras_require={
        "plots": PLOTS,
        "lightning": LIGHTNING,
        "test": [
            "pytest>=8",
            "setuptools>=77",
            "pytest-xdist",
            "hypothesis",
            "mpmath",
            "ruff",
            "mypy",
            "scikit-learn",
            *LIGHTNING,
            *PLOTS,
        ],
    },
    entry_points={"console_scripts": ["dpengine=dpengine.cli.main:main"]},
)
