"""
What routing computes: at every site, a softmax-weighted mix of all sources so far.

Read `route` first; it is the whole definition, the fallback, and the oracle of the tests. The
Triton kernels below it are the same lines reorganised so that few bytes move (there is almost
no arithmetic: site s reads s + 1 rows of width D for every position):

  two phases     The queries do not depend on the input. So at every eighth site one pass over
                 the finished sources starts the softmax of the next C = 8 sites (`read_group`);
                 each site then only adds the few sources born since (`read_site`).
  gather         Backward keeps the gradients of all reads. When source n's turn comes, those of all
                 later sites are known, so its gradient is one sum over them: no atomics,
                 bitwise repeatable. It has the same two shapes: `grad_group` sums over the far
                 sites for C sources at once, `grad_site` adds the few near ones.

Sites that read the same few sources (those of one group of a delta model) are simpler: one launch
serves them all, `read_shared` and `grad_shared`.

Symbols: B batch, T sequence, D width, H routing heads of width K = D / H, S sites, N sources.
"""
from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity, profile

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


# ---- the definition

def upcast(x):
    """x in fp32, or wider if it is: sums over depth and width are never taken in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x, eps=1e-6):
    """x, ... D, divided by its root mean square; computed in fp32 or wider, rounded once."""
    y = upcast(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def check_heads(n_head, D):
    if n_head < 1 or D % n_head:
        raise ValueError(f'{n_head} routing heads do not divide the width {D}')


def route_logits(query, sources, n_head, eps=1e-6):
    """
    How well one site's query matches each source.

    query (D,): the site's effective query q * g; sources: a list of N tensors ... D. Returns
    (N, ..., H) in fp32 or wider. The query is rounded to the sources' dtype first, as autocast
    rounds any weight. ValueError if H does not divide D.
    """
    check_heads(n_head, query.shape[-1])
    k = rms_norm(upcast(torch.stack(sources)), eps)                         # N ... D    over the full row, then sliced
    q = query.to(sources[0].dtype).to(k.dtype)                              # rounded as autocast rounds a weight
    return (q * k).unflatten(-1, (n_head, -1)).sum(-1)                      # N ... H    <q[h], k_n[h]>


def route_weights(query, sources, n_head, eps=1e-6):
    """The softmax over depth of the logits, (N, ..., H), summing to one over N. Arguments as in route_logits."""
    return route_logits(query, sources, n_head, eps).softmax(0)


def route(query, sources, n_head, eps=1e-6):
    """
    What one site reads: out[h] = sum_n w[n, h] * s_n[h], the values not normalised (Multi-Head
    Attention Residuals, Luo, Cai, Hu, 2026; with n_head = 1 Attention Residuals, Kimi Team, 2026).
    Arguments as in route_logits. Returns ... D in the sources' dtype, rounded once.
    """
    w = route_weights(query, sources, n_head, eps)                          # N ... H
    s = upcast(torch.stack(sources)).unflatten(-1, (n_head, -1))            # N ... H K
    return (w[..., None] * s).sum(0).flatten(-2).to(sources[0].dtype)       # ... D


# ---- forward kernels. Sources and reads are the caller's own tensors, BT D with BT = B * T positions, nowhere copied
# or stacked. The table V (S) says where the sources lie, see `place`. Buffers are row-major:
#   Q    (S, D)       effective queries    LSE  (BT, S, H)   log-sum-exp of each site's logits
#   RSTD (BT, S)      1 / RMS of each source's row           (S padded to a multiple of 16 but in V, Q, NORM)
#   NORM (S, BT)      1 / RMS of each read, where its consumer wants it normalised: OUT then holds the read times NORM
#
# Tiles need powers of two and K is often none, so a head's slice is held as a tuple of equal pieces,
# `PARTS` of KW columns (K = 160 is 5 x 32, with no lane idle). In the group kernels each of W warps has its own. A
# head too wide for one program there is cut in SLICES, each with its own program. There are two launches then, of which
# the FIRST only leaves each slice's share of the logits in Z (BT, H, SLICES, 2 C, S), half of it unused in forward.

jit = (lambda *f, **kw: f[0] if f else lambda f: f) if triton is None else triton.jit


@jit
def load_parts(rows, col, mask, K: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
               KEEP: tl.constexpr):
    """
    A tuple of PARTS tiles, columns col + j * KW of a head's slice; rows are pointers to where it starts.
    Rows are read once and stay out of the first-level cache, so that the queries (KEEP) stay in it.
    """
    parts = ()
    for j in tl.static_range(PARTS):
        parts = parts + (tl.load(rows + col + j * KW, mask=mask if EVEN else mask & (col + j * KW < K), other=0.0,
                                 cache_modifier='.ca' if KEEP else '.cg'),)
    return parts


@jit
def store_parts(rows, col, mask, parts, scale,
                K: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr):
    """The reverse of load_parts, of parts * scale."""
    for j in tl.static_range(PARTS):
        tl.store(rows + col + j * KW, (parts[j] * scale).to(rows.dtype.element_ty),
                 mask=mask if EVEN else mask & (col + j * KW < K))


@jit
def place(X, Q):
    """Where the tensor X lies, in units of 16 elements from Q."""
    return (X.to(tl.int64) - Q.to(tl.int64)) // (2 * X.dtype.element_ty.primitive_bitwidth)


@jit
def pick(places, j):
    """
    Place j of a vector of places, in elements from Q. A lookup in a loop over rows would hold up their loads. The
    vector needs two elements too many: loops run that far ahead of themselves, though they load nothing there.
    """
    return tl.sum(tl.gather(places, tl.full([1], j, tl.int32), 0)) * 16


@jit
def zeros(shape: tl.constexpr, PARTS: tl.constexpr):
    parts = ()
    for _ in tl.static_range(PARTS):
        parts = parts + (tl.zeros(shape, tl.float32),)
    return parts


@jit
def products(a, b, PARTS: tl.constexpr):
    """a * b, added up over the pieces, in fp32: what is left to sum is one tile."""
    total = a[0].to(tl.float32) * b[0]
    for j in tl.static_range(1, PARTS):
        total += a[j].to(tl.float32) * b[j]
    return total


@jit
def inner(a, b, PARTS: tl.constexpr):
    """<a, b> over a head's columns, in fp32."""
    return tl.sum(products(a, b, PARTS), 1)


@jit
def weighted(acc, scale, rows, weight, PARTS: tl.constexpr):
    """acc * scale + rows * weight, piece by piece, in fp32."""
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (acc[j].to(tl.float32) * scale + rows[j] * weight,)
    return out


@jit
def absorb(m, l, acc, rows, z, PARTS: tl.constexpr):
    """A softmax under way (of maximum m, sum l and mix acc so far) takes in rows with the logits z."""
    top = tl.maximum(m, z)
    a, p = tl.exp(m - top), tl.exp(z - top)
    return top, a * l + p, weighted(acc, a[:, None], rows, p[:, None], PARTS)


@jit
def either(mask, a, b, PARTS: tl.constexpr):
    """a where mask, else b, piece by piece, in fp32."""
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (tl.where(mask, a[j], b[j].to(tl.float32)),)
    return out


@jit
def matmul(a, rows, PARTS: tl.constexpr):
    """a rows^T: <a, row> for every pair, added up over the W warps that share a head."""
    total = tl.dot(a[0], tl.permute(rows[0], (0, 2, 1)), input_precision='tf32x3')
    for j in tl.static_range(1, PARTS):
        total = tl.dot(a[j], tl.permute(rows[j], (0, 2, 1)), total, input_precision='tf32x3')
    return tl.sum(total, 0)


