"""Real weights, served in process; each model and dtype is loaded once a test run."""

import pytest
import torch

from pyruntime.config import Settings
from pyruntime.model.demo import demo_models
from pyruntime.serving import load_served_model

COLLECTED = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Every test that was found, before -k and -m leave some out; ``test_models_table.py`` reads it."""
    config.stash[COLLECTED] = {item.nodeid for item in items}


@pytest.fixture(scope="session")
def folders():
    return demo_models(print)


@pytest.fixture(scope="session")
def served(folders):
    """served("gemma-3-270m", "float32") → ServedModel."""
    loaded = {}

    def get(name, dtype):
        if (name, dtype) not in loaded:
            settings = Settings(dtype=dtype, kv_cache_bytes=2**30)
            loaded[name, dtype] = load_served_model(name, folders[name], settings, print)
        return loaded[name, dtype]

    yield get
    for model in loaded.values():
        model.engine.close()


@pytest.fixture(scope="session")
def gemma_eager(folders):
    """transformers' own eager model in float32: the independent reference."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folders["gemma-3-270m"], dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield
