"""One of two ranks that run a compiled network; see test_owed_reduction.py.

Arguments: rank, file of the rendezvous, names of the rewrites. Prints a line of JSON.
"""

import json
import sys

import torch
import torch.distributed as dist

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork
from glm53.model import Transformer
from tests.compile.owed import calls, owe, take_part
from tests.tiny import randomise, tiny_config

ROWS = 3


def main(rank: int, store: str, *rewrites: str) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = tiny_config(
        num_hidden_layers=3,
        indexer_types=("full", "shared", "full"),
        mlp_layer_types=("dense", "sparse", "sparse"),
        num_nextn_predict_layers=0,
    )
    whole, part = (randomise(Transformer(config)).eval() for _ in range(2))
    take_part(part, (0.3, 0.7)[rank])
    owe(part, dist.group.WORLD.group_name)
    compiled = CompiledNetwork(part, CompileConfig(buckets=(4,), rewrites=rewrites))

    torch.manual_seed(0)
    requests = [([7], 20 + 3 * i, [2 * i, 2 * i + 1]) for i in range(ROWS)]
    step = Batch.paged(requests, PAGE_SIZE)

    def run(network: Transformer | CompiledNetwork) -> torch.Tensor:
        cache = KVCache(config, 2 * ROWS, mtp=False, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    tensor.normal_(generator=generator)
        return network.model(step, cache)

    with torch.inference_mode():
        expected = run(whole)
        result = run(compiled)
        counts = calls(lambda: run(compiled))
    dist.destroy_process_group()
    return dict(error=float((result - expected).abs().max() / expected.abs().max()), calls=counts)


print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
