"""Interfaces of other packages, implemented by dpengine, so that scripts written for them run."""
