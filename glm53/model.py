"""The GLM-5.x network, in reading order: norm, rope, indexer, attention, MLP, MoE, layer, MTP.

Names of modules and parameters are those of Hugging Face checkpoints of `GlmMoeDsaForCausalLM`,
except that the experts of a layer are stacked (`mlp.experts.gate_up_proj`, `.down_proj`, as in
transformers). Nothing here knows of ranks, compilation or files; positions, lengths and block
tables arrive as tensors in a `Batch`.

One code path serves cached and uncached forwards: attention always runs in the absorbed form over
the rows that the indexer selected; without a cache those rows are the ones just computed.

Shape suffixes (docs/shapes.md): T tokens, D hidden, H heads, N nope head dim, R rope head dim,
V value head dim, Q q_lora_rank, C kv_lora_rank, J index heads, G index head dim, L selected
positions, X cache row (C + R), Y query head (N + R), M rows of a key tensor, E experts, K experts
per token, F expert intermediate, B requests, S sequence, W vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm53.batch import Batch, Selection, Trace
from glm53.cache import KVCache, LayerCache
from glm53.config import GLM53Config
from glm53.ops import (
    cache_write,
    index_select,
    logical_to_physical,
    no_autocast,
    routed_experts,
    sparse_mla,
)

INDEX_KEY_NORM_EPS = 1e-6  # a LayerNorm of its own in every implementation, not rms_norm_eps


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the mean in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class ResidualRMSNorm(RMSNorm):
    """Adds what the previous block owes to the residual stream, then normalises.

    reduce: makes the whole of what is owed where a block computes but a part; None: it is whole.
    """

    reduce: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = x
        else:
            residual = residual + (x if self.reduce is None else self.reduce(x))
        return super().forward(residual), residual


def rope_table(positions_T: Tensor, config: GLM53Config) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] in fp32; angles in fp32 also at positions near a million."""
    exponents = torch.arange(0, config.qk_rope_head_dim, 2, device=positions_T.device).float()
    inv_freq = 1.0 / (config.rope_theta ** (exponents / config.qk_rope_head_dim))
    angles = positions_T[:, None].float() * inv_freq
    return angles.cos(), angles.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """Rotate pairs of the last dim: (2j, 2j + 1) if interleave, else (j, j + R / 2).

    Results stay where their inputs were. transformers writes the interleaved result
    de-interleaved; dot products of two rotated vectors are the same.
    """
    if interleave:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    else:
        x1, x2 = x.chunk(2, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return rotated.to(x.dtype)


class Indexer(nn.Module):
    """Lightning indexer: chooses index_topk positions for every row of its index group."""

    def __init__(self, config: GLM53Config) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=INDEX_KEY_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.weight_scale = heads**-0.5 * dim**-0.5

    def _rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first R of the G dims."""
        rotary_dim = self.config.qk_rope_head_dim
        rotated = rope(x[..., :rotary_dim], cos, sin, self.config.indexer_rope_interleave)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

    @torch.no_grad()
    def forward(
        self,
        x_TD: Tensor,
        q_latent_TQ: Tensor,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        cache: LayerCache | None,
    ) -> Tensor:
        """Logical selection [T, L] of the layer input x_TD and the *normed* q latent."""
        cos, sin = table
        k_norm = self.k_norm
        keys_TG = F.layer_norm(
            self.wk(x_TD).float(),
            k_norm.normalized_shape,
            k_norm.weight.float(),
            k_norm.bias.float(),
            k_norm.eps,
        )
        keys_TG = self._rope(keys_TG, cos, sin).to(x_TD.dtype)
        if cache is not None:
            assert cache.index_keys is not None
            cache_write(keys_TG, batch.slots, cache.index_keys)
            keys_TG = cache.index_keys
        q_TJG = self.wq_b(q_latent_TQ).unflatten(-1, (self.config.index_n_heads, -1))
        q_TJG = self._rope(q_TJG, cos[:, None], sin[:, None])
        # fp32 from the projection on: rounding a head weight to bf16 reorders near ties.
        with no_autocast(x_TD):
            weights_TJ = F.linear(x_TD.float(), self.weights_proj.weight.float())
        weights_TJ = weights_TJ * self.weight_scale
        return index_select(
            q_TJG,
            weights_TJ,
            keys_TG,
            batch.block_table,
            batch.request,
            batch.lengths,
            index_topk=self.config.index_topk,
            page_size=batch.page_size,
            block_stride=batch.block_stride,
        )


class Attention(nn.Module):
    """Multi-head latent attention over the selection of its index group."""

    def __init__(self, config: GLM53Config, layer_idx: int, full: bool) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        # Later draft steps of the MTP layer take back the selection that its first step made. A
        # full layer of the main model is handed its neighbour's and must not use it.
        self.takes_selection = not full or layer_idx == config.mtp_layer
        heads = config.num_attention_heads
        latent_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        # Per head qk_nope_head_dim rows of W_UK, then v_head_dim rows of W_UV.
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config) if full else None

    def _select(
        self,
        x_TD: Tensor,
        q_latent_TQ: Tensor,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        cache: LayerCache | None,
        record: Trace | None,
        replay: Trace | None,
    ) -> Selection:
        assert self.indexer is not None
        logical_TL = self.indexer(x_TD, q_latent_TQ, table, batch, cache)
        if replay is not None and self.layer_idx in replay.selections:
            given_TL = replay.selections[self.layer_idx]
            logical_TL = torch.where(given_TL[:, :1] < 0, logical_TL, given_TL)
        if record is not None:
            record.selections[self.layer_idx] = logical_TL
        physical_TL, counts_T = logical_to_physical(
            logical_TL,
            batch.block_table,
            batch.request,
            page_size=batch.page_size,
            block_stride=batch.block_stride,
        )
        return Selection(logical_TL, physical_TL, counts_T)

    def forward(
        self,
        x_TD: Tensor,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        cache: LayerCache | None,
        selection: Selection | None,
        record: Trace | None,
        replay: Trace | None,
    ) -> tuple[Tensor, Selection]:
        config = self.config
        cos, sin = table
        q_latent_TQ = self.q_a_layernorm(self.q_a_proj(x_TD))
        latent_TC, k_pe_TR = self.kv_a_proj_with_mqa(x_TD).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        k_pe_TR = rope(k_pe_TR, cos, sin, config.rope_interleave)
        rows_MX = torch.cat((self.kv_a_layernorm(latent_TC), k_pe_TR), dim=-1)
        if cache is not None:
            if cache.hot is not None and self.indexer is not None:
                cache.hot.residency.invalidate(batch.slots)  # in every layer of the group
            cache_write(rows_MX, batch.slots, cache.latent)
            rows_MX = cache.latent

        q_THY = self.q_b_proj(q_latent_TQ).unflatten(-1, (config.num_attention_heads, -1))
        q_nope_THN, q_pe_THR = q_THY.split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        q_pe_THR = rope(q_pe_THR, cos[:, None], sin[:, None], config.rope_interleave)
        w_uk_HNC, w_uv_HVC = self.kv_b_proj.weight.unflatten(
            0, (config.num_attention_heads, -1)
        ).split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        q_latent_THC = torch.einsum("thn,hnc->thc", q_nope_THN, w_uk_HNC)

        if selection is None or not self.takes_selection:
            if self.indexer is None:
                raise ValueError(
                    f"layer {self.layer_idx} shares the selection of an earlier layer and was "
                    "given none: pass the Selection that the preceding full layer returned"
                )
            selection = self._select(x_TD, q_latent_TQ, table, batch, cache, record, replay)
        assert selection.physical.shape == (x_TD.shape[0], config.index_topk), "of another group"
        q_THX = torch.cat((q_latent_THC, q_pe_THR), dim=-1)
        value_dim, scale = config.kv_lora_rank, config.softmax_scale
        if cache is None or cache.hot is None:
            out_THC, _ = sparse_mla(
                q_THX,
                rows_MX,
                selection.physical,
                selection.counts,
                value_dim=value_dim,
                scale=scale,
            )
        else:
            if self.indexer is not None:  # the layers that share the selection share the plan
                plan = cache.hot.residency.resolve(selection.physical)
                selection = replace(selection, fetch=plan)
            assert selection.fetch is not None
            out_THC, _ = cache.hot.sparse_mla(
                q_THX,
                rows_MX,
                selection.fetch,
                selection.counts,
                value_dim=value_dim,
                scale=scale,
            )
        out_THV = torch.einsum("thc,hvc->thv", out_THC, w_uv_HVC)
        return self.o_proj(out_THV.flatten(1)), selection


class MLP(nn.Module):
    """Gated SiLU feed-forward: the dense layers, and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid router: chosen by score + bias, weighted by the score alone, all in fp32."""

    def __init__(self, config: GLM53Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Buffer(
            torch.zeros(config.n_routed_experts, dtype=torch.float32)
        )
        nn.init.normal_(self.weight, std=config.initializer_range)

    def _apply(self, fn, recurse=True):
        # The bias spreads over a few bf16 steps around an offset: no cast of the model touches it.
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if moved.dtype != torch.float32:
            self.e_score_correction_bias = (
                torch.empty_like(bias, device=moved.device)
                if bias.is_meta
                else bias.to(moved.device)
            )
        return self

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Expert ids [T, K]: best topk_group groups, then best experts; ties to the lowest id."""
        config = self.config
        choice_TE = scores_TE + self.e_score_correction_bias
        if config.n_group > 1:
            grouped = choice_TE.unflatten(-1, (config.n_group, -1))
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            ranked = group_scores.sort(dim=-1, descending=True, stable=True).indices
            dropped = torch.ones_like(group_scores, dtype=torch.bool)
            dropped = dropped.scatter(-1, ranked[:, : config.topk_group], False)
            choice_TE = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        ranked_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices
        return ranked_TE[:, : config.num_experts_per_tok]

    def forward(self, x_TD: Tensor, ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] (those given, in rows that are not -1) and their fp32 weights."""
        with no_autocast(x_TD):
            scores_TE = F.linear(x_TD.float(), self.weight.float()).sigmoid()
        chosen_TK = self.choose(scores_TE.detach())
        ids_TK = chosen_TK if ids_TK is None else torch.where(ids_TK[:, :1] < 0, chosen_TK, ids_TK)
        weights_TK = scores_TE.gather(-1, ids_TK)
        if self.config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * self.config.routed_scaling_factor


class Experts(nn.Module):
    """Routed experts, stacked."""

    def __init__(self, config: GLM53Config) -> None:
        super().__init__()
        experts, hidden = config.n_routed_experts, config.hidden_size
        intermediate = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        nn.init.normal_(self.gate_up_proj, std=config.initializer_range)
        nn.init.normal_(self.down_proj, std=config.initializer_range)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return routed_experts(x_TD, self.gate_up_proj, self.down_proj, ids_TK, weights_TK)


class MoE(nn.Module):
    """Routed experts plus the shared expert, which is not scaled."""

    def __init__(self, config: GLM53Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        )

    def forward(self, x_TD: Tensor, record: Trace | None, replay: Trace | None) -> Tensor:
        given = None if replay is None else replay.experts.get(self.layer_idx)
        ids_TK, weights_TK = self.gate(x_TD, given)
        if record is not None:
            record.experts[self.layer_idx] = ids_TK
        return self.experts(x_TD, ids_TK, weights_TK) + self.shared_experts(x_TD)


class DecoderLayer(nn.Module):
    """Attention and feed-forward; the sum each of them owes is added by the next norm."""

    def __init__(self, config: GLM53Config, layer_idx: int, *, full: bool, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_idx, full)
        self.post_attention_layernorm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MoE(config, layer_idx) if sparse else MLP(config.hidden_size, config.intermediate_size)
        )

    def forward(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        cache: LayerCache | None = None,
        selection: Selection | None = None,
        record: Trace | None = None,
        replay: Trace | None = None,
    ) -> tuple[Tensor, Tensor, Selection]:
        """Returns what the layer owes, the residual stream, and the selection for the next layer.

        residual_TD None: x_TD is itself the stream. selection: what the layer before returned;
        required by shared layers, not used by full ones (except by the MTP layer, see `draft`).
        """
        x_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        x_TD, used = self.self_attn(x_TD, table, batch, cache, selection, record, replay)
        x_TD, stream_TD = self.post_attention_layernorm(x_TD, stream_TD)
        if isinstance(self.mlp, MoE):
            x_TD = self.mlp(x_TD, record, replay)
        else:
            x_TD = self.mlp(x_TD)
        return x_TD, stream_TD, used


class SharedHead(nn.Module):
    """The MTP layer's output norm; its head and embedding are the model's own."""

    def __init__(self, config: GLM53Config) -> None:
        super().__init__()
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """Multi-token prediction: a full MoE layer that drafts the token after next."""

    def __init__(self, config: GLM53Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx, full=True, sparse=True)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def draft(
        self,
        embeddings_TD: Tensor,
        hidden_TD: Tensor,
        table: tuple[Tensor, Tensor],
        batch: Batch,
        cache: LayerCache | None = None,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """Post-norm hidden state [T, D] (for the head, and to feed the next draft step).

        embeddings_TD: of the token after each row's; hidden_TD: post-norm hidden state of the row.
        selection: of the first draft step, for the same rows, to be used instead of a new one.
        """
        embeddings_TD = embeddings_TD.masked_fill((batch.positions == 0)[:, None], 0)
        x_TD = self.eh_proj(torch.cat((self.enorm(embeddings_TD), self.hnorm(hidden_TD)), dim=-1))
        x_TD, stream_TD, used = self(x_TD, None, table, batch, cache, selection)
        return self.shared_head.norm(x_TD, stream_TD)[0], used


class Decoder(nn.Module):
    """Embedding, layers (the MTP layer, if any, comes last) and final norm."""

    def __init__(self, config: GLM53Config, mtp: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, full=config.is_full(i), sparse=config.is_sparse(i))
            for i in range(config.num_hidden_layers)
        )
        if mtp:
            self.layers.append(MTPLayer(config, config.num_hidden_layers))
        self.norm = ResidualRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        batch: Batch,
        cache: KVCache | None = None,
        record: Trace | None = None,
        replay: Trace | None = None,
    ) -> Tensor:
        """Final-norm hidden states [T, D]. ValueError if replay does not fit the batch."""
        if replay is not None:
            if not isinstance(replay, Trace):
                raise ValueError(f"replay={replay!r}: must be a Trace")
            replay.check(batch, self.config)
        table = rope_table(batch.positions, self.config)
        x_TD, residual_TD, selection = self.embed_tokens(batch.input_ids), None, None
        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            layer_cache = None if cache is None else cache.layers[i]
            x_TD, residual_TD, selection = layer(
                x_TD, residual_TD, table, batch, layer_cache, selection, record, replay
            )
        return self.norm(x_TD, residual_TD)[0]


class Transformer(nn.Module):
    """The causal language model. Built on any device, also `meta`."""

    def __init__(self, config: GLM53Config, *, mtp: bool | None = None) -> None:
        """mtp: build the MTP layer; None means if the config has one."""
        super().__init__()
        self.config = config
        self.mtp_layer_idx = (
            config.mtp_layer if mtp is None or (mtp and config.mtp_layer is not None) else None
        )
        self.model = Decoder(config, mtp=self.mtp_layer_idx is not None)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def draft(
        self,
        next_ids_T: Tensor,
        hidden_TD: Tensor,
        batch: Batch,
        cache: KVCache | None = None,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """One MTP step: hidden state [T, D] from which `lm_head` predicts the token after
        next_ids_T [T] (row t: the token that follows row t), and the MTP layer's selection."""
        if self.mtp_layer_idx is None:
            raise ValueError("this checkpoint has no MTP layer: num_nextn_predict_layers is 0")
        layer = self.model.layers[self.mtp_layer_idx]
        assert isinstance(layer, MTPLayer)
        return layer.draft(
            self.model.embed_tokens(next_ids_T),
            hidden_TD,
            rope_table(batch.positions, self.config),
            batch,
            None if cache is None else cache.layers[self.mtp_layer_idx],
            selection,
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        *,
        record: Trace | None = None,
        replay: Trace | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, S, W] of a dense batch, without a cache; differentiable.

        attention_mask [B, S]: 1 for tokens, 0 for padding on either side (padding rows get logits
        0). logits_to_keep: only the last so many positions, 0 for all. labels [B, S], integers:
        also return the loss, as (loss, logits): mean cross entropy in fp32 of labels[:, 1:] given
        the tokens before; -100 is ignored, and so is a label that is masked out or whose position
        before is (NaN if nothing is left). record / replay: see Trace; rows are the unmasked
        tokens in order. ValueError, naming the argument, for a wrong shape or value.
        """
        _check_inputs(input_ids, attention_mask, labels, logits_to_keep, self.config)
        batch = Batch.uncached(input_ids, attention_mask)
        hidden_TD = self.model(batch, record=record, replay=replay)
        if attention_mask is None:
            hidden_BSD = hidden_TD.view(*input_ids.shape, -1)
        else:
            hidden_BSD = hidden_TD.new_zeros(*input_ids.shape, hidden_TD.shape[-1])
            hidden_BSD[attention_mask.to(input_ids.device).bool()] = hidden_TD
        if labels is None:
            return self.lm_head(hidden_BSD[:, -logits_to_keep:])
        logits_BSW = self.lm_head(hidden_BSD)
        targets_BS = labels[:, 1:].to(logits_BSW.device, torch.int64)
        if attention_mask is not None:
            mask_BS = attention_mask.to(logits_BSW.device).bool()
            targets_BS = targets_BS.masked_fill(~(mask_BS[:, 1:] & mask_BS[:, :-1]), -100)
        loss = F.cross_entropy(logits_BSW[:, :-1].flatten(0, 1).float(), targets_BS.flatten())
        return loss, logits_BSW[:, -logits_to_keep:]


def _check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    logits_to_keep: int,
    config: GLM53Config,
) -> None:
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be a non-empty [B, S], got {tuple(input_ids.shape)}")
    if input_ids.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} positions, the model's limit "
            f"(max_position_embeddings) is {config.max_position_embeddings}"
        )
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids {tuple(input_ids.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be 0 (all) or a count, got {logits_to_keep}")
    if labels is not None and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise ValueError(f"labels must be token ids (integers), got {labels.dtype}")
    # An additive mask (0 for tokens, -inf for padding) would be understood the other way round.
    if attention_mask is not None and not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError(
            "attention_mask must hold 1 for tokens and 0 for padding and nothing else, got values "
            f"from {attention_mask.min().item()} to {attention_mask.max().item()}"
        )
