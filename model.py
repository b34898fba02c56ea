"""
A compact GPT whose residual connection can be swapped.

The transformer is Qwen3-style: RMSNorm, rotary positions, grouped-query attention with
per-head q/k norm, SwiGLU, tied embeddings, no biases, no dropout.

In a standard transformer each sublayer reads the running sum of all earlier outputs. Here
it reads from a *stream*, an object with two methods,

    x = stream.read()       what the next sublayer consumes, divided by its RMS     B T D
    stream.append(y)        hand over a sublayer's output                           B T D

so GPT.forward is one loop for every residual mode:

    standard   x = x + f(norm(x))
    attnres    every read is a softmax-weighted mix of all earlier outputs
               (Attention Residuals, Kimi Team, arXiv:2603.15031)
    mhar       the same with one softmax per feature subspace, H heads, no extra parameter
               (Multi-Head Attention Residuals, Luo, Cai, Hu, 2026); H = 1 is attnres
    delta      the running sum and, through a gate that starts closed, such a mix: what turns a trained
               standard model into a routed one (delta attention residuals, Luo, 2026)
    hyper      four running sums with learned weights (Hyper-Connections, Zhu et al., arXiv:2409.19606)

Symbols: B batch, T sequence length, D model width, L blocks, H routing heads. A *source* is
the embedding or a sublayer's raw output (in delta, a sum of some); a *site* is a place that
reads: before each of the 2L sublayers, and once more before the head. So there are 2L + 1 of each
(in delta 2L sites, and as many sources as groups).
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from routing_kernel import DepthHistory, GroupHistory, inverse_rms, rms_norm, upcast


@dataclass
class GPTConfig:
    vocab_size: int = 50304         # GPT-2's 50,257 padded to a multiple of 64
    block_size: int = 2048          # T, the longest sequence
    n_layer: int = 12               # L
    n_embd: int = 512               # D
    n_head: int = 8                 # attention heads
    n_kv_head: int = 4              # key/value heads, shared by n_head // n_kv_head query heads each
    d_ff: int = 1536                # hidden width of the MLP
    residual: str = 'mhar'          # standard | attnres | mhar | delta | hyper: a key of STREAMS
    n_route_head: int = 0           # H; 0 takes the mode's own: 8 for mhar and delta, 1 for attnres
    route_scale: float = 1.0        # factor on the routing logits
    embed_scale: float = 1.0        # factor on the embedding (initially 0.02) where it enters the stream
    n_depth_group: int = 8          # delta: groups of ceil(L / n_depth_group) blocks, each one source
    routing: str = 'auto'           # auto | triton | pytorch: which code computes the reads
    norm_eps: float = 1e-6
    rope_theta: float = 1e4

    def __post_init__(self):
        """Raises ValueError for shapes that cannot be built, naming the numbers."""
        if self.residual not in STREAMS:
            raise ValueError(f'residual={self.residual!r} is not one of {", ".join(STREAMS)}')
        if self.residual == 'attnres' and self.n_route_head not in (0, 1):
            raise ValueError(f'attnres has one routing head, not n_route_head={self.n_route_head}; use mhar')
        self.n_route_head = self.n_route_head or (8 if self.residual in ('mhar', 'delta') else 1)
        if self.n_depth_group < 1:
            raise ValueError(f'n_depth_group={self.n_depth_group} must be at least 1')
        for name, whole, part in (('n_embd', self.n_embd, self.n_route_head), ('n_embd', self.n_embd, 2 * self.n_head),
                                  ('n_head', self.n_head, self.n_kv_head)):
            if part < 1 or whole % part:
                raise ValueError(f'{name}={whole} must be a multiple of {part}: n_route_head={self.n_route_head}, '
                                 f'n_head={self.n_head} (even head width), n_kv_head={self.n_kv_head}')


# ---- streams: the residual modes. A new one needs parameters(), read() and append(), and a line in STREAMS.

class RunningSum:
    """standard: every read is the sum of the embedding and all outputs so far."""

    one_graph = True            # plain PyTorch: the model compiles as one graph. Without it, sublayer by sublayer

    @staticmethod
    def parameters(config):
        """name -> initial value of what this stream learns; train.py does not decay these."""
        return {}

    def __init__(self, x, p, config):
        self.x, self.eps = x, config.norm_eps                       # B T D

    def read(self):
        return rms_norm(self.x, self.eps)

    def append(self, y):
        self.x = self.x + y


class DepthAttention:
    """attnres, mhar: every read attends over the depth history, one softmax per routing head."""

    @staticmethod
    def parameters(config):
        shape = 2 * config.n_layer + 1, config.n_embd               # S D
        return {'query': torch.zeros(shape), 'gain': torch.ones(shape)}     # zero query: the read is a plain mean

    def __init__(self, x, p, config):
        # The key norm's gain only ever multiplies the query, so one effective query serves both.
        query = p['query'] * p['gain'] * config.route_scale         # S D
        self.history = DepthHistory(query, config.n_route_head, config.norm_eps, config.routing)
        self.y, self.site = x, -1                                   # the newest source

    def sources(self):
        """What the latest site has read from, for who wants to look: a list of B T D."""
        return self.history.sources

    def read(self):
        self.site += 1
        return self.history.read(self.y, norm=True)

    def append(self, y):
        self.y = y


class NextSite(torch.autograd.Function):
    """
    What a delta site does besides attending, by the two halves that its stream has. The norm's gradient is made of
    its result, so that neither the sum nor what was added to it must be kept. No second derivatives.
    """

    @staticmethod
    def forward(ctx, stream, x, y, out):
        x, h, r = stream.site_forward(x, y, out, stream.eps)
        ctx.site_backward = stream.site_backward
        ctx.save_for_backward(h, r)
        return x, h

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, dh):
        dx, ds = ctx.site_backward(dx, dh, *ctx.saved_tensors)
        return tuple(d if needed else None for d, needed in zip((None, dx, dx, ds), ctx.needs_input_grad))


class GatedDepthAttention:
    """
    delta: h = x + alpha_s * out_s;  y = f(norm(h));  x = x + y.  out_s attends over a learned null source, the
    embedding and the finished groups of blocks, each the sum of its sublayers' outputs; the unfinished group
    enters only through x. No read before the head. alpha starts at zero, so it alone has a gradient at first.
    """

    @staticmethod
    def parameters(config):
        shape = 2 * config.n_layer, config.n_embd                   # S D
        return {'query': torch.zeros(shape), 'gain': torch.ones(shape), 'null': torch.zeros(shape),
                'alpha': torch.zeros(shape[0])}

    # Functions of tensors alone, so that they can be compiled: each row then moves once.
    parts = 'site_forward', 'site_backward', 'next_group'

    @staticmethod
    def site_forward(x, y, out, eps):
        """The sum after output y, rms_norm of this plus out, and 1 / RMS. y and out may be None."""
        x = x if y is None else x + y
        s = upcast(x) if out is None else upcast(x) + out           # with out = 0 a site of the standard model
        r = inverse_rms(s, eps)[..., None]
        return x, (s * r).to(x.dtype), r

    @staticmethod
    def site_backward(dx, dh, h, r):
        """The gradients of x (and y) and of out."""
        ds = (r * (dh - h * (upcast(dh) * h).mean(-1, keepdim=True))).to(h.dtype)
        return dx + ds, ds

    @staticmethod
    def next_group(x, y, start, eps):
        """The sum after output y, the last of a group; what the group has added since start: a source; its 1 / RMS."""
        x = x + y
        return x, x - start, inverse_rms(x - start, eps)

    def __init__(self, x, p, config):
        size = 2 * -(-config.n_layer // config.n_depth_group)       # sublayers of a group; the last may be short
        query = p['query'] * p['gain'] * config.route_scale
        self.history = GroupHistory(query, p['null'], p['alpha'], size, config.n_route_head, config.norm_eps,
                                    config.routing)
        self.x, self.y, self.site, self.eps = x, None, -1, config.norm_eps
        self.start = x                                              # the sum at the last group's start

    def sources(self):
        """What the latest site has attended over, a list of B T D."""
        return [self.history.null[self.site].to(self.x.dtype).expand_as(self.x), *self.history.sources]

    def read(self):
        self.site += 1
        out = None
        if self.site < len(self.history.query):
            if self.site == 0:
                self.outs = self.history.read(self.x)
            elif self.site % self.history.size == 0:
                self.x, source, r = self.next_group(self.x, self.y, self.start, self.eps)
                self.outs, self.start, self.y = self.history.read(source, r), self.x, None
            out = self.outs[self.site % self.history.size]
        self.x, h = NextSite.apply(self, self.x, self.y, out)
        return h

    def append(self, y):
        self.y = y                                                  # added by the next read, where it is in registers


class HyperConnections:
    """
    hyper: n = 4 running sums. A sublayer reads a weighted sum of them; then they are mixed, and each adds the
    output times a weight of its own: static hyper-connections. The initial weights make n equal streams, and
    their sum, n times the standard one, is the same to the last norm, up to its eps. (The fourth method in the
    tables of Multi-Head Attention Residuals is a weaker form: softmax reads, each output written to one
    stream, the mean at the end.)
    """

    one_graph = True

    @staticmethod
    def parameters(config):
        S, eye = 2 * config.n_layer, torch.eye(4)                   # site s first reads stream s mod n
        return {'read': eye[torch.arange(S) % 4], 'mix': eye.repeat(S, 1, 1), 'write': torch.ones(S, 4)}

    def __init__(self, x, p, config):
        self.x = torch.stack([x] * 4, dim=-2)                       # B T n D
        self.sites, self.site, self.eps = list(zip(p['read'], p['mix'], p['write'])), -1, config.norm_eps

    def read(self):
        self.site += 1
        x = upcast(self.x)
        if self.site < len(self.sites):
            x = x * self.sites[self.site][0][:, None]
        return rms_norm(x.sum(-2).to(self.x.dtype), self.eps)

    def append(self, y):
        _, mix, write = self.sites[self.site]
        x = (mix[:, :, None] * upcast(self.x)[..., None, :, :]).sum(-2)
        self.x = (x + write[:, None] * upcast(y)[..., None, :]).to(y.dtype)         # rounded once


STREAMS = {'standard': RunningSum, 'attnres': DepthAttention, 'mhar': DepthAttention, 'delta': GatedDepthAttention,
           'hyper': HyperConnections}


# ---- the transformer

def compute_dtype(weight):
    """The dtype of activations: autocast's where it is on, else that of the weights."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class Embedding(nn.Embedding):
    """Cast once, so that the stream and every source have one dtype (autocast leaves embeddings in fp32)."""

    def __init__(self, config):
        super().__init__(config.vocab_size, config.n_embd)
        self.scale = config.embed_scale

    def forward(self, idx):
        return (super().forward(idx) * self.scale).to(compute_dtype(self.weight))   # B T D


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return (rms_norm(upcast(x), self.eps) * self.weight).to(x.dtype)


