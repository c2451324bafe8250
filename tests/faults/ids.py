"""The faults that a privacy engine can have, by id: each has a test that carries its id in its name, as ``f_s7``."""

HOW_MANY = {
    "S": 13,  # sampling
    "C": 10,  # clipping
    "N": 12,  # noise and randomness
    "A": 11,  # accounting
    "L": 15,  # the life of a step
    "M": 11,  # modules
    "D": 7,  # data
    "X": 5,  # several processes
    "P": 7,  # persistence
    "U": 5,  # numerics
    "B": 18,  # bad arguments
}
IDS = tuple(f"F-{part}{number}" for part, last in HOW_MANY.items() for number in range(1, last + 1))
