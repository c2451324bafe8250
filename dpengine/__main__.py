"""Lets ``python -m dpengine`` do what the command ``dpengine`` does, from a checkout too."""

import sys

from dpengine.cli import main

sys.exit(main())