class GainLinear(nn.Linear):
    """
    A linear map with the gain of the norm before it: W (gain * x) = (W * gain) x. In training the gain scales W, where
    it rides along with the conversion to 16 bits, and where its gradient sums over weights instead of positions.
    """

    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out, bias=False)
        self.gain = nn.Parameter(torch.ones(n_in))

    def forward(self, x):
        if torch.is_grad_enabled():
            return F.linear(x, self.weight * self.gain)
        return F.linear(x * self.gain, self.weight)


def rotate(x, cos, sin):
    """Rotary position embedding: x is B heads T hd, cos and sin are T hd/2. Keeps x's dtype."""
    a, b = upcast(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.widths = [n * self.head_dim for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.qkv = GainLinear(config.n_embd, sum(self.widths))
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin, cache=None):
        q, k, v = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))     # B heads T hd
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v, mask = cache.extend(k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))              # B T D


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = GainLinear(config.n_embd, 2 * config.d_ff)        # gate and value in one matrix
        self.down = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)


class Head(nn.Module):
    """Logits and loss in one module, so that compiled they never hold the logits in fp32."""

    def __init__(self, config):
        super().__init__()
        self.linear = GainLinear(config.n_embd, config.vocab_size)

    def forward(self, x, targets=None):
        logits = self.linear(x)                          # B T V
        return logits if targets is None else F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten())


