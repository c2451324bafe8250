"""Other packages' names for what dpengine does, so that scripts written for them run."""
