"""Lets ``python -m dpengine`` do what the command ``dpengine`` does, from a checkout too."""

import sys

from dpengine.cli.main import main

sys.exit(main())
