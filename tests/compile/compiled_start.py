"""Starts a compiled model with the cache in a folder: which graphs the caches held, and tokens."""

import json
import sys

import torch
from torch._dynamo.utils import counters

from glm53 import GLM53
from glm53.compile import CompileConfig
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config

STATES = ("miss", "hit", "bypass")


def main(folder: str) -> dict:
    torch.set_num_threads(1)
    config = tiny_config(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        num_nextn_predict_layers=0,
    )
    network = randomise(Transformer(config)).eval()
    options = dict(kv_cache_tokens=256)
    eager = GLM53(network, None, **options)
    model = GLM53(
        network, None, **options, compile=CompileConfig(buckets=(1,)), compile_cache=folder
    )
    model.engine()
    started = {name: dict(counters[name]) for name in ("inductor", "aot_autograd")}
    tokens = [
        list(m.generate(torch.arange(20), max_new_tokens=8, temperature=0).token_ids)
        for m in (model, eager)
    ]
    return dict(
        fx_graphs=[started["inductor"].get(f"fxgraph_cache_{s}", 0) for s in STATES],
        aot_graphs=[started["aot_autograd"].get(f"autograd_cache_{s}", 0) for s in STATES],
        tokens=tokens,
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
