"""Known bugs that tests plant in the engine, one at a time, to check that the detectors and the suite catch them."""
