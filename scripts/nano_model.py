"""The network of the embedded model as it is trained: HF parameter names, dense causal attention.

The library is inference only, so this file holds the training forward: expanded attention in blocks
of queries, losses of the multi-token-prediction layer, and the indexer's KL loss against the
attention distribution (DeepSeek-V3.2 report: dense warm-up, then sparse). Parameter names and
shapes are those of `glm53.model.Transformer`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, VOCAB, LAYERS, DENSE_LAYERS = 256, 4096, 8, 3
HEADS, NOPE, ROPE, VALUE = 4, 32, 32, 64
Q_LORA, KV_LORA = 128, 128
DENSE_FF, EXPERT_FF, EXPERTS, TOP_EXPERTS, ROUTED_SCALING = 512, 128, 8, 2, 2.5
INDEX_HEADS, INDEX_DIM, INDEX_TOPK = 16, 128, 64
MAX_POSITIONS, EPS, LATENT_EPS = 2048, 1e-5, 1e-6
# Wavelengths of 16 frequencies must resolve 1..2048 positions; 8e6 would spend half of them beyond.
ROPE_THETA = 1e4
INDEXER_TYPES = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
QUERY_BLOCK = 128


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x in fp32, and its RMS norm in x's dtype."""
    total = residual + x.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return total, (normed * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary embedding of `[B, S, heads, ROPE]`; the output is [firsts | seconds]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    first, second = pairs.unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope_tables(positions: Tensor) -> tuple[Tensor, Tensor]:
    frequency = ROPE_THETA ** -(torch.arange(0, ROPE, 2).float() / ROPE)
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, and the argmax of every row.

    The gradient is formed with the loss, a block of rows at a time: fp32 logits of a whole
    micro-batch would cross the memory bus five times.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head, count = weight.to(hidden.dtype), hidden.shape[0]
        grads = hidden.new_empty(count, weight.shape[0])
        loss, choice = torch.zeros(()), torch.empty_like(targets)
        for start in range(0, count, QUERY_BLOCK):
            rows = slice(start, start + QUERY_BLOCK)
            logits = (hidden[rows] @ head.t()).float()
            choice[rows] = logits.argmax(-1)
            log_p, target = logits.log_softmax(-1), targets[rows, None]
            loss -= log_p.gather(1, target).sum()
            grad = log_p.exp_()
            grad.scatter_add_(1, target, torch.full(target.shape, -1.0))
            grads[rows] = grad
        ctx.save_for_backward(grads @ head, (grads.t() @ hidden).float())
        ctx.count = count
        ctx.mark_non_differentiable(choice)
        return loss / count, choice

    @staticmethod
    def backward(ctx, grad: Tensor, _choice: Tensor):
        to_hidden, to_weight = ctx.saved_tensors
        scale = grad / ctx.count
        return to_hidden * scale.to(to_hidden.dtype), to_weight * scale, None


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, gain: float = 0.6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float = EPS):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k `[B, H, S, 64]`, v `[B, H, S, V]`, mask additive `[B, S, S]` or None (causal).

    Blocks of queries see only the keys up to their end: half of the S x S work is never done.
    """
    length, outputs = q.shape[2], []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        scores = q[:, :, start:stop] @ k[:, :, :stop].transpose(-1, -2)
        if mask is not None:
            scores = scores + mask[:, None, start:stop, :stop]
        else:
            future = torch.full((stop - start, stop - start), float("-inf"), dtype=q.dtype).triu(1)
            scores[..., start:] += future
        outputs.append(scores.softmax(-1) @ v[:, :, :stop])
    return torch.cat(outputs, 2)


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq_b = Linear(Q_LORA, INDEX_HEADS * INDEX_DIM)
        self.wk = Linear(HIDDEN, INDEX_DIM)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6)
        self.weights_proj = Linear(HIDDEN, INDEX_HEADS)

    def keys(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        k = self.k_norm(self.wk(x).float()).to(x.dtype)
        return torch.cat([rotate(k[:, :, None, :ROPE], *rope)[:, :, 0], k[..., ROPE:]], -1)

    def scores(self, x: Tensor, q_resid: Tensor, keys: Tensor, rows: Tensor, rope) -> Tensor:
        """fp32 scores `[B, len(rows), keys]` of the query rows `rows`; not masked."""
        batch, count = x.shape[0], len(rows)
        q = self.wq_b(q_resid[:, rows]).view(batch, count, INDEX_HEADS, INDEX_DIM)
        q = torch.cat([rotate(q[..., :ROPE], rope[0][rows], rope[1][rows]), q[..., ROPE:]], -1)
        dots = q.flatten(1, 2) @ keys.transpose(-1, -2)
        dots = F.relu(dots).view(batch, count, INDEX_HEADS, -1)
        weights = self.weights_proj(x[:, rows].float()) * (INDEX_HEADS * INDEX_DIM) ** -0.5
        return (dots.transpose(2, 3) @ weights.to(dots.dtype)[..., None])[..., 0].float()

    @torch.no_grad()
    def select(self, x: Tensor, q_resid: Tensor, rope) -> Tensor:
        """Additive mask `[B, S, S]`: 0 at the top INDEX_TOPK visible keys of a row, -inf else."""
        batch, length, _ = x.shape
        keys = self.keys(x, rope)
        mask = torch.full((batch, length, length), float("-inf"), dtype=x.dtype)
        for start in range(0, length, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, length)
            rows = torch.arange(start, stop)
            future = rows[:, None] < torch.arange(stop)
            scores = self.scores(x, q_resid, keys[:, :stop], rows, rope)
            scores = scores.masked_fill(future, float("-inf"))
            chosen = scores.topk(min(INDEX_TOPK, stop), -1, sorted=False).indices
            mask[:, start:stop, :stop].scatter_(-1, chosen, 0.0).masked_fill_(future, float("-inf"))
        return mask


class IndexState:
    """What a sharing group carries: its mask, scores of KL rows and the attention they chase."""

    def __init__(self, rows: Tensor | None, sparse: bool):
        self.rows, self.sparse, self.losses = rows, sparse, []
        self.mask: Tensor | None = None
        self.scores: Tensor | None = None
        self.target: Tensor | None = None

    def open_group(self, indexer: Indexer, x: Tensor, q_resid: Tensor, rope) -> None:
        self.close_group()
        x, q_resid = x.detach(), q_resid.detach()
        if self.sparse:
            self.mask = indexer.select(x, q_resid, rope)
        if self.rows is not None:
            keys = indexer.keys(x, rope)
            self.scores = indexer.scores(x, q_resid, keys, self.rows, rope)

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor) -> None:
        if self.rows is None:
            return
        dots = (q[:, :, self.rows] @ k.transpose(-1, -2)).float() + self.row_mask(k.shape[2])
        attention = dots.softmax(-1).sum(1)
        self.target = attention if self.target is None else self.target + attention

    def row_mask(self, length: int) -> Tensor:
        if self.mask is not None:
            return self.mask[:, None, self.rows].float()
        future = self.rows[:, None] < torch.arange(length)
        return torch.zeros(future.shape).masked_fill(future, float("-inf"))

    def close_group(self) -> None:
        """KL(attention, L1-normalised over heads and layers || softmax of index scores)."""
        if self.scores is not None and self.target is not None:
            target = self.target / self.target.sum(-1, keepdim=True)
            mask = self.row_mask(target.shape[-1])
            log_q = (self.scores + (mask[:, 0] if mask.dim() == 4 else mask)).log_softmax(-1)
            log_q = log_q.masked_fill(target == 0, 0.0)
            kl = (torch.xlogy(target, target) - target * log_q).sum(-1).mean()
            self.losses.append(kl)
        self.mask = self.scores = self.target = None


class Attention(nn.Module):
    def __init__(self, full: bool):
        super().__init__()
        self.q_a_proj = Linear(HIDDEN, Q_LORA)
        self.q_a_layernorm = Norm(Q_LORA, LATENT_EPS)
        self.q_b_proj = Linear(Q_LORA, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = Linear(HIDDEN, KV_LORA + ROPE)
        self.kv_a_layernorm = Norm(KV_LORA, LATENT_EPS)
        self.kv_b_proj = Linear(KV_LORA, HEADS * (NOPE + VALUE))
        self.o_proj = Linear(HEADS * VALUE, HIDDEN, gain=0.0)
        self.indexer = Indexer() if full else None

    def queries(self, x: Tensor, rope) -> tuple[Tensor, Tensor]:
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).view(*x.shape[:2], HEADS, NOPE + ROPE)
        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:], *rope)], -1) * (NOPE + ROPE) ** -0.5
        return q.transpose(1, 2), q_resid

    def keys_values(self, x: Tensor, rope) -> tuple[Tensor, Tensor]:
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([KV_LORA, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(*x.shape[:2], HEADS, NOPE + VALUE)
        k_pe = rotate(k_pe[:, :, None], *rope).expand(-1, -1, HEADS, -1)
        k = torch.cat([kv[..., :NOPE], k_pe], -1)
        return k.transpose(1, 2), kv[..., NOPE:].transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.o_proj(causal_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, rope, index: IndexState) -> Tensor:
        q, q_resid = self.queries(x, rope)
        k, v = self.keys_values(x, rope)
        if self.indexer is not None:
            index.open_group(self.indexer, x, q_resid, rope)
        index.observe(q, k)
        return self.attend(q, k, v, index.mask)


class MLP(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(HIDDEN, inner), Linear(HIDDEN, inner)
        self.down_proj = Linear(inner, HIDDEN, gain=0.0)

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype)
        return self.down_proj(swiglu(F.linear(x, fused)))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * HIDDEN**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        scale = 0.6 * HIDDEN**-0.5
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * EXPERT_FF, HIDDEN) * scale)
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, EXPERT_FF))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.shared_experts = Gate(), Experts(), MLP(EXPERT_FF)
        self.load = torch.zeros(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, 1)
        scores = F.linear(x_TD.float(), self.gate.weight).sigmoid()
        chosen = (scores.detach() + self.gate.e_score_correction_bias).topk(TOP_EXPERTS).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALING
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        self.load += counts
        rows = x_TD.index_select(0, order // TOP_EXPERTS).split(counts.tolist())
        gate_up = self.experts.gate_up_proj.to(x.dtype).unbind(0)
        down = self.experts.down_proj.to(x.dtype).unbind(0)
        inner = swiglu(torch.cat([F.linear(r, w) for r, w in zip(rows, gate_up, strict=True)]))
        parts = inner.split(counts.tolist())
        y = torch.cat([F.linear(r, w) for r, w in zip(parts, down, strict=True)])
        y = y.index_select(0, order.argsort()).view(-1, TOP_EXPERTS, HIDDEN)
        y = (y * weights[..., None].to(y.dtype)).sum(1)
        return y.view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, dense: bool, full: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn = Attention(full)
        self.mlp = MLP(DENSE_FF) if dense else MoE()

    def forward(self, residual: Tensor, x: Tensor, rope, index: IndexState):
        """`residual` fp32, `x` what the block before owes it; returns the same pair."""
        norm = self.input_layernorm
        residual, x = add_rms_norm(residual, x, norm.weight, norm.eps)
        return self.feed_forward(residual, self.self_attn(x, rope, index))

    def feed_forward(self, residual: Tensor, x: Tensor):
        norm = self.post_attention_layernorm
        residual, x = add_rms_norm(residual, x, norm.weight, norm.eps)
        return residual, self.mlp(x)


class MTPLayer(Layer):
    """Decoder layer over [enorm(embedding of t+1) | hnorm(hidden of t)]; predicts t+2."""

    def __init__(self):
        super().__init__(dense=False, full=True)
        self.enorm, self.hnorm = Norm(HIDDEN), Norm(HIDDEN)
        self.eh_proj = Linear(2 * HIDDEN, HIDDEN)
        self.shared_head = nn.ModuleDict({"norm": Norm(HIDDEN)})

    def combine(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))

    def drafts(self, hidden: Tensor, embedded: list[Tensor], index: IndexState) -> list[Tensor]:
        """Post-norm states of len(embedded) draft passes over all positions at once.

        Pass j reads the embedding of token t+1+j. Passes after the first attend to the first
        pass's keys through the first pass's selection, as engines do when the index is shared.
        """
        length, outputs = hidden.shape[1], []
        attention, norm = self.self_attn, self.input_layernorm
        keys = values = None
        for step, tokens in enumerate(embedded):
            rope = rope_tables(torch.arange(step, step + length))
            x = self.combine(tokens, hidden)
            residual = x.float()
            normed = rms_norm(x, norm.weight, norm.eps)
            q, q_resid = attention.queries(normed, rope)
            if keys is None or values is None:
                keys, values = attention.keys_values(normed, rope)
                index.open_group(attention.indexer, normed, q_resid, rope)
                index.observe(q, keys)
            x = attention.attend(q, keys, values, index.mask)
            residual, x = self.feed_forward(residual, x)
            head = self.shared_head["norm"]
            _, hidden = add_rms_norm(residual, x, head.weight, head.eps)
            outputs.append(hidden)
        index.close_group()
        return outputs


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        layers = [Layer(i < DENSE_LAYERS, kind == "full") for i, kind in enumerate(INDEXER_TYPES)]
        self.layers = nn.ModuleList([*layers, MTPLayer()])
        self.norm = Norm(HIDDEN)


class NanoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Backbone()
        self.lm_head = Linear(HIDDEN, VOCAB, gain=0.1)

    @property
    def mtp(self) -> MTPLayer:
        return self.model.layers[LAYERS]

    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.model.embed_tokens(ids).to(dtype)

    def hidden(self, ids: Tensor, index: IndexState, dtype: torch.dtype) -> Tensor:
        """Post-final-norm states `[B, S, D]`."""
        rope = rope_tables(torch.arange(ids.shape[1]))
        x = self.embed(ids, dtype)
        residual = torch.zeros(x.shape)
        for layer in self.model.layers[:LAYERS]:
            residual, x = layer(residual, x, rope, index)
        index.close_group()
        return add_rms_norm(residual, x, self.model.norm.weight, EPS)[1]

    def draft_hidden(self, hidden: Tensor, following: list[Tensor], index: IndexState):
        """`following[j]`: ids of t+1+j for every row t of `hidden`."""
        embedded = [self.embed(ids, hidden.dtype) for ids in following]
        # Engines zero the embedding of the row at position 0; train what they run.
        first = torch.ones(hidden.shape[1], 1, dtype=hidden.dtype)
        first[0] = 0
        embedded[0] = embedded[0] * first
        return self.mtp.drafts(hidden, embedded, index)