class KVCache:
    """
    Keys and values of the positions seen so far, one (k, v) pair per block, in buffers of fixed
    size with the position on the device: a decode step is the same kernels at every position, so
    a CUDA graph can replay it.
    """

    def __init__(self, model, batch_size):
        c, weight = model.config, model.embed.weight
        self.dtype, self.device = compute_dtype(weight), weight.device
        self.shape = batch_size, c.n_kv_head, c.block_size, c.n_embd // c.n_head
        self.kv = [[torch.zeros(self.shape, dtype=self.dtype, device=self.device) for _ in 'kv'] for _ in model.blocks]
        self.start = torch.zeros((), dtype=torch.long, device=self.device)      # positions already filled

    def positions(self, length):
        """Positions of the next `length` tokens; also says which keys each of them may see."""
        at = self.start + torch.arange(length, device=self.device)
        self.at, self.layer = at, iter(self.kv)
        self.mask = torch.arange(self.shape[2], device=self.device) <= at[:, None]      # length T
        return at

    def extend(self, k, v):
        cached = next(self.layer)
        for buffer, new in zip(cached, (k, v)):
            buffer.index_copy_(2, self.at, new.to(self.dtype))
        return *cached, self.mask


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.stream_class = STREAMS[config.residual]        # replace it to watch or change what is read
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = Head(config)
        self.head.linear.weight = self.embed.weight
        self.stream = nn.ParameterDict(self.stream_class.parameters(config))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Gains 1, the stream's parameters as their class says, every matrix N(0, 0.02)."""
        stream = self.stream_class.parameters(self.config)
        for name, p in self.named_parameters():
            if name.startswith('stream.'):
                p.copy_(stream[name.removeprefix('stream.')])
            elif p.ndim == 1:
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02)
        half = self.config.n_embd // self.config.n_head // 2
        inv_freq = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(self.config.block_size, dtype=torch.float64)[:, None] * inv_freq       # T hd/2
        self.register_buffer('cos', angle.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer('sin', angle.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, idx, targets=None, cache=None):
        """
        idx, targets: int64 token ids, B T, T at most block_size; cache: a KVCache that holds the
        positions before idx, or None. Returns the mean loss in nats if targets are given, else
        the logits, B T vocab_size. Raises ValueError for a sequence longer than block_size.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f'sequence of {T} tokens is longer than block_size={self.config.block_size}')
        at = slice(T) if cache is None else cache.positions(T)
        cos, sin = self.cos[at], self.sin[at]                       # T hd/2

        stream = self.stream_class(self.embed(idx), self.stream, self.config)
        for block in self.blocks:
            stream.append(block.attn(stream.read(), cos, sin, cache))
            stream.append(block.mlp(stream.read()))
        out = self.head(stream.read(), targets)

        if cache is not None:
            cache.start += T
        return out

    def compile_parts(self):
        """
        Compile in place, so that parameter names stay as they are. Plain PyTorch compiles best as one graph;
        a depth history reads between the sublayers, so these compile one by one.
        """
        stream = self.stream_class
        if getattr(stream, 'one_graph', False):
            return self.compile()
        for part in [self.embed, *(m for block in self.blocks for m in block.children()), self.head]:
            part.compile()
        compiled = {name: staticmethod(torch.compile(getattr(stream, name))) for name in getattr(stream, 'parts', ())}
        if compiled:
            self.stream_class = type(stream.__name__, (stream,), compiled)