@jit
def whole(a, rows, Z, at, stride, own, mask, SLICES: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr):
    """matmul over a whole head. If that is in slices, the first launch leaves the share of each in Z, at `at`."""
    if SLICES == 1 or FIRST:
        total = matmul(a, rows, PARTS)
    else:
        total = tl.load(Z + at, mask=mask, other=0.0)
        for j in tl.static_range(1, SLICES):
            total += tl.load(Z + at + j * stride, mask=mask, other=0.0)
    if FIRST:
        tl.store(Z + at + own * stride, total, mask=mask)
    return total


@jit
def mix(acc, scale, rows, weights, W: tl.constexpr, PARTS: tl.constexpr):
    """acc * scale + weights rows."""
    weights = tl.broadcast_to(weights.to(rows[0].dtype)[None, :, :], [W, weights.shape[0], weights.shape[1]])
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (tl.dot(weights, rows[j], acc[j] * scale, input_precision='tf32x3'),)
    return out


@jit(do_not_specialize=['s', 'base'])
def read_site(X, V, RSTD, Q, OUT, LSE, NORM, s, base, BT, SP, eps,
              H: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
              SPAN: tl.constexpr, STAGES: tl.constexpr, CARRY: tl.constexpr):
    """
    One position of site s: source s, which is X and enters V, sources base..s-1, at most SPAN, and the (OUT, LSE)
    carried from those below base.
    """
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == KW * PARTS
    t = tl.program_id(0).to(tl.int64)                                       # 64 bits: t D passes 2^31
    h = tl.arange(0, HB)
    mh = h < H
    k = tl.broadcast_to(tl.arange(0, KW)[None, :], [HB, KW])
    head, mk = (h * K)[:, None], mh[:, None]

    recent = base + tl.arange(0, SPAN)
    places = tl.load(V + recent, mask=recent < s, other=0)
    q = load_parts(Q + s * D + head, k, mk, K, KW, PARTS, EVEN, True)       # PARTS x (HB KW)
    x = load_parts(X + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
    if CARRY:
        o = load_parts(OUT + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
        lse = tl.load(LSE + (t * SP + s) * H + h, mask=mh, other=0.0)
    r = tl.rsqrt(tl.sum(products(x, x, PARTS)) / D + eps)
    m, l = inner(x, q, PARTS) * r, tl.full([HB], 1.0, tl.float32)           # HB
    acc = weighted(zeros([HB, KW], PARTS), 1.0, x, 1.0, PARTS)              # x in fp32
    if CARRY:
        m, l, acc = absorb(m, l, acc, o, lse, PARTS)
    for i in tl.range(base, s, num_stages=STAGES):
        v = load_parts(Q + pick(places, i - base) + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
        m, l, acc = absorb(m, l, acc, v, inner(v, q, PARTS) * tl.load(RSTD + t * SP + i), PARTS)
    tl.store(V + s, place(X, Q), mask=t == 0)
    tl.store(RSTD + t * SP + s, r)
    scale = 1.0 / l
    if NORM is not None:
        norm = tl.rsqrt(tl.sum(inner(acc, acc, PARTS) * scale * scale) / D + eps)
        tl.store(NORM + s * (BT + t * 0) + t, norm)
        scale *= norm
    store_parts(OUT + t * D + head, k, mk, acc, scale[:, None], K, KW, PARTS, EVEN)
    tl.store(LSE + (t * SP + s) * H + h, m + tl.log(l), mask=mh)


@jit(do_not_specialize=['s', 'n'])
def read_group(Z, V, RSTD, Q, OUT, LSE, s, n, BT, S, SP,
               H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
               SLICES: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, P: tl.constexpr, FIRST: tl.constexpr):
    """P positions of one head, sites s..s+C-1, the rows of OUT, over sources 0..n-1: each row is read once for all."""
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == SLICES * W * KW * PARTS
    head = tl.program_id(0) % (H * SLICES)                                  # the heads of a position run side by side
    h, own = head // SLICES, head % SLICES
    k = ((own * W + tl.arange(0, W)[:, None]) * (KW * PARTS) + tl.arange(0, KW)[None, :])[:, None, :]       # W 1 KW
    c = s + tl.arange(0, C)
    mc = c < S
    q = load_parts(Q + c[None, :, None] * D + h * K, k, mc[None, :, None],              # PARTS x (W C KW)
                   K, KW, PARTS, EVEN, True)
    m = tl.full([C], -1e30, tl.float32)
    l = tl.zeros([C], tl.float32)
    acc = zeros([W, C, KW], PARTS)
    blocks = tl.cdiv(n, NB)
    t0 = (tl.program_id(0) // (H * SLICES)).to(tl.int64) * P
    BT = BT + t0 * 0
    for b in range(blocks * tl.minimum(P, BT - t0).to(tl.int32)):           # one loop: loads run ahead across positions
        t = t0 + b // blocks
        i = b % blocks * NB + tl.arange(0, NB)
        mi = i < n
        v = load_parts(Q + (tl.load(V + i, mask=mi, other=0) * 16 + t * D)[None, :, None] + h * K, k, mi[None, :, None],
                       K, KW, PARTS, EVEN, False)
        z_at = ((t * H + h) * SLICES * 2 * C + c - s)[:, None] * SP + i[None, :]
        z = whole(q, v, Z, z_at, 2 * C * SP, own, mc[:, None] & mi[None, :], SLICES, FIRST, PARTS)
        if not FIRST:
            r = tl.load(RSTD + t * SP + i, mask=mi, other=0.0)
            z = tl.where(mi[None, :], z * r[None, :], -1e30)                # C NB
            m = tl.where(b % blocks == 0, -1e30, m)                         # a new position: a = 0 clears l and acc
            top = tl.maximum(m, tl.max(z, 1))
            a, p = tl.exp(m - top), tl.exp(z - top[:, None])
            l, m = a * l + tl.sum(p, 1), top
            acc = mix(acc, a[None, :, None], v, p, W, PARTS)
            if b % blocks == blocks - 1:
                store_parts(OUT + ((c - s) * BT + t)[None, :, None] * D + h * K, k, mc[None, :, None],
                            acc, (1.0 / l)[None, :, None], K, KW, PARTS, EVEN)
                tl.store(LSE + (t * SP + c) * H + h, m + tl.log(l), mask=mc)


# ---- backward kernels. For site s, source n, head h, with do = dout_s[h], v the head's slice of source n, and
# w, z as in `route_weights`. r belongs to the whole row of source n, which is why its term sums over heads:
#
#   out = sum_n w v              so   dw = <do, v>,   dz = w (dw - delta)   with   delta = sum_n w dw = <do, out>
#   z   = r <q, v>               so   dq = sum dz r v  over n and positions
#   r   = (mean of v^2 over the row's D columns + eps)^-1/2,  dr / dv = -r^3 v / D,  sum_h dz <q, v> = sum_h dz z / r
#
#   dv  = sum_s w do  +  r sum_s dz q  -  r^2 / D (sum_s,h dz z) v
#
# If the read is normalised, y = norm out, then out's gradient is made of y's first, do = norm (dy - <dy, y> y / D).
#
# The table G (S) says where the do of each site lies. More buffers: DELTA (BT, S, H); for the C sources of a group
# PART (C, BT, D) and CSUM (BT, C, H), the sums over far sites, those that one pass serves; DZ (C, BT, H, S) = dz r.

@jit(do_not_specialize=['s', 'low', 'end', 'c'])
def grad_site(X, OUT, DY, DO, NORM, G, RSTD, Q, LSE, DELTA, PART, CSUM, DZ, DX, s, low, end, c, BT, SP,
              H: tl.constexpr, K: tl.constexpr, HB: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
              C: tl.constexpr, SITES: tl.constexpr, STAGES: tl.constexpr, CARRY: tl.constexpr):
    """
    One position of source s, which is X: site s, whose do is DY or, if the read was normalised, made of it in DO, and
    enters G; sites s+1..end-1; and what PART carries. Writes dz of sites s..end-1; end - low is at most SITES.
    """
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == KW * PARTS
    t = tl.program_id(0).to(tl.int64)
    BT = BT + t * 0                                                         # 64 bits: row numbers times D pass 2^31
    h = tl.arange(0, HB)
    mh = h < H
    k = tl.broadcast_to(tl.arange(0, KW)[None, :], [HB, KW])
    head, mk = (h * K)[:, None], mh[:, None]
    at = t * SP * H + h                                                     # of LSE and DELTA, at site 0
    DZ += ((c * BT + t) * H + h) * SP

    sites = low + tl.arange(0, SITES)
    places = tl.load(G + sites, mask=(sites > s) & (sites < end), other=0)
    v = load_parts(X + t * D + head, k, mk, K, KW, PARTS, EVEN, False)     # PARTS x (HB KW)
    q = load_parts(Q + s * D + head, k, mk, K, KW, PARTS, EVEN, True)
    r = tl.load(RSTD + t * SP + s)
    lse = tl.load(LSE + at + s * H, mask=mh, other=0.0)
    if CARRY:
        part = load_parts(PART + (c * BT + t) * D + head, k, mk, K, KW, PARTS, EVEN, False)
        csum = tl.load(CSUM + (t * C + c) * H + h, mask=mh, other=0.0)
    out = load_parts(OUT + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
    do = load_parts(DY + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
    if NORM is not None:
        norm = tl.load(NORM + s * BT + t)
        dy, do = do, ()
        mean = tl.sum(products(dy, out, PARTS)) / D
        for j in tl.static_range(PARTS):
            do = do + ((norm * (dy[j].to(tl.float32) - mean * out[j])).to(DO.dtype.element_ty),)
        store_parts(DO + t * D + head, k, mk, do, 1.0, K, KW, PARTS, EVEN)
    delta = inner(do, out, PARTS)
    if NORM is not None:
        delta /= norm
    tl.store(G + s, place(DO, Q), mask=t == 0)
    tl.store(DELTA + at + s * H, delta, mask=mh)
    z = inner(v, q, PARTS) * r
    w = tl.exp(z - lse)
    dz = w * (inner(v, do, PARTS) - delta)
    dz = tl.where(s == 0, 0.0, dz)                                          # the only source: no rounding may move q
    zsum = dz * z                                                           # HB: sum_s dz z
    dz *= r
    tl.store(DZ + s, dz.to(DZ.dtype.element_ty), mask=mh)
    acc = weighted(q, dz[:, None], do, w[:, None], PARTS)
    if CARRY:
        acc = weighted(acc, 1.0, part, 1.0, PARTS)
        zsum += csum
    for i in tl.range(s + 1, end, num_stages=STAGES):
        g = load_parts(Q + pick(places, i - low) + t * D + head, k, mk, K, KW, PARTS, EVEN, False)
        u = load_parts(Q + i * D + head, k, mk, K, KW, PARTS, EVEN, True)
        zi = inner(v, u, PARTS) * r
        wi = tl.exp(zi - tl.load(LSE + at + i * H, mask=mh, other=0.0))
        dzi = wi * (inner(v, g, PARTS) - tl.load(DELTA + at + i * H, mask=mh, other=0.0))
        zsum += dzi * zi
        dzi *= r
        tl.store(DZ + i, dzi.to(DZ.dtype.element_ty), mask=mh)
        acc = weighted(acc, 1.0, g, wi[:, None], PARTS)
        acc = weighted(acc, 1.0, u, dzi[:, None], PARTS)
    f = r * r * tl.sum(tl.where(mh, zsum, 0.0)) / D
    store_parts(DX + t * D + head, k, mk, weighted(acc, 1.0, v, -f, PARTS), 1.0, K, KW, PARTS, EVEN)


@jit(do_not_specialize=['s', 'end', 'n'])
def grad_group(Z, V, G, RSTD, Q, LSE, DELTA, PART, CSUM, DZ, s, end, n, BT, N, SP,
               H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
               SLICES: tl.constexpr, C: tl.constexpr, NB: tl.constexpr, FIRST: tl.constexpr):
    """One position of one head, sources n..n+C-1, below N, over sites s..end-1: each do row is read once for all."""
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == SLICES * W * KW * PARTS
    head = tl.program_id(0) % (H * SLICES)                                  # the heads of a position run side by side
    h, own = head // SLICES, head % SLICES
    k = ((own * W + tl.arange(0, W)[:, None]) * (KW * PARTS) + tl.arange(0, KW)[None, :])[:, None, :]       # W 1 KW
    t = (tl.program_id(0) // (H * SLICES)).to(tl.int64)
    BT = BT + t * 0
    c = tl.arange(0, C)
    mc = n + c < N
    at = t * SP * H + h                                                     # of LSE and DELTA, at site 0
    v = load_parts(Q + (tl.load(V + n + c, mask=mc, other=0) * 16 + t * D)[None, :, None] + h * K, k, mc[None, :, None],
                   K, KW, PARTS, EVEN, False)
    r = tl.load(RSTD + t * SP + n + c, mask=mc, other=0.0)[:, None]
    acc = zeros([W, C, KW], PARTS)
    zsum = tl.zeros([C], tl.float32)
    for s0 in range(s, end, NB):
        i = s0 + tl.arange(0, NB)
        mi = i < end
        q = load_parts(Q + i[None, :, None] * D + h * K, k, mi[None, :, None],          # PARTS x (W NB KW)
                       K, KW, PARTS, EVEN, True)
        at_i = tl.load(G + i, mask=mi, other=0) * 16 + t * D
        do = load_parts(Q + at_i[None, :, None] + h * K, k, mi[None, :, None], K, KW, PARTS, EVEN, False)
        z_at, mz = ((t * H + h) * SLICES * 2 * C + c)[:, None] * SP + i[None, :], mc[:, None] & mi[None, :]
        z = whole(v, q, Z, z_at, 2 * C * SP, own, mz, SLICES, FIRST, PARTS) * r                     # C NB
        dw = whole(v, do, Z, z_at + C * SP, 2 * C * SP, own, mz, SLICES, FIRST, PARTS)
        if not FIRST:
            w = tl.exp(z - tl.load(LSE + at + i * H, mask=mi, other=float('inf'))[None, :])
            dz = w * (dw - tl.load(DELTA + at + i * H, mask=mi, other=0.0)[None, :])
            zsum += tl.sum(dz * z, 1)
            dz *= r
            tl.store(DZ + (((c * BT + t) * H + h) * SP)[:, None] + i[None, :], dz.to(DZ.dtype.element_ty), mask=mz)
            acc = mix(mix(acc, 1.0, do, w, W, PARTS), 1.0, q, dz, W, PARTS)
    if not FIRST:
        store_parts(PART + (c * BT + t)[None, :, None] * D + h * K, k, mc[None, :, None], acc, 1.0, K, KW, PARTS, EVEN)
        tl.store(CSUM + (t * C + c) * H + h, zsum, mask=mc)


@jit(do_not_specialize=['s', 'end', 'count'])
def grad_query(V, Q, DZ, DQ, s, end, count, BT, S, SP,
               H: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
               C: tl.constexpr, SB: tl.constexpr, TB: tl.constexpr):
    """dq of sites s.. from sources s..s+count-1, a share of the positions: DQ (shares, S, D) += dz r v."""
    D: tl.constexpr = H * K
    BLOCKS: tl.constexpr = (K + KW * PARTS - 1) // (KW * PARTS)             # of columns, for a wide head
    EVEN: tl.constexpr = K % (KW * PARTS) == 0
    h = tl.program_id(0) // BLOCKS
    k = (tl.program_id(0) % BLOCKS * (KW * PARTS) + tl.arange(0, KW))[None, :]
    i = s + tl.program_id(1) * SB + tl.arange(0, SB)
    share, shares = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    blocks = tl.cdiv(BT, shares * TB).to(tl.int32)
    places = tl.load(V + s + tl.arange(0, C), mask=tl.arange(0, C) < count, other=0)
    acc = zeros([SB, KW], PARTS)
    for b in range(count * blocks):
        c = b // blocks
        t = (b % blocks * shares + share) * TB + tl.arange(0, TB)
        mt = (t < BT)[:, None]
        v = load_parts(Q + pick(places, c) + t[:, None] * D + h * K, k, mt, K, KW, PARTS, EVEN, False)
        dz = tl.load(DZ + ((c * BT + t) * H + h)[:, None] * SP + i[None, :],
                     mask=mt & ((i >= s + c) & (i < end))[None, :], other=0.0)      # a site reads no later source
        more = ()
        for j in tl.static_range(PARTS):
            more = more + (tl.dot(tl.trans(dz), v[j], acc[j], input_precision='tf32x3'),)
        acc = more
    rows, mi = DQ + (share * S + i)[:, None] * D + h * K, (i < end)[:, None]
    sofar = load_parts(rows, k, mi, K, KW, PARTS, EVEN, False)
    store_parts(rows, k, mi, weighted(acc, 1.0, sofar, 1.0, PARTS), 1.0, K, KW, PARTS, EVEN)


# ---- kernels for sites that share their sources: `count` of them, at most 8, read the same n sources, each besides a
# null source of its own, a row that is the same at every position, and behind a gate. One tile of ROWS holds them all:
# row c < 8 is the null source of site c, which that site alone sees, row 8 + i source i. So these sites are one launch
# in each direction, and backward computes the softmax again instead of keeping it. The derivation is that above, with
#
#   out_c = alpha_c sum_n w v    so   dw = alpha <do, v>,   dalpha_c = sum of <do, v> w over n, heads and positions
#
# and with r an input of its own, dr = sum dz <q, v>, since who made the source has its row at hand.

@jit
def places_of(XS, Q, row):
    """Where the tensors of the tuple XS lie, as `place` says, the first in row 8."""
    found = tl.zeros_like(row).to(tl.int64)
    for j in tl.static_range(len(XS)):
        found = tl.where(row == 8 + j, place(XS[j], Q), found)
    return found


@jit
def shared_rows(XS, NULL, RS, Q, row, count, n, c):
    """
    Of the rows of the tile: which are null sources, which sources; where they are, in elements from Q, and where their
    r is, in elements from RS[0]; by site c, which it sees.
    """
    null, source = row < count, (row >= 8) & (row < 8 + n)
    at = tl.where(null, place(NULL, Q), places_of(XS, Q, row)) * 16
    sees = tl.where(row[:, None] < 8, row[:, None] == c[None, :], source[:, None])
    return null, source, at, places_of(RS, RS[0], row) * 16, sees


@jit(do_not_specialize=['count', 'n'])
def read_shared(XS, RS, NULL, RNULL, Q, ALPHA, OUT, count, n, BT,
                H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
                ROWS: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr):
    """P positions of one head. OUT (count, BT, D)."""
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == W * KW * PARTS
    h = tl.program_id(0) % H
    k = (tl.arange(0, W)[:, None] * (KW * PARTS) + tl.arange(0, KW)[None, :])[:, None, :]       # W 1 KW
    c, row = tl.arange(0, 8), tl.arange(0, ROWS)
    mc = c < count
    null, source, at, r_at, sees = shared_rows(XS, NULL, RS, Q, row, count, n, c)
    there, rnull = null | source, tl.load(RNULL + row, mask=null, other=0.0)
    q = load_parts(Q + c[None, :, None] * D + h * K, k, mc[None, :, None], K, KW, PARTS, EVEN, True)
    alpha = tl.load(ALPHA + c, mask=mc, other=0.0)
    t0 = (tl.program_id(0) // H).to(tl.int64) * P
    BT = BT + t0 * 0
    for i in tl.range(0, tl.minimum(P, BT - t0).to(tl.int32), num_stages=STAGES):
        t = t0 + i
        own = tl.where(null, row, t)
        v = load_parts(Q + (at + own * D)[None, :, None] + h * K, k, there[None, :, None], K, KW, PARTS, EVEN, False)
        r = tl.where(null, rnull, tl.load(RS[0] + r_at + t, mask=source, other=0.0))
        z = tl.where(tl.trans(sees), matmul(q, v, PARTS) * r[None, :], -1e30)                   # 8 ROWS
        w = tl.exp(z - tl.max(z, 1)[:, None])
        out = mix(zeros([W, 8, KW], PARTS), 1.0, v, w, W, PARTS)
        store_parts(OUT + (c * BT + t)[None, :, None] * D + h * K, k, mc[None, :, None],
                    out, (alpha / tl.sum(w, 1))[None, :, None], K, KW, PARTS, EVEN)


@jit(do_not_specialize=['count', 'n'])
def grad_shared(XS, RS, NULL, RNULL, Q, ALPHA, DOS, MORE, MORE_R, DX, DR, SUMS, count, n, BT,
                H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr,
                ROWS: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr):
    """
    P positions of one head. DX (n, BT, D) and DR (n, H, BT), to which the gradients of later sites are added if there
    are any (MORE, MORE_R). Each share of the positions sums in SUMS (shares, 2, 8, D + H): first the gradients of
    the queries and, by head, of the gates, then those of the null sources and, by head, of their r.
    """
    D: tl.constexpr = H * K
    EVEN: tl.constexpr = K == W * KW * PARTS
    h = tl.program_id(0) % H
    k = (tl.arange(0, W)[:, None] * (KW * PARTS) + tl.arange(0, KW)[None, :])[:, None, :]       # W 1 KW
    c, row, u_row = tl.arange(0, 8), tl.arange(0, ROWS), tl.arange(0, 16)
    mc = c < count
    null, source, at, r_at, sees = shared_rows(XS, NULL, RS, Q, row, count, n, c)
    there, rnull = null | source, tl.load(RNULL + row, mask=null, other=0.0)
    # A second tile holds the sites: their do, then their queries, for one product with each row and one mix of all.
    query = u_row >= 8
    u_at, u_there = tl.where(query, (u_row - 8) * D, places_of(DOS, Q, u_row + 8) * 16), u_row % 8 < count
    alpha = tl.load(ALPHA + c, mask=mc, other=0.0)
    if MORE is not None:
        more_at, more_r_at = places_of(MORE, Q, row) * 16, places_of(MORE_R, RS[0], row) * 16
    t0 = (tl.program_id(0) // H).to(tl.int64) * P
    BT = BT + t0 * 0
    # Rows below 8 of acc and drsum go on summing, the others start anew at each position with what MORE holds.
    acc, dq = zeros([W, ROWS, KW], PARTS), zeros([W, 8, KW], PARTS)
    drsum, dalpha = tl.zeros([ROWS], tl.float32), tl.zeros([8], tl.float32)
    for i in tl.range(0, tl.minimum(P, BT - t0).to(tl.int32), num_stages=STAGES):
        t = t0 + i
        v = load_parts(Q + (at + tl.where(null, row, t) * D)[None, :, None] + h * K, k, there[None, :, None],
                       K, KW, PARTS, EVEN, False)
        u = load_parts(Q + (u_at + tl.where(query, 0, t) * D)[None, :, None] + h * K, k, u_there[None, :, None],
                       K, KW, PARTS, EVEN, False)
        r = tl.where(null, rnull, tl.load(RS[0] + r_at + t, mask=source, other=0.0))
        dx, dr = zeros([W, ROWS, KW], PARTS), tl.zeros([ROWS], tl.float32)
        if MORE is not None:
            dx = load_parts(Q + (more_at + t * D)[None, :, None] + h * K, k, source[None, :, None],
                            K, KW, PARTS, EVEN, False)
            dr = tl.load(RS[0] + more_r_at + h * BT + t, mask=source, other=0.0)
        dw, qv = tl.split(tl.permute(tl.reshape(matmul(v, u, PARTS), [ROWS, 2, 8]), (0, 2, 1)))     # ROWS 8
        z = tl.where(sees, qv * r[:, None], -1e30)
        p = tl.exp(z - tl.max(z, 0)[None, :])
        scale = 1.0 / tl.sum(p, 0)
        delta = tl.sum(p * dw, 0) * scale
        dalpha += delta
        w = p * (scale * alpha)[None, :]
        dz = w * (dw - delta[None, :])
        drsum = tl.where(row < 8, drsum, dr) + tl.sum(dz * qv, 1)
        dz *= r[:, None]
        both = tl.reshape(tl.permute(tl.join(w, dz), (0, 2, 1)), [ROWS, 16])
        acc = mix(either(row[None, :, None] < 8, acc, dx, PARTS), 1.0, u, both, W, PARTS)
        dq = mix(dq, 1.0, v, tl.trans(dz), W, PARTS)
        store_parts(DX + ((row - 8) * BT + t)[None, :, None] * D + h * K, k, source[None, :, None],
                    acc, 1.0, K, KW, PARTS, EVEN)
        tl.store(DR + ((row - 8) * H + h) * BT + t, drsum, mask=source)
    SUMS += tl.program_id(0) // H * (16 * (D + H))
    store_parts(SUMS + c[None, :, None] * (D + H) + h * K, k, mc[None, :, None], dq, 1.0, K, KW, PARTS, EVEN)
    tl.store(SUMS + c * (D + H) + D + h, dalpha, mask=mc)
    store_parts(SUMS + (8 + row)[None, :, None] * (D + H) + h * K, k, null[None, :, None],
                acc, 1.0, K, KW, PARTS, EVEN)
    tl.store(SUMS + (8 + row) * (D + H) + D + h, drsum, mask=null)


# ---- one forward pass

def pieces(K, widest):
    """K columns as PARTS pieces of KW, a power of two from 16 to widest: the least padding, then the fewest pieces."""
    fits = [kw for kw in (1024, 512, 256, 128, 64, 32, 16) if kw <= widest and -(-K // kw) <= 8] or [widest]
    KW = min(fits, key=lambda kw: -(-K // kw) * kw)
    return dict(KW=KW, PARTS=-(-K // KW))


@functools.cache
def shared_memory(device):
    """Bytes one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == 'cuda' else 2**30


def aligned(x):
    """x, or a copy of it, laid out as `place` needs it and so that kernels can load whole words."""
    x = x.contiguous()
    return x if x.data_ptr() % 64 == 0 else x.clone()


class _Run:
    """Buffers and launches of one forward pass and its backward. Never shared: two forwards may precede a backward."""
    C = 8                           # sites, or sources, that share one pass over the others
    NB = 16                         # of which it takes so many at a time
    WHOLE, SLICE = 1280, 512        # columns of a head that is not cut in slices; of a slice of a wider one
    SHARES = 64                     # of the positions, each with a partial dq
    FEW = 64                        # positions that do not fill a GPU: one launch a site is then faster than two

    def __init__(self, query, x, n_head, eps):
        (S, D), K = query.shape, query.shape[1] // n_head
        self.S, self.D, self.H, self.BT, self.eps = S, D, n_head, x.numel() // D, eps
        self.like = x.new_empty(0)                                          # dtype and device of the sources
        self.SP = triton.cdiv(S, 16) * 16
        # A copy: aligned, as the units of `place` need it, and unchanged if an optimizer steps before backward.
        self.Q = query.detach().to(x.dtype, copy=True, memory_format=torch.contiguous_format)
        self.V, self.G = (torch.empty(S, dtype=torch.int64, device=x.device) for _ in 'VG')
        self.RSTD, self.LSE = self.fp32(self.BT, self.SP), self.fp32(self.BT, self.SP, n_head)
        self.NORM = self.fp32(S, self.BT)
        self.s = self.base = self.until = 0             # sites read; sources carried, for the sites below until
        self.task = None                                                    # the backward pass that is under way

        # Widths measured on an H200. The site kernels hold whole rows, at least 8 columns a thread. One warp holds a
        # head of up to 320 or 192 columns in the group kernels; a wider one takes several, and beyond what they hold,
        # or what fits the shared memory (84 bytes a column in 16 bits), it is cut in slices.
        HB = triton.next_power_of_2(n_head)
        warps = min(4, triton.next_power_of_2(max(1, HB * K // 1280)))
        row = dict(H=n_head, K=K, HB=HB, **pieces(K, max(64, 256 * warps // HB)))
        stages = 3 if n_head > 1 or warps > 1 else 1
        fits = K <= min(self.WHOLE, shared_memory(x.device) // (42 * x.element_size()))
        slices = 1 if fits else triton.cdiv(K, self.SLICE)

        def group(columns, most):
            """Tiles of a group kernel. columns: of a head that one warp holds; most: warps at most."""
            W = min(most, triton.next_power_of_2(triton.cdiv(K, columns * slices)))
            tile = pieces(triton.cdiv(K, slices * W), 32 if W == 1 else 64)
            return dict(H=n_head, K=K, W=W, **tile, SLICES=triton.cdiv(K, W * tile['KW'] * tile['PARTS']), C=self.C,
                        NB=self.NB, num_warps=W, num_stages=2)

        self.tiles = SimpleNamespace(
            read_site=dict(row, STAGES=stages, num_warps=warps),
            read_group=dict(group(320, 4), P=8 if K <= 128 else 4),
            grad_site=dict(row, C=self.C, STAGES=stages,
                           num_warps=min(4, 2 * warps) if HB > 1 and HB * K > 1024 else warps),
            grad_group=group(192, 8),
            grad_query=dict(H=n_head, K=K, C=self.C, **pieces(K if K <= 192 else 128, 64),      # 256: Ampere spills
                            TB=64 if K > 64 else 128, num_stages=3))

    def fp32(self, *shape):
        return self.like.new_empty(shape, dtype=torch.float32)

    def rows(self, x):
        return aligned(x.reshape(-1, self.D).to(self.like.dtype))

    def launch_group(self, kernel, tiles, blocks, *inputs):
        """Launches a group kernel over blocks of positions: twice if heads are in slices, first only to fill Z."""
        slices = tiles['SLICES']
        Z = self.fp32(self.BT, self.H, slices, 2 * self.C, self.SP) if slices > 1 else None
        for FIRST in (True, False) if slices > 1 else (False,):
            kernel[(blocks * self.H * slices,)](Z, *inputs, **tiles, FIRST=FIRST)

    @classmethod
    def group_starts(cls, s, S):
        """Groups of sites are counted from the last, so that none is nearly empty; the first may be short or long."""
        return s >= cls.C // 2 and (S - s) % cls.C == 0

    @classmethod
    def first_far(cls, s, end):
        """The first site that grad_group serves for sources up to s: one or two sites are not worth a tile."""
        few = (end - s - 1) % cls.NB
        return s + 1 + (few if few <= 2 else 0)

    def read(self, x, norm):
        """
        The next site's mix of all sources, BT D, normalised with norm; x, BT D, is the newest. The caller keeps them
        alive: a run is owned by the graph, which would keep them for as long as anybody keeps the loss.
        """
        s = self.s
        if self.group_starts(s, self.S) and self.BT >= self.FEW:
            self.O = self.like.new_empty(self.C, self.BT, self.D)
            self.base, self.until = s, s + self.C
            self.launch_group(read_group, self.tiles.read_group, triton.cdiv(self.BT, self.tiles.read_group['P']),
                              self.V, self.RSTD, self.Q, self.O, self.LSE, s, s, self.BT, self.S, self.SP)
        carried = s < self.until
        # .data, so that modifying one read does not count as modifying the others
        out = self.O[s - self.base].data if carried else self.like.new_empty(self.BT, self.D)
        read_site[(self.BT,)](
            x, self.V, self.RSTD, self.Q, out, self.LSE, self.NORM if norm else None, s, self.base if carried else 0,
            self.BT, self.SP, self.eps, **self.tiles.read_site, CARRY=carried,
            SPAN=max(16, triton.next_power_of_2(s - self.base * carried + 2)))
        self.s += 1
        if self.s >= self.until:
            self.O = None
        return out

    def backward(self, s, x, out, dy, norm):
        """Gradient of source s, which is x; all later sites have been here before."""
        if self.task != torch._C._current_graph_task_id():                  # a new backward pass
            self.task, self.end, self.alive = torch._C._current_graph_task_id(), s + 1, []
            self.DELTA, self.CSUM = torch.empty_like(self.LSE), self.fp32(self.BT, self.C, self.H)
            self.PART = self.like.new_empty(min(self.C, s + 1), self.BT, self.D)
            self.DZ = self.like.new_empty(min(self.C, s + 1), self.BT, self.H, self.SP)
            self.DQ = self.fp32(self.SHARES, self.S, self.D).zero_()
        c, do, dx = s % self.C, torch.empty_like(dy) if norm else dy, torch.empty_like(x)
        self.alive += [do, x]                                               # G and V hold addresses only
        if s == self.end - 1 or c == self.C - 1:                            # a group of sources begins
            self.far = self.first_far(s, self.end)
            if self.far < self.end:
                self.launch_group(grad_group, self.tiles.grad_group, self.BT,
                                  self.V, self.G, self.RSTD, self.Q, self.LSE, self.DELTA, self.PART, self.CSUM,
                                  self.DZ, self.far, self.end, s - c, self.BT, s + 1, self.SP)
        grad_site[(self.BT,)](
            x, out, dy, do, self.NORM if norm else None, self.G, self.RSTD, self.Q, self.LSE, self.DELTA, self.PART,
            self.CSUM, self.DZ, dx, s, s - c, self.far, c, self.BT, self.SP, **self.tiles.grad_site,
            SITES=max(16, triton.next_power_of_2(self.far - s + c + 2)), CARRY=self.far < self.end)
        if c == 0:
            sites, columns = self.end - s, self.tiles.grad_query['KW'] * self.tiles.grad_query['PARTS']
            SB = min(128, max(16, triton.next_power_of_2(sites)))
            grad_query[self.H * triton.cdiv(self.D // self.H, columns), triton.cdiv(sites, SB), self.SHARES](
                self.V, self.Q, self.DZ, self.DQ, s, self.end, min(self.C, self.end - s), self.BT, self.S, self.SP,
                **self.tiles.grad_query, SB=SB, num_warps=4 if SB < 128 else 8)
        if s == 0:                                                          # only DQ is needed still
            del self.alive, self.DELTA, self.CSUM, self.PART, self.DZ
        return dx

    def query_gradient(self):
        """(S, D), when every source has had its turn."""
        dq, self.task, self.DQ = self.DQ.sum(0), None, None
        return dq


def refuse_second_derivatives():
    if torch.is_grad_enabled():                                             # that is how create_graph shows in backward
        raise RuntimeError('the kernels have no second derivatives: attnres and mhar with routing=pytorch have')


class _Open(torch.autograd.Function):
    """Where the queries enter. Autograd runs its backward last, when every source has added its part of dq."""

    @staticmethod
    def forward(ctx, query, run):
        ctx.run, ctx.dtype = run, query.dtype
        return query.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.run.query_gradient().to(ctx.dtype), None


class _Read(torch.autograd.Function):
    """
    One site, with its new source as input. The token is empty: threaded from read to read, it makes autograd run a
    read's backward after those of all later reads, whatever else the graph looks like, and that is when the gradient
    of its source can be gathered.
    """

    @staticmethod
    def forward(ctx, token, run, rows, norm, x):
        """rows: x as run.rows gives it; norm: whether to normalise the read."""
        ctx.run, ctx.s, ctx.norm = run, run.s, norm
        ctx.set_materialize_grads(False)
        with torch.cuda.device_of(run.like):
            out = run.read(rows, norm).view(run.shape)
        ctx.save_for_backward(out, rows, x)             # x, though rows shares its memory: to see if it is modified
        return out, token.new_empty(0)

    @staticmethod
    def backward(ctx, dy, _):
        refuse_second_derivatives()
        run, (out, rows, _) = ctx.run, ctx.saved_tensors
        dy = run.like.new_zeros(run.BT, run.D) if dy is None else run.rows(dy)
        with torch.cuda.device_of(run.like):
            dx = run.backward(ctx.s, rows, out.view(-1, run.D), dy, ctx.norm)
        return None, None, None, None, dx.view(run.shape)


@functools.cache
def use_triton(choice, device, unfit=None):
    """
    Whether the kernels run, for choice = auto | triton | pytorch. Says so once; RuntimeError if in vain. unfit: why
    they cannot serve these shapes, if they cannot.
    """
    if triton is None:
        why_not = 'Triton is not installed'
    elif os.environ.get('TRITON_INTERPRET') == '1':
        why_not = None if choice == 'triton' else 'Triton only interprets'
    elif device.type != 'cuda':
        why_not = f'no CUDA device, the model is on {device.type}'
    else:
        why_not = None if torch.cuda.get_device_capability(device) >= (8, 0) else 'the GPU is older than Ampere'
    why_not = why_not or unfit
    if choice == 'triton' and why_not:
        raise RuntimeError(f'routing=triton is not possible here: {why_not}')
    use = choice != 'pytorch' and not why_not
    print('routing: triton' if use else f'routing: pytorch ({why_not or "as asked"})', file=sys.stderr)
    return use


def check_source(source, others, D):
    first = others[0] if others else source
    if source.shape != first.shape or source.dtype != first.dtype or source.shape[-1] != D:
        raise ValueError(f'source of shape {tuple(source.shape)} and {source.dtype} in a history of '
                         f'{tuple(first.shape)} and {first.dtype}, width {D}')


def check_grad(enabled):
    if enabled != torch.is_grad_enabled():
        raise RuntimeError('one depth history is read either with gradients or under no_grad, not both')


class DepthHistory:
    """
    The sources of one forward pass and what every site reads from them: site s attends over sources 0..s.

    query (S, D): the sites' effective queries; n_head: H; backend: auto | triton | pytorch (fp64 sources always take
    the PyTorch reference). ValueError if H does not divide D, for a source unlike the first, or for one too many.

    Sources are not copied: one that is modified in place before backward is an error there, as anywhere in
    PyTorch, and so is a read; under no_grad nobody notices. A history read partly under no_grad is an error. There
    are no second derivatives.
    """

    def __init__(self, query, n_head, eps=1e-6, backend='auto'):
        check_heads(n_head, query.shape[1])
        self.query, self.n_head, self.eps, self.backend = query, n_head, eps, backend
        self.sources, self.rows, self.run = [], [], None                    # rows: what the kernels read of sources

    def read(self, source, norm=False):
        """
        What the next site reads when source, ... D, has joined the others: the softmax-weighted mix of all of them
        (see route), ... D; with norm, the rms_norm of that.
        """
        site = len(self.sources)
        if site == len(self.query):
            raise ValueError(f'all {site} sites have read')
        check_source(source, self.sources, self.query.shape[1])
        self.sources.append(source)
        if source.numel() and source.dtype != torch.float64 and use_triton(self.backend, source.device):
            return self.read_triton(source, norm)
        out = route(self.query[site], self.sources, self.n_head, self.eps)
        return rms_norm(out, self.eps) if norm else out

    @torch.compiler.disable
    def read_triton(self, x, norm):
        if self.run is None:
            self.run = _Run(self.query, x, self.n_head, self.eps)
            self.run.shape = x.shape
            self.token, self.grad = _Open.apply(self.query, self.run), torch.is_grad_enabled()
        check_grad(self.grad)
        self.rows.append(self.run.rows(x.data))                             # .data: no part of the graph
        out, self.token = _Read.apply(self.token, self.run, self.rows[-1], norm, x)
        return out


# ---- sites that share their sources

def inverse_rms(x, eps=1e-6):
    """1 / RMS of x, ... D, in fp32 or wider: what makes a source's row a key."""
    return torch.rsqrt(upcast(x).pow(2).mean(-1) + eps)


def fill(xs, count):
    """The tuple of so many tensors that a kernel takes; those beyond the ones there are it never reads."""
    return (*xs, *[xs[0]] * (count - len(xs)))


class _SharedRead(torch.autograd.Function):
    """
    What at most eight sites read that share their n sources. These, and their r as H BT, are passed on to the sites
    that read next: so what those add to the gradients comes to this backward, which adds to it in registers.
    """

    @staticmethod
    def inputs(tiles, query, null, rnull, alpha, *sources):
        """The first inputs of both kernels."""
        n, D = len(sources) // 2, query.shape[1]
        return (fill([aligned(x.reshape(-1, D)) for x in sources[:n]], tiles.most),
                fill([aligned(r[0]) for r in sources[n:]], tiles.most), aligned(null), rnull, aligned(query), alpha)

    @staticmethod
    def forward(ctx, tiles, *inputs):
        query, _, _, _, x, *_ = inputs
        count, D, n = *query.shape, len(inputs) // 2 - 2
        BT, out = x.numel() // D, x.new_empty(count, *x.shape)
        with torch.cuda.device_of(x):
            read_shared[(D // tiles.K * triton.cdiv(BT, tiles.read['P']),)](
                *_SharedRead.inputs(tiles, *inputs), out, count, n, BT, **tiles.read)
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return *(x.data for x in out), *inputs[4:]                          # .data, as in _Run.read

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivatives()
        tiles, inputs = ctx.tiles, ctx.saved_tensors
        query, _, _, _, x, *_ = inputs
        count, D, n = *query.shape, len(inputs) // 2 - 2
        BT, H = x.numel() // D, D // tiles.K
        given = lambda grads, like: [aligned(like.new_zeros(like.shape) if g is None else g) for g in grads]
        more = more_r = None                                                # where no later site reads these sources
        if any(g is not None for g in grads[count:]):
            more = fill(given(grads[count:count + n], x), tiles.most)
            more_r = fill(given(grads[count + n:], inputs[-1]), tiles.most)
        shares = triton.cdiv(BT, tiles.grad['P'])
        dx, dr = x.new_empty(n, *x.shape), inputs[-1].new_empty(n, H, BT)
        sums = dr.new_empty(shares, 2, 8, D + H)
        with torch.cuda.device_of(x):
            grad_shared[(H * shares,)](*_SharedRead.inputs(tiles, *inputs), fill(given(grads[:count], x), 8), more,
                                       more_r, dx, dr, sums, count, n, BT, **tiles.grad)
        (dq, dalpha), (dnull, drnull) = (part[:count].split((D, H), -1) for part in sums.sum(0))
        return None, dq.to(x.dtype), dnull.to(x.dtype), drnull.sum(-1), dalpha.sum(-1), *dx, *dr


class GroupHistory:
    """
    The sources of one forward pass in which groups of sites read the same ones, each site besides a null source of
    its own and through a gate: site s reads alpha_s * route(query_s, [null_s, *sources]).

    query, null (S, D), alpha (S,): the sites' effective queries, null sources and gates; size: sites of a group, of
    which the last may be short. The rest, and what is said of sources, as in DepthHistory; query, null and alpha may
    not be modified before backward either. More than 24 groups, or a head too wide for the GPU's shared memory, take
    the PyTorch reference, and say so; with backend=triton a RuntimeError.
    """

    def __init__(self, query, null, alpha, size, n_head, eps=1e-6, backend='auto'):
        check_heads(n_head, query.shape[1])
        self.query, self.null, self.alpha, self.size = query, null, alpha, size
        self.n_head, self.eps, self.backend = n_head, eps, backend
        self.sources, self.site, self.chunks = [], 0, None                  # all so far; the first of the next group

    def read(self, source, r=None):
        """
        What the sites of the next group read, a list of ... D, when source, ... D, has joined the others. r: its
        inverse_rms, if that is at hand.
        """
        if self.site == len(self.query):
            raise ValueError(f'all {self.site} sites have read')
        check_source(source, self.sources, self.query.shape[1])
        tiles = self.tiles(source)
        unfit = None if tiles else 'delta: a head is too wide, or the groups are too many, for one tile'
        kernels = source.numel() and source.dtype != torch.float64 and use_triton(self.backend, source.device, unfit)
        self.sources.append(source)
        sites = range(self.site, min(self.site + self.size, len(self.query)))
        self.site = sites.stop
        if kernels:
            return self.read_triton(tiles, sites, source, inverse_rms(source, self.eps) if r is None else r)
        null = self.null.to(source.dtype)
        return [(self.alpha[s] * upcast(route(self.query[s], [null[s].expand_as(source), *self.sources], self.n_head,
                                              self.eps))).to(source.dtype) for s in sites]

    def tiles(self, x):
        """Widths measured on an H200; None where a head is too wide or the sources are too many for one tile."""
        H, K = self.n_head, self.query.shape[1] // self.n_head
        ROWS = 1 << (7 - -len(self.query) // self.size).bit_length()        # 8 null sources, a source per group
        if triton is None or ROWS > 32 or (2 * ROWS + 24) * K * x.element_size() > shared_memory(x.device):
            return None
        read, grad = (dict(H=H, K=K, W=W, **pieces(triton.cdiv(K, W), 64), ROWS=ROWS, P=P, num_warps=W, STAGES=stages)
                      for W, P, stages in ((triton.next_power_of_2(triton.cdiv(K, 320)), 16, 3),
                                           (triton.next_power_of_2(triton.cdiv(K, 160)), 64, 3 if K <= 64 else 2)))
        return SimpleNamespace(K=K, most=ROWS - 8, read=read, grad=grad)

    @torch.compiler.disable
    def read_triton(self, tiles, sites, source, r):
        if sites.start == 0:
            S, query, null = len(self.query), self.query.to(source.dtype), self.null.to(source.dtype)
            sizes = [min(8, at + self.size - s, S - s) for at in range(0, S, self.size)
                     for s in range(at, min(at + self.size, S), 8)]               # of what one launch serves
            self.chunks = zip(*(p.split(sizes) for p in (query, null, inverse_rms(null, self.eps), self.alpha.float())))
            self.passed, self.grad = ([], []), torch.is_grad_enabled()
        check_grad(self.grad)
        xs, rs = self.passed
        xs, rs = [*xs, source.contiguous()], [*rs, r.reshape(-1).expand(self.n_head, -1)]
        reads = []
        while len(reads) < len(sites):
            *out, = _SharedRead.apply(tiles, *next(self.chunks), *xs, *rs)
            n = len(xs)
            reads, xs, rs = reads + out[:-2 * n], out[-2 * n:-n], out[-n:]
        self.passed = xs, rs
        return reads


# ---- python routing_kernel.py: is it right, and how far from the bytes

def read_all(history, x, S, sublayer=lambda x: x):
    """Every site reads, and what the sublayer makes of it is the next source."""
    for s in range(S):
        x = sublayer(history.read(x))
    return x


def rows_moved(S, launches=1):
    """Rows of B * T * D that the kernels read and write, for S sources and S sites; launches: of one group pass."""
    run = _Run
    starts = [s for s in range(S) if run.group_starts(s, S)]
    forward = sum(launches * s + 2 * run.C for s in starts)                 # sources read; mixes written and read
    forward += sum(s - max([0, *(at for at in starts if at <= s)]) + 2 for s in range(S))   # recent, newest; read
    backward = 5 * S                                                        # v, do, out, dv; v for dq
    for group in (range(n, min(n + run.C, S)) for n in range(0, S, run.C)):
        far = run.first_far(group[-1], S)
        backward += sum(far - n - 1 for n in group)                         # do of near sites
        if far < S:
            backward += launches * (S - far + len(group)) + 2 * len(group)  # do of far ones, v; sums written and read
    return forward + backward


def main():
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cpu' and os.environ.get('TRITON_INTERPRET') != '1':
        raise SystemExit('routing_kernel.py: no CUDA device; with TRITON_INTERPRET=1 it checks on the CPU')

    def gradients(S, tokens, D, H, dtype, backend):
        torch.manual_seed(0)
        q, x, g = (torch.randn(n, D, device=device) for n in (S, tokens, tokens))
        q, x = (q / (D // H) ** 0.5).requires_grad_(), x.to(dtype).requires_grad_()
        # Roll, or all sources would be alike.
        out = read_all(DepthHistory(q, H, backend=backend), x, S, lambda x: x.roll(1, -1))
        copy = out.detach().double()
        (out.double() * g).sum().backward()
        return copy, q.grad.double(), x.grad.double()

    print('\nrelative error of (read, query gradient, source gradient): kernels, and PyTorch in the same dtype')
    checks = [(25, 333, 512, 8), (12, 77, 512, 1), (12, 77, 4096, 1)]
    if device == 'cpu':
        checks = [(7, 66, 48, 3), (11, 5, 32, 1)]
    for S, tokens, D, H in checks:
        exact = gradients(S, tokens, D, H, torch.float64, 'pytorch')
        for dtype in [torch.float32] if device == 'cpu' else [torch.float32, torch.float16, torch.bfloat16]:
            errors = []
            for backend in 'triton', 'pytorch':
                found = gradients(S, tokens, D, H, dtype, backend)
                errors.append('  '.join(f'{((a - b).norm() / b.norm()).item():.1e}' for a, b in zip(found, exact)))
            print(f'S={S} D={D} H={H} {str(dtype)[6:]:9}', *errors, sep='   ')
    if device == 'cpu':
        return

    def milliseconds(f, repeat=10):
        """In kernels. Launching them from Python may take longer; in training a CUDA graph launches them."""
        f()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(repeat):
                f()
            torch.cuda.synchronize()
        return sum(e.self_device_time_total for e in found.key_averages()) / repeat / 1e3

    big = torch.empty(2**30, dtype=torch.uint8, device=device)
    source = torch.empty_like(big)
    bandwidth = 2 * big.numel() / triton.testing.do_bench(lambda: big.copy_(source))        # bytes a ms
    del big, source
    print(f'\ncopy bandwidth {bandwidth / 1e9:.2f} TB/s; ms of all sites; floor: the rows at that bandwidth')
    print(f'{"shape":38} forward backward    both     rows   floor  reached   pytorch  compiled')
    for S, tokens, D, H in [(25, 16384, 512, 8), (49, 16384, 1024, 8), (73, 8192, 1280, 8), (73, 8192, 1280, 1),
                            (33, 4096, 4096, 8), (33, 4096, 4096, 1)]:
        q = (torch.randn(S, D, device=device) / (D // H) ** 0.5).requires_grad_()
        x, g = (torch.randn(tokens, D, device=device, dtype=torch.bfloat16) for _ in 'xg')
        x.requires_grad_()

        def kernels():
            return read_all(DepthHistory(q, H, backend='triton'), x, S)

        def plain():
            sources = [x]
            for s in range(S):
                sources.append(route(q[s], sources, H))
            return sources[-1]

        def both_ways(f):
            return lambda: torch.autograd.grad(f(), (q, x), g)

        forward, both = milliseconds(kernels), milliseconds(both_ways(kernels))
        rows = rows_moved(S, 2 if _Run(q, x, H, 0.0).tiles.read_group['SLICES'] > 1 else 1)
        floor = rows * tokens * D * 2 / bandwidth
        others = []                             # of the others only the first: they keep S^2 / 2 rows in fp32
        for f in (plain, torch.compile(plain)) if (S, H) == (25, 8) else ():
            try:
                others.append(f'{milliseconds(both_ways(f)):9.1f}')
            except torch.OutOfMemoryError:
                others.append(f'{"-":>9}')
        print(f'{f"S={S} D={D} H={H} {tokens} positions":38} {forward:7.2f} {both - forward:8.2f} {both:7.2f} {rows:8} '
              f'{floor:7.2f} {floor / both:8.0%}', *others, flush=True)
        torch.cuda.empty_cache()


if __name__ == '__main__':
    main()
