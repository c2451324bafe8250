"""Data for demonstrations and benchmarks: found on this machine, downloaded only on request."""

from .adult import load_adult
from .fetch import fetch
from .images import load_images
from .record import LabelledData
from .sources import SOURCES, Source, find_files

__all__ = ["SOURCES", "LabelledData", "Source", "fetch", "find_files", "load_adult", "load_images"]
