"""Independent sequential reference of the training arithmetic, the oracle of the engine's tests."""
