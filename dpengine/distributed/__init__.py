"""Which rank holds which parameters, and how ranks exchange sums."""
