"""How a model generates: the sizes and switches of its engine and cache."""

import operator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from glm53.cache import (
    PAGE_SIZE,
    KVCache,
    bytes_per_token,
    cache_bytes,
    check_hot_tokens,
    fitting_tokens,
)
from glm53.checkpoint import available_bytes, check_fits
from glm53.compile import CompileConfig, CompiledNetwork, inductor_cache
from glm53.config import GLM53Config
from glm53.model import Transformer

# Without a size from the caller the cache holds so many contexts of the model's full length,
# if that fits into this share of the free memory.
_DEFAULT_CONTEXTS = 16
_DEFAULT_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Keyword arguments of `GLM53` and `GLM53.from_pretrained`.

    - `kv_cache_dtype`: bfloat16 or float32; default bfloat16 for a bfloat16 model, else float32.
    - `kv_cache_tokens`, `kv_cache_bytes`: size of the cache (at most one of them), rounded down to
      pages of 64 tokens; default 16 full contexts, at most a quarter of the free memory of a CPU
      or 90% of a GPU's.
    - `kv_cache_hot_tokens`: keep the latents in host memory and only so many rows of each layer on
      the device, for all requests together, at least index_topk; a selection's other rows are
      fetched. Results are the same, slower by the copies, and the device has room for contexts
      many times as long. `kv_cache_bytes` then counts latents (in host memory) and index keys (on
      the device), and the hot rows come on top.
    - `max_batch_tokens`: rows of one step; `max_running`: completions that run at once.
    - `prefix_caching`: share whole pages between prompts that begin alike.
    - `prefix_host_bytes`: host memory (pinned beside a GPU) for shared pages that were evicted
      from the cache; default none.
    - `batch_invariant`: logits of `generate` and `score` are the same bits whatever else is
      computed and however it is chunked, for one device, dtype, number of threads and version of
      torch; prefixes from elsewhere are refused where these differ. On a CPU decoding takes 1.2
      to 1.7 times as long, and prompts 4 times.
    - `compile`: run generation through `torch.compile`: True, or a `CompileConfig`. Everything is
      compiled on first use, which takes minutes, and again only if settings of the process or of
      the parameters change (docs/compile.md). Not with `batch_invariant` or `kv_cache_hot_tokens`.
    - `compile_cache`: a folder that keeps what was compiled for the next process.

    ValueError, naming the argument, for a value that is not allowed.
    """

    kv_cache_dtype: torch.dtype | str | None = None
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_hot_tokens: int | None = None
    max_batch_tokens: int = 1024
    max_running: int = 64
    prefix_caching: bool = True
    prefix_host_bytes: int | None = None
    batch_invariant: bool = False
    compile: bool | CompileConfig = False
    compile_cache: str | Path | None = None

    def __post_init__(self) -> None:
        name = self.kv_cache_dtype
        dtype = getattr(torch, name, None) if isinstance(name, str) else name
        if name is not None and dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"kv_cache_dtype={name!r}: must be bfloat16 or float32")
        object.__setattr__(self, "kv_cache_dtype", dtype)
        if self.kv_cache_tokens is not None and self.kv_cache_bytes is not None:
            raise ValueError("give kv_cache_tokens or kv_cache_bytes, not both")
        for name in ("kv_cache_tokens", "kv_cache_bytes", "max_batch_tokens", "max_running"):
            if getattr(self, name) is not None:
                self._check_at_least_1(name)
        if self.prefix_host_bytes:
            self._check_at_least_1("prefix_host_bytes")
            if not self.prefix_caching:
                raise ValueError(
                    f"prefix_host_bytes={self.prefix_host_bytes}: has no use with "
                    "prefix_caching=False"
                )

        if self.compile is True:
            object.__setattr__(self, "compile", CompileConfig())
        if self.compile is not False and not isinstance(self.compile, CompileConfig):
            raise ValueError(f"compile={self.compile!r}: must be True, False or a CompileConfig")
        if self.compile_cache is not None:
            if not isinstance(self.compile_cache, str | Path) or Path(self.compile_cache).is_file():
                raise ValueError(f"compile_cache={self.compile_cache!r}: must be a folder")
            if not self.compile:
                raise ValueError(
                    f"compile_cache={self.compile_cache!r}: has no use without compile"
                )
        for name in ("batch_invariant", "kv_cache_hot_tokens"):
            if self.compile and getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)}: not for a compiled model")

    def check(self, config: GLM53Config, dtype: torch.dtype, *, mtp: bool) -> None:
        """ValueError where they do not go with a model of this dtype."""
        self._cache_tokens(config, dtype, mtp)
        check_hot_tokens(self.kv_cache_hot_tokens, config)

    def required_bytes(
        self, config: GLM53Config, dtype: torch.dtype, device: torch.device, *, mtp: bool
    ) -> dict[str, int]:
        """Bytes on `device`, by what they are for. MemoryError if the host's part does not fit.

        A cache without a size counts as one page: it takes what the weights leave.
        """
        on_device, on_host = cache_bytes(
            config,
            self.cache_dtype(dtype),
            self._cache_tokens(config, dtype, mtp) or PAGE_SIZE,
            hot_tokens=self.kv_cache_hot_tokens,
            mtp=mtp,
        )
        host_bytes = {"cache": on_host, "prefix_host_bytes": self.prefix_host_bytes or 0}
        if device.type == "cpu":
            return host_bytes | {"cache": on_device + on_host}
        check_fits(host_bytes, "cpu")
        return {"cache": on_device}

    def make_cache(self, network: Transformer) -> KVCache:
        """The cache of a network, which is as it will be used. MemoryError if no page fits."""
        mtp = network.mtp_layer_idx is not None
        tokens = self._cache_tokens(network.config, network.dtype, mtp)
        if tokens is None:
            tokens = self._default_cache_tokens(network, mtp)
        return KVCache(
            network.config,
            tokens // PAGE_SIZE,
            mtp=mtp,
            dtype=self.cache_dtype(network.dtype),
            device=network.device,
            hot_tokens=self.kv_cache_hot_tokens,
        )

    @torch.inference_mode()
    def compile_network(
        self, network: Transformer, cache: KVCache, *, progress: bool
    ) -> CompiledNetwork | None:
        """The network compiled for all its entries and batch sizes; None without `compile`."""
        if not isinstance(self.compile, CompileConfig):
            return None
        compiled = CompiledNetwork(network, self.compile)
        with (
            inductor_cache(self.compile_cache, network.config, network.device),
            tqdm(total=compiled.num_graphs, desc="Compiling", disable=not progress) as bar,
        ):
            for entry in compiled.warm_up(cache):
                bar.set_postfix_str(entry)
                bar.update()
        return compiled

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the cache of a model of this dtype."""
        if self.kv_cache_dtype is not None:
            assert isinstance(self.kv_cache_dtype, torch.dtype)
            return self.kv_cache_dtype
        return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

    def _cache_tokens(self, config: GLM53Config, dtype: torch.dtype, mtp: bool) -> int | None:
        """Tokens of the cache that the caller asked for, whole pages; None without a wish."""
        name, asked = "kv_cache_tokens", self.kv_cache_tokens
        if self.kv_cache_bytes is not None:
            token_bytes = bytes_per_token(config, self.cache_dtype(dtype), mtp=mtp)
            name, asked = "kv_cache_bytes", self.kv_cache_bytes // token_bytes
        if asked is None:
            return None
        if asked < PAGE_SIZE:
            raise ValueError(
                f"{name}={getattr(self, name)}: holds {asked} tokens, a page has {PAGE_SIZE}"
            )
        return asked // PAGE_SIZE * PAGE_SIZE

    def _default_cache_tokens(self, network: Transformer, mtp: bool) -> int:
        device_room, host_room = (
            int(_DEFAULT_MEMORY_SHARE.get(device.type, 0.25) * available_bytes(device))
            for device in (network.device, torch.device("cpu"))
        )
        tokens = fitting_tokens(
            network.config,
            self.cache_dtype(network.dtype),
            device_room,
            None if network.device.type == "cpu" else host_room,
            hot_tokens=self.kv_cache_hot_tokens,
            mtp=mtp,
        )
        if tokens < PAGE_SIZE:
            raise MemoryError(
                f"a cache page does not fit: {network.device} has "
                f"{available_bytes(network.device)} bytes free, of which a cache may take "
                f"{device_room}"
            )
        return min(_DEFAULT_CONTEXTS * network.config.max_position_embeddings, tokens)

    def _check_at_least_1(self, name: str) -> None:
        value = getattr(self, name)
        try:
            number = 0 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = 0
        if number < 1:
            raise ValueError(f"{name}={value!r}: must be an integer, at least 1")
