"""One of two ranks that run a compiled network; see test_owed_reduction.py.

Arguments: rank, file of the rendezvous, names of the rewrites. Prints a line of JSON.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork
from glm53.model import Transformer
from tests.compile.owed import owe, take_part
from tests.tiny import randomise, tiny_config

OPERATORS = ("glm53::all_reduce_add_rms_norm", "_c10d_functional::all_reduce")
ROWS = 3


def calls(run) -> list[int]:
    """How often a function calls each of OPERATORS."""
    with torch.profiler.profile() as profile:
        run()
    found = {event.key: event.count for event in profile.key_averages()}
    return [found.get(name, 0) for name in OPERATORS]


def main(rank: int, store: str, *rewrites: str) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = tiny_config()
    whole, part = (randomise(Transformer(config)).eval() for _ in range(2))
    take_part(part, (0.3, 0.7)[rank])
    owe(part, dist.group.WORLD.group_name)
    compiled = CompiledNetwork(part, CompileConfig(buckets=(4,), rewrites=rewrites))

    torch.manual_seed(0)
    requests = [([7], 20 + 3 * i, [2 * i, 2 * i + 1]) for i in range(ROWS)]
    step = Batch.paged(requests, PAGE_SIZE)
    next_ids, states = torch.tensor([3, 9, 4]), torch.randn(ROWS, config.hidden_size)

    def run(network: Transformer | CompiledNetwork) -> list[torch.Tensor]:
        cache = KVCache(config, 2 * ROWS, mtp=True, dtype=torch.float32)
        generator = torch.Generator().manual_seed(1)
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    tensor.normal_(generator=generator)
        return [network.model(step, cache), network.draft(next_ids, states, step, cache)[0]]

    with torch.inference_mode():
        expected = run(whole)
        results = run(compiled)
        counts = calls(lambda: run(compiled))
    errors = [
        float((result - exact).abs().max() / exact.abs().max())
        for result, exact in zip(results, expected, strict=True)
    ]
    dist.destroy_process_group()
    return dict(
        error=max(errors),
        calls=counts,
        hits=counters["inductor"]["fxgraph_cache_hit"],
        misses=counters["inductor"]["fxgraph_cache_miss"],
    )


print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
