"""Determinism for every test; fixtures live in the modules that use them."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

# Sums split over threads round differently, and test workers already occupy the cores.
torch.set_num_threads(1)

# The first example of a property may compile or load something: time says nothing about it.
settings.register_profile("glm53", deadline=None)
settings.load_profile("glm53")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
