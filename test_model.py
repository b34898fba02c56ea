"""
The properties that the rest of the repository relies on, in the order in which a reader meets the
ideas: routing, kernels, model, data, training, sampling.

    python -m pytest -q test_model.py

Without a GPU, Triton's interpreter runs the kernels (slowly, so on few positions, and only in fp32:
its matrix product is wrong for 16 bits). With one, they run natively and in every dtype.
"""
import copy
import gc
import http.server
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault('OMP_NUM_THREADS', '1')       # at these sizes threads only wait for one another

import numpy as np
import pytest
import tiktoken
import torch
from torch.testing import assert_close

CUDA = torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'            # read when routing_kernel is imported

import prepare_data
import routing_kernel
import sample
import train
from model import GPT, KVCache, STREAMS, GainLinear, GPTConfig, NextSite
from routing_kernel import DepthHistory, GroupHistory, rms_norm, route, route_weights

MODES = list(STREAMS)
SHAPE = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=1, d_ff=64, block_size=16)
needs_gpu = pytest.mark.skipif(not CUDA, reason='needs a CUDA device')


def fresh(residual='mhar', **more):
    """A small model as initialised."""
    torch.manual_seed(0)
    heads = 4 * (residual in ('mhar', 'delta'))
    return GPT(GPTConfig(**SHAPE | dict(vocab_size=320, n_route_head=heads, residual=residual) | more))


def tiny(residual='mhar', spread=0.5, **more):
    """The same with every parameter N(0, spread): large enough that outputs differ from token to token."""
    model = fresh(residual, **more)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, spread)
    return model


def tokens(*shape):
    return torch.randint(257, shape, generator=torch.Generator().manual_seed(2))


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- what routing computes

def by_hand(query, sources, H, eps):
    """The equations of one site for one position, in plain Python: lists of D numbers in, a list of D out."""
    D = len(query)
    K, out = D // H, []
    rms = [(sum(x * x for x in s) / D + eps) ** 0.5 for s in sources]           # over the full row
    for h in range(H):
        part = range(h * K, (h + 1) * K)
        e = [np.exp(sum(query[i] * s[i] / r for i in part)) for s, r in zip(sources, rms)]
        out += [sum(w * s[i] for w, s in zip(e, sources)) / sum(e) for i in part]
    return out


@pytest.mark.parametrize('H', [1, 2, 3, 12])
@pytest.mark.parametrize('N', [1, 2, 5])
def test_route_is_the_equations(H, N):
    query, sources = draw(12), draw(N, 2, 3, 12, seed=1)
    out = route(query, list(sources), H, eps=0.1)
    for b in range(2):
        for t in range(3):
            assert out[b, t].tolist() == pytest.approx(by_hand(query.tolist(), sources[:, b, t].tolist(), H, 0.1))


def test_route_gradients_are_those_of_finite_differences():
    sources = [draw(2, 6, seed=s).requires_grad_() for s in range(3)]
    assert torch.autograd.gradcheck(lambda q, *s: route(q, s, 2), (draw(6).requires_grad_(), *sources))


def test_one_source_is_returned_as_it_is():
    s = draw(2, 3, 8, dtype=torch.bfloat16)
    assert torch.equal(route(draw(8), [s], 2), s)


def test_zero_query_reads_the_mean():
    sources = draw(5, 2, 3, 8)
    assert_close(route(torch.zeros(8), list(sources), 2), sources.mean(0))


def test_one_head_is_attention_residuals():
    """H = 1 against the two einsums of Attention Residuals (Kimi Team, 2026), over stacked sources."""
    w, V = draw(8), draw(4, 2, 3, 8, seed=1)                                    # N B T D
    K = torch.nn.functional.rms_norm(V, (8,), eps=1e-6)
    logits = torch.einsum('d, n b t d -> n b t', w, K)
    assert_close(route(w, list(V), 1), torch.einsum('n b t, n b t d -> b t d', logits.softmax(0), V))


def test_a_head_reads_only_its_own_slice_of_the_query():
    query, sources = draw(12), list(draw(4, 5, 12, seed=1))
    changed = query.clone()
    changed[4:8] += 1.0                                                         # head 1 of 3
    differs = (route(query, sources, 3) != route(changed, sources, 3)).all(0)
    assert differs.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_sixteen_bit_sources_are_mixed_in_fp32_and_rounded_once():
    query, sources = draw(8, dtype=torch.bfloat16), list(draw(6, 5, 8, dtype=torch.bfloat16))
    w = route_weights(query.float(), sources, 2)
    assert w.dtype == torch.float32 and w.shape == (6, 5, 2)
    assert_close(w.sum(0), torch.ones(5, 2))
    exact = route(query.float(), [s.float() for s in sources], 2)
    assert torch.equal(route(query.float(), sources, 2), exact.bfloat16())


def test_heads_that_do_not_divide_the_width_are_named():
    for make in (lambda: route(draw(100), [draw(100)], 3), lambda: DepthHistory(draw(5, 100), 3),
                 lambda: fresh(n_embd=100, n_route_head=3)):
        with pytest.raises(ValueError, match='3.* 100|100.* 3'):
            make()


@pytest.mark.parametrize('make', [lambda query: DepthHistory(query, 2),
                                  lambda query: GroupHistory(query, draw(3, 8, seed=3), draw(3, seed=4), 1, 2)])
def test_a_history_refuses_misuse(make):
    query, sources = draw(3, 8), list(draw(4, 5, 8, seed=1))
    history = make(query)
    history.read(sources[0])
    with pytest.raises(ValueError, match='float32'):
        history.read(draw(5, 8, dtype=torch.float32))
    with pytest.raises(ValueError, match='6, 8'):
        history.read(draw(6, 8))
    history.read(sources[1])
    history.read(sources[2])
    with pytest.raises(ValueError, match='all 3 sites'):
        history.read(sources[3])


def test_histories_read_like_route():
    """In a depth history site s reads sources 0..s; sites of a group read alike, but for a null source and a gate."""
    query, null, alpha, sources = draw(5, 8), draw(5, 8, seed=1), draw(5, seed=2), list(draw(5, 3, 8, seed=3))
    history = DepthHistory(query, 2)
    for s in range(5):
        assert torch.equal(history.read(sources[s]), route(query[s], sources[:s + 1], 2))
    history, found = GroupHistory(query, null, alpha, 2, 2), []
    for n in range(3):
        found.append(history.read(sources[n]))
    assert [len(reads) for reads in found] == [2, 2, 1]
    for s, read in enumerate(sum(found, [])):
        assert_close(read, alpha[s] * route(query[s], [null[s].expand(3, 8), *sources[:s // 2 + 1]], 2))


# ---- the kernels: the same reads and gradients as `route`

@pytest.fixture
def kernels(monkeypatch):
    if routing_kernel.triton is None:
        pytest.skip('Triton is not installed')
    if not CUDA:
        monkeypatch.setattr(routing_kernel._Run, 'SHARES', 2)                   # each is a program, and those are slow
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)                    # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(before)


# A case is a function of leaves and backend that reads a whole history, its leaves, and one gradient per read, of
# values that the dtype can hold. As in a network, a source depends on the read before it. eps is large enough to be
# missed, a query so large that logits are about 1.

def parameters(*shape, dtype, device, seed=0, scale=1.0):
    return (draw(*shape, seed=seed) * scale).to(device, dtype).float().requires_grad_()


def tensors(count, *shape, dtype, device, seed):
    return list(draw(count, *shape, dtype=dtype, seed=seed).to(device))


def depth_case(plan, *shape, H, dtype=torch.float32, device=DEVICE):
    """The sites of a depth history, one letter each: r reads, n reads normalised."""
    S, on = len(plan), dict(dtype=dtype, device=device)

    def read(leaves, backend='triton'):
        query, *sources = leaves
        history, out = DepthHistory(query, H, 0.1, backend), []
        for step, x in zip(plan, sources, strict=True):
            out.append(history.read(x + torch.tanh(out[-1]) if out else x, norm=step == 'n'))
        return out

    query = parameters(S, shape[-1], scale=2 * shape[-1] ** -0.5, **on)
    sources = tensors(S, *shape, seed=1, **on)
    return read, [query, *(x.requires_grad_() for x in sources)], tensors(S, *shape, seed=2, **on)


def group_case(S, size, *shape, H, dtype=torch.float32, device=DEVICE):
    """S sites in groups of size."""
    D, on = shape[-1], dict(dtype=dtype, device=device)

    def read(leaves, backend='triton'):
        query, null, alpha, *sources = leaves
        history, out = GroupHistory(query, null, alpha, size, H, 0.1, backend), []
        for x in sources:
            out += history.read(x + torch.tanh(out[-1]) if out else x)
        return out

    leaves = [parameters(S, D, scale=2 * D ** -0.5, **on), parameters(S, D, seed=3, **on), parameters(S, seed=4, **on)]
    sources = tensors(-(-S // size), *shape, seed=1, **on)
    return read, leaves + [x.requires_grad_() for x in sources], tensors(S, *shape, seed=2, **on)


def gradients(out, leaves, douts):
    return torch.autograd.grad(out, leaves, douts, materialize_grads=True)


def reads_and_gradients(read, leaves, douts, backend='triton'):
    out = read(leaves, backend)
    return [*(x.detach().clone() for x in out), *gradients(out, leaves, douts)]


def check_kernels(case, dtype=torch.float32):
    """
    Off from fp64 by at most twice what PyTorch's own operations are off in this dtype: every read, every
    gradient. In 16 bits those of parameters by three units of rounding more: of a gate because it is one number, of the
    query of a depth history since delta is taken from the rounded read (it shows with two sources, not with eight).
    """
    read, leaves, douts = case
    double = [x.detach().double().requires_grad_() for x in leaves]
    exact = reads_and_gradients(read, double, [x.double() for x in douts], 'pytorch')
    plain, ours = (reads_and_gradients(read, leaves, douts, backend) for backend in ('pytorch', 'triton'))
    for i, (e, p, o) in enumerate(zip(exact, plain, ours, strict=True)):
        assert o.dtype == p.dtype and o.shape == p.shape
        off = [((x.double() - e).norm() / e.norm().clamp(min=1)).item() for x in (p, o)]
        more = 1.5 * torch.finfo(dtype).eps if (i == len(douts) or o.ndim == 1) and dtype != torch.float32 else 2e-6
        name = f'read {i}' if i < len(douts) else f'gradient {i - len(douts)}'
        assert off[1] <= 2 * off[0] + more, f'{name}: off by {off[1]:.1e}, PyTorch by {off[0]:.1e}'


DTYPES = [torch.float32] + [torch.bfloat16, torch.float16] * CUDA
POSITIONS = (3, 67) if CUDA else (1, 3)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('plan, D, H', [
    ('n', 100, 1), ('rr', 384, 3), ('nnn', 768, 4), ('nrn', 8, 8), ('nr', 12, 3), ('rrr', 16, 2), ('rn', 96, 1),
    ('nn', 320, 2), ('r' * 20, 32, 2), ('n' * 20, 32, 2)])                      # K 100 128 192 1 4 8 96 160 16
def test_kernels_for_any_width_and_depth(kernels, plan, D, H, dtype):
    check_kernels(depth_case(plan, *POSITIONS, D, H=H, dtype=dtype), dtype)


@pytest.mark.parametrize('plan, D, H, widest', [
    ('rnnr', 72, 3, 1280), ('rrrrnr', 280, 1, 1280), ('nr' * 9 + 'n', 16, 2, 1280), ('r' * 21, 15, 3, 1280),
    ('rrnrrr', 200, 1, 50), ('r' * 18, 64, 2, 8), ('rrrrrr', 700, 1, 512)])     # the last three in slices
def test_two_phases(kernels, monkeypatch, plan, D, H, widest):
    """Groups of two sites make several groups of a short plan; 21 sites, more than a block of far ones."""
    for name, value in dict(C=2, FEW=1, WHOLE=widest, SLICE=widest).items():
        monkeypatch.setattr(routing_kernel._Run, name, value)
    check_kernels(depth_case(plan, *(POSITIONS if len(plan) < 9 and D < 500 else (1, 3)), D, H=H))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('S, size, D, H', [
    (5, 4, 100, 1), (3, 1, 384, 3), (4, 2, 12, 3), (2, 1, 8, 8), (6, 6, 96, 1), (3, 2, 320, 2),
    (11, 10, 32, 2), (10, 1, 32, 2), (2, 2, 352, 1)])           # ten sites: two launches; ten sources: a larger tile
def test_sites_that_share_sources_for_any_width(kernels, S, size, D, H, dtype):
    check_kernels(group_case(S, size, *POSITIONS, D, H=H, dtype=dtype), dtype)


def test_more_sources_than_a_tile_holds(kernels, capsys):
    """PyTorch takes over and says so; asked for, the kernels are an error."""
    read, leaves, _ = group_case(26, 1, 2, 8, H=2)
    with pytest.raises(RuntimeError, match='groups are too many'):
        read(leaves)
    routing_kernel.use_triton.cache_clear()
    assert_close(read(leaves, 'auto'), read(leaves, 'pytorch'))
    assert 'routing: pytorch (' + ('delta: a head' if CUDA else 'Triton only interprets') in capsys.readouterr().err


either_history = pytest.mark.parametrize('make', [
    lambda *shape, H=2, **on: depth_case('rrrr', *shape, H=H, **on),
    lambda *shape, H=2, **on: group_case(8, 2, *shape, H=H, **on)], ids=['depth', 'group'])


@either_history
def test_zero_rows(kernels, make):
    read, leaves, douts = make(0, 3, 32)
    *out, dq = reads_and_gradients(read, leaves, douts)[:len(douts) + 1]
    assert all(x.shape == (0, 3, 32) for x in out) and dq.shape == leaves[0].shape and dq.abs().max() == 0


@either_history
def test_memory_layout_does_not_matter(kernels, make):
    read, leaves, douts = make(2, 2, 32)
    first = len(leaves) - 4                                                     # of four sources

    def with_layout(f):
        parts = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in leaves[:first]]
        return reads_and_gradients(read, parts + [f(x.detach()).requires_grad_() for x in leaves[first:]],
                                   [f(x) for x in douts])

    rows = lambda x: x[:1].expand(2, 2, 32)                                     # the batch repeats one row
    for layout, like in ((lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x),
                         (lambda x: x.repeat(1, 1, 3)[:, :, 32:64], lambda x: x),
                         (rows, lambda x: rows(x).contiguous())):
        assert not layout(leaves[-1]).is_contiguous()
        assert all(map(torch.equal, with_layout(layout), with_layout(like)))


@either_history
@pytest.mark.parametrize('frozen', ['parameters', 'sources', 'first sources', 'all but the last source'])
def test_frozen_inputs(kernels, make, frozen):
    read, leaves, douts = make(3, 32)
    first = len(leaves) - 4
    for i, x in enumerate(leaves):
        x.requires_grad_(not (i in {'parameters': range(first), 'sources': range(first, first + 4), 'first sources':
                                    range(first, first + 2)}.get(frozen, range(first + 3))))
    live = [x for x in leaves if x.requires_grad]
    assert_close(*(gradients(read(leaves, backend)[-1:], live, douts[-1:]) for backend in ('triton', 'pytorch')))


@either_history
def test_loss_on_some_reads_only(kernels, make):
    read, leaves, douts = make(3, 32)
    for some in ([-1], [1, 2], [0, 3]):
        a, b = ([read(leaves, backend)[s] for s in some] for backend in ('triton', 'pytorch'))
        assert_close(*(gradients(out, leaves, [douts[s] for s in some]) for out in (a, b)))


@either_history
def test_histories_do_not_share_memory(kernels, make):
    """Two forwards before a backward, and one whose backward never comes, are as if each had been alone."""
    read, leaves, douts = make(3, 32)
    cases = leaves, leaves[:-1] + [(2 * leaves[-1].detach()).requires_grad_()]
    alone = [gradients(read(case), case, douts) for case in cases]
    first, second = (read(case) for case in cases)
    read(leaves)
    assert all(map(torch.equal, gradients(first, cases[0], douts), alone[0]))
    assert all(map(torch.equal, gradients(second, cases[1], douts), alone[1]))


@either_history
def test_backward_twice(kernels, make):
    """As anywhere in PyTorch: with retain_graph it gives the same again, without it is an error."""
    read, leaves, douts = make(2, 16, H=1)
    out, expected = (read(leaves, backend) for backend in ('triton', 'pytorch'))

    def some(out, these):                       # a part of the reads, also an earlier one after a later one
        return torch.autograd.grad([out[s] for s in these], leaves, [douts[s] for s in these],
                                   retain_graph=True, materialize_grads=True)

    for these in [0, 1, 2, 3], [1], [0, 3], [2]:
        assert_close(some(out, these), some(expected, these))
    first, again = gradients(out, leaves, douts), lambda: gradients(out, leaves, douts)
    assert_close(first, some(expected, range(len(out))))
    pytest.raises(RuntimeError, again).match('second time')


@either_history
def test_a_backward_that_was_interrupted_leaves_nothing_behind(kernels, make):
    read, leaves, douts = make(2, 16, H=1)
    expected = gradients(read(leaves)[:2], leaves, douts[:2])
    out = read(leaves)

    def fail(grad):
        raise ZeroDivisionError

    handle = out[1].register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(out, leaves, douts, retain_graph=True)
    handle.remove()
    assert_close(gradients(out[:2], leaves, douts[:2]), expected)           # nothing of the later sites, seen before


@pytest.mark.parametrize('which', ['source', 'read'])
def test_what_backward_needs_may_not_be_modified(kernels, which):
    history = DepthHistory(parameters(2, 16, dtype=torch.float32, device=DEVICE), 1, backend='triton')
    source = torch.ones(2, 16, device=DEVICE, requires_grad=True) * 2
    out = history.read(source)
    loss = out.sum()
    with torch.no_grad(), pytest.raises(RuntimeError, match='modified by an inplace|modified inplace'):
        (source if which == 'source' else out).mul_(2)
        with torch.enable_grad():
            loss.backward()


@pytest.mark.parametrize('first, D', [(1, 40), (1, 32)])
def test_a_query_that_is_a_slice_and_changes_before_backward(kernels, first, D):
    """The kernels take it as it was when the first site read."""
    read, (query, *sources), douts = depth_case('rrr', 2, D, H=2)
    expected = gradients(read([query, *sources], 'pytorch'), [query, *sources], douts)
    whole = torch.zeros(4 + len(query), D, device=DEVICE)
    whole[first:first + len(query)] = query.detach()
    leaves = [whole[first:first + len(query)].requires_grad_(), *sources]
    out = read(leaves)
    with torch.no_grad():
        whole.mul_(2)
    assert_close(gradients(out, leaves, douts), expected)


@either_history
def test_second_derivatives_are_refused(kernels, make):
    read, leaves, _ = make(2, 16, H=1)
    with pytest.raises(RuntimeError, match='no second derivatives'):
        torch.autograd.grad(read(leaves)[-1].sum(), leaves[0], create_graph=True)


def test_backward_frees_what_only_it_needed(kernels):
    """Also while somebody keeps the loss, and with a query that is not trained."""
    _, (query, x, _), _ = depth_case('rr', 2, 16, H=1)
    history = DepthHistory(query.detach(), 1, backend='triton')
    first, run = x * 2, None
    memory = weakref.ref(first.untyped_storage())
    loss, run = history.read(torch.tanh(history.read(first))).sum(), history.run
    del history, first
    assert memory() is not None
    loss.backward()
    assert memory() is None and not hasattr(run, 'PART')


def test_nothing_outlives_a_history(kernels):
    """No reference cycle runs through the graph, where Python's collector could not see it."""
    _, (query, x, _), _ = depth_case('rr', 2, 16, H=1)
    gc.disable()
    try:
        history = DepthHistory(query, 1, backend='triton')
        out = history.read(torch.tanh(x))
        loss, alive = history.read(torch.tanh(out)).sum(), weakref.ref(history.run)
        loss.backward()
        del history, out, loss
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize('make', [lambda query: DepthHistory(query, 1, backend='triton'),
                                  lambda query: GroupHistory(query, query, query[:, 0], 1, 1, backend='triton')])
def test_a_history_is_read_with_gradients_or_without(kernels, make):
    _, (query, *sources), _ = depth_case('rr', 2, 16, H=1)
    history = make(query)
    with torch.no_grad():
        history.read(sources[0])
    with pytest.raises(RuntimeError, match='under no_grad, not both'):
        history.read(sources[1])


def test_the_only_source_has_a_zero_query_gradient(kernels):
    """Not a missing one: every process of a distributed run must find a gradient."""
    read, leaves, douts = depth_case('r', 3, 32, H=2)
    dq, ds = gradients(read(leaves), leaves, douts)
    assert dq.abs().max() < 1e-5 and torch.allclose(ds, douts[0])


@either_history
def test_no_grad(kernels, make):
    """As in generation: one token at a time."""
    read, leaves, _ = make(1, 1, 32)
    expected = read(leaves, 'pytorch')
    with torch.no_grad():
        out = read(leaves)
    assert_close(out, [x.detach() for x in expected])
    assert not any(x.requires_grad for x in out)


@needs_gpu
@pytest.mark.parametrize('case', [depth_case('r' * 20, 3, 67, 96, H=2, dtype=torch.bfloat16),
                                  group_case(20, 3, 3, 67, 96, H=2, dtype=torch.bfloat16)] if CUDA else [None] * 2)
def test_kernels_repeat_bitwise(kernels, case):
    first, *others = (reads_and_gradients(*case) for _ in range(20))            # the first compiles
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@needs_gpu
@pytest.mark.parametrize('S, size, rows, gib', [(33, None, 64 * 1024, 40), (2, None, 66 * 32768, 110),
                                                (2, 2, 66 * 32768, 60), (6, 3, 22 * 32768, 60)])
def test_offsets_beyond_31_bits(kernels, S, size, rows, gib):
    """The last positions read and get gradients as they do on their own, where offsets are small."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f'needs {gib} GiB of free GPU memory')
    options = dict(device=DEVICE, dtype=torch.bfloat16)
    query, null, alpha = (draw(*shape, seed=i).to(DEVICE, torch.float32).requires_grad_()
                          for i, shape in enumerate(((S, 1024), (S, 1024), (S,))))
    sources = [torch.randn(rows, 1024, **options).requires_grad_() for _ in range(-(-S // (size or 1)))]
    dout = torch.zeros(rows, 1024, **options)
    dout[-1] = draw(1024)
    last = [s.detach()[-128:].clone().requires_grad_() for s in sources]
    results = []
    for xs, do in (sources, dout), (last, dout[-128:]):
        history = (GroupHistory(query, null, alpha, size, 8, backend='triton') if size else
                   DepthHistory(query, 8, backend='triton'))
        for x in xs:
            out = history.read(x)
        out = out[-1] if size else out
        value = out.detach()[-1].clone()
        dq, *ds = torch.autograd.grad(out, [query, *xs], do)
        results.append([value, dq, *(d[-1].clone() for d in ds)])
        assert all(d[:-1].count_nonzero() == 0 for d in ds)
        del history, out, ds
    assert_close(*results, rtol=1e-4, atol=1e-5)


@needs_gpu
@either_history
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
def test_another_than_the_current_device(kernels, make):
    a, b = (reads_and_gradients(*make(3, 32, device=d)) for d in ('cuda:0', 'cuda:1'))
    assert all(torch.equal(x.cpu(), y.cpu()) and y.device.index == 1 for x, y in zip(a, b, strict=True))


@needs_gpu
@pytest.mark.parametrize('case', [depth_case('r' * 10, 2, 67, 64, H=4), group_case(10, 3, 2, 67, 64, H=4)])
def test_forward_and_backward_as_one_cuda_graph(kernels, case):
    read, leaves, douts = case
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        reads_and_gradients(*case)                                              # compiles
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        replayed = reads_and_gradients(*case)
    for x in leaves[-4:]:
        x.data.copy_(x.detach().flip(0))
    graph.replay()
    assert all(map(torch.equal, replayed, reads_and_gradients(*case)))


# ---- the model

def loss_and_gradients(model, idx):
    loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize('residual', MODES[1:])
def test_at_initialisation_every_mode_is_the_standard_model(residual):
    """
    A zero query reads the mean, which is the running sum over a number, and every reader normalises first.
    A closed gate reads the running sum itself, equal hyper-connections sum to four times that.
    """
    models = [fresh(mode, norm_eps=1e-12, n_embd=256).double() for mode in ('standard', residual)]
    a, b = (model(tokens(2, 16)) for model in models)
    assert (a - b).abs().max() < 1e-8 and a.std() > 0.1


def test_embed_scale_changes_only_what_enters_the_stream():
    """The logits come from the tied matrix as it is."""
    idx = tokens(2, 5)
    plain, scaled = fresh('standard').double(), fresh('standard', embed_scale=3.0).double()
    assert_close(scaled.embed(idx), 3 * plain.embed(idx))
    assert torch.equal(scaled.head(plain.embed(idx)), plain.head(plain.embed(idx)))
    assert not torch.allclose(scaled(idx), plain(idx))


@pytest.mark.parametrize('H', [1, 2, 8])
def test_routing_heads_are_free(H):
    """2 D (2L + 1) parameters more than standard, for any H."""
    count = {mode: sum(p.numel() for p in fresh(mode, n_route_head=h).parameters())
             for mode, h in (('standard', 0), ('attnres', 1), ('mhar', H))}
    assert count['attnres'] == count['mhar'] == count['standard'] + 2 * 32 * (2 * 2 + 1)


def test_shapes_that_cannot_be_built_are_refused():
    for wrong, message in ((dict(residual='attnres', n_route_head=4), 'one routing head'), (dict(n_head=3), 'n_head=3'),
                           (dict(residual='none'), 'standard, attnres, mhar'), (dict(n_kv_head=4), 'n_kv_head=4')):
        with pytest.raises(ValueError, match=message):
            fresh(**wrong)
    with pytest.raises(ValueError, match='17 tokens.*block_size=16'):
        fresh()(tokens(1, 17))
    assert pickle.loads(pickle.dumps(fresh().config)) == fresh().config


@pytest.mark.parametrize('residual', MODES)
def test_no_position_sees_a_later_one(residual):
    model, idx = tiny(residual).to(DEVICE), tokens(2, 16).to(DEVICE)
    changed = idx.clone()
    changed[:, 9] += 1
    differs = ((model(idx) - model(changed)).abs() > 1e-3).any(-1)
    assert not differs[:, :9].any() and differs[:, 9:].all()


@torch.no_grad()
@pytest.mark.parametrize('residual', MODES)
def test_cache_gives_the_same_logits(residual):
    model, idx = tiny(residual).to(DEVICE), tokens(2, 16).to(DEVICE)
    cache = KVCache(model, 2)
    parts = [model(part, cache=cache) for part in idx.split([5, 1, 1, 7, 2], 1)]
    assert_close(torch.cat(parts, 1), model(idx), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('residual', MODES)
def test_one_batch_is_learned_by_heart(residual):
    model, idx = fresh(residual).to(DEVICE), tokens(4, 17).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        loss, _ = loss_and_gradients(model, idx)
        optimizer.step()
    assert loss < 0.05
    if 'query' in model.stream:
        assert model.stream.query[1:].abs().amax(1).min() > 0.01     # every site has learned


def test_first_site_has_a_zero_gradient_not_a_missing_one():
    _, grads = loss_and_gradients(fresh().to(DEVICE), tokens(2, 17).to(DEVICE))
    assert grads['stream.query'][0].abs().max() < 1e-9 < 1e-6 < grads['stream.query'][1:].abs().amax(1).min()
    assert all(g is not None for g in grads.values())


@pytest.mark.parametrize('grad', [True, False])
def test_gains_scale_what_the_matrices_read(grad):
    """A norm's gain sits in the linear map behind it: on the weight in training, on the input in inference."""
    model = tiny().double()
    assert [name for name, m in model.named_modules() if isinstance(m, GainLinear)] == [
        'blocks.0.attn.qkv', 'blocks.0.mlp.up', 'blocks.1.attn.qkv', 'blocks.1.mlp.up', 'head.linear']
    assert all(p.min() == p.max() == 1 for p in fresh().parameters() if p.ndim == 1)
    for name in 'blocks.1.attn.qkv', 'blocks.1.mlp.up', 'head.linear':
        m, x = model.get_submodule(name), draw(5, 32).requires_grad_()
        with torch.set_grad_enabled(grad):
            ours = m(x)
        plain = torch.nn.functional.linear(m.gain * x, m.weight)
        assert_close(ours, plain.detach())
        if grad:
            assert_close(*(torch.autograd.grad((y ** 2).sum(), (x, m.gain, m.weight)) for y in (ours, plain)))


@pytest.mark.parametrize('residual', MODES)
@pytest.mark.parametrize('weights, autocast', [('float32', None), ('float32', 'bfloat16'), ('float32', 'float16'),
                                               ('bfloat16', None)])
def test_dtypes(residual, weights, autocast):
    """The stream has the compute dtype in every mode, standard too; a gradient has its parameter's."""
    exact, _ = loss_and_gradients(fresh(residual).to(DEVICE), tokens(2, 17).to(DEVICE))
    model, seen = fresh(residual).to(DEVICE, getattr(torch, weights)), set()

    class Watched(model.stream_class):
        def read(self):
            x = super().read()
            seen.add(x.dtype)
            return x
    model.stream_class = Watched
    with torch.autocast(DEVICE, getattr(torch, autocast or weights), enabled=autocast is not None):
        idx = tokens(2, 17).to(DEVICE)
        loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    assert seen == {getattr(torch, autocast or weights)} and loss.item() == pytest.approx(exact, rel=2e-3)
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


def test_a_copy_of_the_model_is_its_own():
    model, idx = tiny(), tokens(2, 8)
    twin, before = copy.deepcopy(model), model(idx)
    twin.stream.query.data += 1.0
    assert torch.equal(model(idx), before) and not torch.allclose(twin(idx), before)


class Halving:
    """What a reader may write: an older output counts half as much with every sublayer, times a learned gain."""

    @staticmethod
    def parameters(config):
        return {'strength': torch.ones(config.n_embd)}

    def __init__(self, x, p, config):
        self.x, self.strength = x, p['strength']

    def read(self):
        return rms_norm(self.x)

    def append(self, y):
        self.x = 0.5 * self.x + self.strength * y


def test_a_stream_of_ones_own_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(STREAMS, 'halving', Halving)
    checkpoint, records = run_train(tmp_path, '--residual=halving', '--n_route_head=0', '--lr=1e-2')
    assert records[-1]['val_loss'] < records[0]['loss'] - 0.5
    assert (checkpoint['model']['stream.strength'] - 1).abs().max() > 1e-3


@needs_gpu
@pytest.mark.parametrize('residual', ['standard', 'mhar', 'delta', 'hyper'])
def test_compiled_is_eager_also_for_another_length(residual):
    eager, compiled = (tiny(residual, spread=0.1).to(DEVICE) for _ in range(2))
    compiled.compile_parts()
    torch._dynamo.utils.counters.clear()
    for T in (16, 11, 13, 16, 7):
        idx = tokens(2, T + 1).to(DEVICE)
        (a, da), (b, db) = (loss_and_gradients(model, idx) for model in (eager, compiled))
        assert a == pytest.approx(b, rel=1e-4)
        assert_close(da, db, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] <= 20


# ---- delta and hyper-connections

def grafted(residual, standard, **more):
    """A model whose weights are those of the standard one; what it learns beside them is as initialised."""
    model = fresh(residual, **more)
    model.load_state_dict(model.state_dict() | standard.state_dict())
    return model


@torch.no_grad()
@pytest.mark.parametrize('weights, autocast', [('float32', None), ('float32', 'bfloat16'), ('float32', 'float16'),
                                               ('bfloat16', None)])
def test_a_closed_gate_is_the_standard_model_bit_for_bit(weights, autocast):
    """Whatever the queries: logits, loss, and generation through the cache, down to one token."""
    standard = tiny('standard', spread=0.2)
    model, idx = grafted('delta', standard), tokens(2, 17).to(DEVICE)
    for name in 'query', 'gain', 'null':
        torch.nn.init.normal_(model.stream[name])
    standard, model = (m.to(DEVICE, getattr(torch, weights)) for m in (standard, model))
    with torch.autocast(DEVICE, getattr(torch, autocast or weights), enabled=autocast is not None):
        for x, y in (idx[:, :-1], idx[:, 1:]), (idx[:, :-1], None), (idx[:1, :1], None):
            assert torch.equal(standard(x, y), model(x, y))
        caches = [KVCache(m, 2) for m in (standard, model)]
        for part in idx[:, :-1].split([5, 1, 1, 7, 2], 1):
            assert torch.equal(standard(part, cache=caches[0]), model(part, cache=caches[1]))
        model.stream.alpha.fill_(0.1)
        assert not torch.equal(standard(idx[:, :-1]), model(idx[:, :-1]))


@pytest.mark.parametrize('L, n_depth_group', [(1, 8), (2, 8), (5, 2), (5, 3), (3, 1)])
def test_delta_is_the_equations(L, n_depth_group):
    """One operation after the other, with `route` over [null, embedding, finished groups]; groups may be short."""
    model, idx = tiny('delta', n_layer=L, n_depth_group=n_depth_group).double(), tokens(2, 9)
    p, size = model.stream, -(-L // n_depth_group)
    x = model.embed(idx)
    sources, group = [x], 0
    for s in range(2 * L):
        block, kind = model.blocks[s // 2], ('attn', 'mlp')[s % 2]
        out = route(p.query[s] * p.gain[s], [p.null[s].expand_as(x), *sources], 4)
        h = rms_norm(x + p.alpha[s] * out)
        y = block.attn(h, model.cos[:9], model.sin[:9]) if kind == 'attn' else block.mlp(h)
        x, group = x + y, group + y
        if (s + 1) % (2 * size) == 0:
            sources, group = sources + [group], 0
    assert_close(model(idx), model.head(rms_norm(x)))


def test_delta_reads_alike_with_the_kernels(kernels):
    """Two groups of sites, and the gradients that pass from one to the next, as a model has them."""
    idx = tokens(2, 6).to(DEVICE)
    a, b = (loss_and_gradients(tiny('delta', spread=0.2, n_layer=3, n_depth_group=2, routing=routing).to(DEVICE), idx)
            for routing in ('triton', 'pytorch'))
    assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_site_of_delta_and_its_gradient():
    """y and out may be missing."""
    stream = STREAMS['delta'](draw(3, 8), fresh('delta', n_embd=8).double().stream, fresh('delta', norm_eps=0.1).config)
    tensors = [draw(3, 8, seed=i).requires_grad_() for i in range(3)]
    for x, y, out in itertools.product(*([t, None][:1 + (i > 0)] for i, t in enumerate(tensors))):
        given = [t for t in (x, y, out) if t is not None]
        step = lambda *_: NextSite.apply(stream, x, y, out)
        assert torch.equal(step()[0], x if y is None else x + y)
        assert_close(step()[1], rms_norm(sum(given), 0.1))
        assert torch.autograd.gradcheck(step, given)


def test_the_gate_learns_first_then_what_is_behind_it():
    """
    At first only alpha has a gradient, the others a zero, not a missing one; after three steps no site has a zero.
    (The first site's alpha starts with little: half an embedding, added to it, only scales what the norm removes.)
    """
    model, idx = grafted('delta', tiny('standard', spread=0.2)).double(), tokens(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        _, grads = loss_and_gradients(model, idx)
        size = {name: grads[f'stream.{name}'].abs().reshape(4, -1).amax(1) for name in model.stream}    # of each site
        if step == 0:
            assert size.pop('alpha').min() > 1e-9 and max(s.max() for s in size.values()) == 0
        optimizer.step()
    assert all(s.min() > 1e-9 for s in size.values()), size


def test_every_hyper_connection_learns():
    """A read of equal streams only scales what the norm removes, so reads wait until the streams differ."""
    model, idx = fresh('hyper', n_layer=3).double(), tokens(4, 17)
    assert torch.equal(model.stream.read, torch.eye(4).double()[[0, 1, 2, 3, 0, 1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        _, grads = loss_and_gradients(model, idx)
        size = {name: g.abs().min() for name, g in grads.items() if 'stream' in name}
        assert min(size['stream.mix'], size['stream.write']) > 1e-9 and (step == 0 or size['stream.read'] > 1e-9), size
        optimizer.step()


@pytest.mark.parametrize('residual', MODES)
def test_a_compiled_model_can_be_copied(residual):
    model = tiny(residual).to(DEVICE)
    config = pickle.dumps(model.config)
    model.compile_parts()                                            # it would compile at the first call: none is made
    assert pickle.dumps(model.config) == config
    twin, idx = copy.deepcopy(model), tokens(2, 8).to(DEVICE)
    with torch.compiler.set_stance('force_eager'):
        assert torch.equal(twin(idx), tiny(residual).to(DEVICE)(idx))
        assert twin.state_dict().keys() == model.state_dict().keys() == tiny(residual).state_dict().keys()


# ---- prepare_data.py

@pytest.fixture
def server(monkeypatch):
    """A loopback web server that sends .body, at most .cut bytes per connection, heeding Range if .ranges."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            start = int(self.headers.get('Range', 'bytes=0-')[6:-1]) if server.ranges else 0
            server.asked.append(self.headers.get('Range'))
            if start >= len(server.body):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header('Content-Length', str(len(server.body) - start))
            self.end_headers()
            self.wfile.write(server.body[start:start + server.cut])

        def log_message(self, *args):
            pass

    monkeypatch.setenv('no_proxy', '127.0.0.1')
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.body, server.cut, server.ranges, server.asked = bytes(range(256)) * 40, 1 << 30, True, []
    server.url = f'http://127.0.0.1:{server.server_address[1]}/file'
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def prepare(tmp_path):
    """Run the command line; the exit code or message if it fails, else {split: (tokens, meta)}."""
    def call(*flags, name='mine'):
        try:
            prepare_data.main([*flags, f'--data_dir={tmp_path}', f'--name={name}'])
        except SystemExit as e:
            return e.code
        return {split: prepare_data.load_tokens(tmp_path / name, split) for split in ('train', 'val')}
    return call


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f'{name}.txt').write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


ALL_CHARACTERS = ''.join(map(chr, [*range(0xd800), *range(0xe000, 0x11000)]))


@pytest.mark.parametrize('text', ['', 'a\r\n\0b', 'e\u0301 \U0001f600', 'x <|endoftext|> y', ALL_CHARACTERS])
def test_byte_tokenizer_is_utf8(text):
    enc = prepare_data.get_tokenizer('byte')
    ids = enc.encode_ordinary(text)
    assert ids == list(text.encode()) and enc.decode(ids) == text
    assert (enc.eot_token, enc.n_vocab) == (256, 257)


def test_one_end_of_text_per_document(tmp_path, prepare):
    write(tmp_path / 'in' / '.hidden', d='secret')
    folder = write(tmp_path / 'in', a='x<|endoftext|>y', b='two', c=b'\xff\xfe bad', empty='', binary=b'a\0b')
    (train, meta), (val, _) = prepare('--input', folder).values()
    assert (meta['train_documents'], meta['val_documents']) == (2, 1) and train[-1] == val[-1] == 256
    texts = bytes(0 if i == 256 else i for i in [*train, *val]).decode().split('\0')
    assert sorted(texts) == ['', 'two', 'x<|endoftext|>y', '\ufffd\ufffd bad']


def test_split_does_not_depend_on_where_the_folder_is(tmp_path, prepare):
    files = {f'f{i}': f'text {i}' for i in range(200)}
    here, there = (prepare('--input', write(tmp_path / place, **files)) for place in ('here', 'there'))
    assert all(np.array_equal(here[split][0], there[split][0]) for split in here)
    assert 1 <= here['val'][1]['val_documents'] <= 12  # about 2% of 200


def test_large_vocabulary_is_stored_in_32_bits(tmp_path, prepare, monkeypatch):
    ranks = {bytes([i]): 70000 + i for i in range(256)}
    enc = tiktoken.Encoding('big', pat_str='(?s:.)', mergeable_ranks=ranks,
                            special_tokens={'<|endoftext|>': 99999})
    monkeypatch.setattr(prepare_data, 'get_tokenizer', lambda name: enc)
    # one file: its last 10% is validation
    (train, meta), (val, _) = prepare('--input', write(tmp_path / 'in', a='a' * 18 + 'bb')).values()
    assert (meta['dtype'], meta['vocab_size'], train.dtype) == ('uint32', 100000, np.uint32)
    assert train.tolist() == [70097] * 18 + [99999] and val.tolist() == [70098] * 2 + [99999]


def test_missing_and_damaged_sets_are_named(tmp_path, prepare):
    with pytest.raises(FileNotFoundError, match='prepare_data.py --dataset=stdlib'):
        prepare_data.load_tokens(tmp_path / 'stdlib', 'train')
    prepare('--input', write(tmp_path / 'in', a='x' * 20))
    with open(tmp_path / 'mine' / 'train.bin', 'ab') as f:
        f.write(b'\0\0')
    with pytest.raises(ValueError, match='train.bin holds 20 tokens, meta.json says 19'):
        prepare_data.load_tokens(tmp_path / 'mine', 'train')
    for damaged in '', '{}', '[]', '{"dtype": "int16", "train_tokens": 20, "vocab_size": 257}':
        (tmp_path / 'mine' / 'meta.json').write_text(damaged)
        with pytest.raises(ValueError, match='meta.json is damaged'):
            prepare_data.load_tokens(tmp_path / 'mine', 'train')


@pytest.mark.parametrize('cut, ranges', [(4000, True), (1 << 30, True), (1 << 30, False)])
def test_download_resumes_or_restarts(tmp_path, server, cut, ranges):
    server.cut, server.ranges = cut, ranges
    (tmp_path / 'file.part').write_bytes(server.body[:1000])
    prepare_data.download(server.url, tmp_path / 'file')
    assert (tmp_path / 'file').read_bytes() == server.body and not (tmp_path / 'file.part').exists()
    assert server.asked[0] == 'bytes=1000-'


@pytest.mark.parametrize('name', ['file', 'file.part'])
@pytest.mark.parametrize('length', [5000, 10240, 20000])  # shorter than the file, as long, longer
def test_damaged_cache_is_downloaded_again(tmp_path, server, name, length):
    def check(path):
        if path.read_bytes() != server.body:
            raise ValueError(f'{path} is damaged')

    (tmp_path / name).write_bytes(b'?' * length)
    prepare_data.download(server.url, tmp_path / 'file', check)
    assert (tmp_path / 'file').read_bytes() == server.body


def test_no_network_is_one_sentence(tmp_path, prepare, server, monkeypatch):
    server.cut = 10  # every connection ends early; what has arrived is kept
    with pytest.raises(RuntimeError, match='closed after 50 of 10,240 bytes.*resume.*--dataset=stdlib'):
        prepare_data.download(server.url, tmp_path / 'file')
    assert (tmp_path / 'file.part').stat().st_size == 50
    monkeypatch.setattr(prepare_data, 'FINEWEB_EDU', 'http://127.0.0.1:9/')
    assert 'cannot download' in prepare('--dataset=fineweb_edu')
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: 1 / 0)
    assert 'TIKTOKEN_CACHE_DIR' in prepare('--tokenizer=gpt2')
    assert 'unknown tokenizer' in prepare('--tokenizer=gtp2')


def test_fineweb_shards_are_checked_and_joined(tmp_path, prepare, server, monkeypatch):
    ids = [50256, 1, 2, 50256, 3]
    header = np.array([20240520, 1, 5] + [0] * 253, np.int32)
    server.body = header.tobytes() + np.array(ids, np.uint16).tobytes()
    monkeypatch.setattr(prepare_data, 'FINEWEB_EDU', server.url)
    cache = tmp_path / 'mine' / 'download'
    cache.mkdir(parents=True)
    (cache / 'finewebedu_train_000001.bin').write_bytes(bytes(10))  # no header
    (cache / 'finewebedu_train_000002.bin').write_bytes(server.body[:-2])  # shorter than its header says
    (train, meta), (val, _) = prepare('--dataset=fineweb_edu', '--shards=2').values()
    assert train.tolist() == ids * 2 and val.tolist() == ids and meta['train_documents'] == 4
    assert (meta['tokenizer'], meta['vocab_size'], meta['eot']) == ('gpt2', 50257, 50256)


def test_bin_files(tmp_path, prepare):
    a, b, bad = (str(tmp_path / name) for name in ('a', 'b', 'bad'))
    for path, ids in (a, range(200)), (b, range(10)), (bad, [1, 2, 50257]):
        np.array(ids, dtype=np.uint16).tofile(path)
    for files, sizes in ([a], [198, 2]), ([a, b], [200, 10]), ([a, b, b], [210, 10]):
        assert [len(tokens) for tokens, _ in prepare('--bin', *files).values()] == sizes
    assert 'bad: id 50257 at position 2 is not below vocabulary size 50257' in prepare('--bin', a, bad)
    assert len(prepare_data.load_tokens(tmp_path / 'mine', 'train')[0]) == 210  # the old set is whole
    assert prepare('--bin', a, '--tokenizer=other') == 2  # its vocabulary size is not known
    assert prepare('--bin', a, '--tokenizer=other', '--vocab_size=300')['train'][1]['vocab_size'] == 300


def test_misuse_names_the_flag(tmp_path, prepare, capsys):
    for flags in ('--tokeniser=byte', '--tok=byte', '--input nowhere', '--bin nowhere', '--dataset=web', '--shards=2',
                  '--shards=x', '--shards=0 --dataset=fineweb_edu', '--tokenizer=byte --dataset=fineweb_edu',
                  '--vocab_size=5', '--input ' + write(tmp_path / 'empty')):
        assert prepare(*flags.split()) == 2 and flags.split()[0].split('=')[0] in capsys.readouterr().err, flags


def test_stdlib_needs_nothing(tmp_path):
    prepare_data.prepare_stdlib(tmp_path / 'stdlib')
    (train, meta), (val, _) = (prepare_data.load_tokens(tmp_path / 'stdlib', s) for s in ('train', 'val'))
    assert 5e6 < len(train) < 2e7 and 0.002 < len(val) / len(train) < 0.1
    assert train.max() == meta['eot'] == 256 and np.count_nonzero(train == 256) == meta['train_documents']


# ---- train.py

SMALL = [f'--{k}={v}' for k, v in (SHAPE | dict(n_route_head=4, batch_size=4, max_steps=20, log_every=1, eval_every=7,
                                                eval_sequences=5, device='cpu')).items()] + ['--no-sample']


def write_data(root, ids=None, vocab_size=100):
    """A small data set root/d in prepare_data.py's format."""
    folder = Path(root, 'd')
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).zipf(1.5, 3000) % vocab_size if ids is None else np.array(ids)
    for split in 'train', 'val':
        ids.astype(np.uint16).tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text(json.dumps({
        'tokenizer': 'byte', 'vocab_size': vocab_size, 'eot': 0, 'dtype': 'uint16', 'train_tokens': len(ids),
        'val_tokens': len(ids)}))


def run_train(root, *flags, out='out'):
    """Train in this process; returns the checkpoint and the log, without its times and memory."""
    if not Path(root, 'd').exists():
        write_data(root)
    train.main([*SMALL, '--dataset=d', f'--data_dir={root}', f'--out_dir={Path(root, out)}', *flags])
    return read_run(Path(root, out))


def read_run(out):
    records = [json.loads(line) for line in (out / 'log.jsonl').read_text().splitlines()]
    for r in records:
        for key in 'elapsed', 'tokens_per_s', 'memory_gib':
            r.pop(key, None)
    return torch.load(out / 'ckpt.pt', weights_only=True), records


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize('flags, named', [
    (['--n_layr=3'], '--n_layr'), (['--batch_size=abc'], '--batch_size'), (['--residual=none'], '--residual'),
    (['--max_step=3'], '--max_step'), (['--n_embd=30'], 'n_embd'), (['--grad_accum=0'], 'grad_accum'),
    (['--lr=-1'], 'lr'), (['--beta1=2'], 'beta1'), (['--resume'], 'nothing to resume'), (['--device=tpu'], 'tpu'),
    (['--dataset=nowhere'], 'nowhere')])
def test_wrong_flags_are_named(tmp_path, capsys, flags, named):
    with pytest.raises(SystemExit) as e:
        train.main([f'--out_dir={tmp_path}', *flags])
    assert e.value.code not in (0, None) and named in str(e.value.code) + capsys.readouterr().err


def test_presets_and_explicit_flags(capsys):
    assert train.TrainConfig(**train.PRESETS['1B'] | {'lr': 1e-3}).lr == 1e-3
    for name, millions in ('tiny', 0.8), ('100M', 64), ('350M', 430), ('1B', 950):
        cfg = train.TrainConfig(**train.PRESETS[name])
        with torch.device('meta'):
            n = sum(p.numel() for p in GPT(cfg.gpt_config(257 if name == 'tiny' else 50257)).parameters())
        assert n / 1e6 == pytest.approx(millions, rel=0.05)
    with pytest.raises(SystemExit) as e:
        train.main(['-h'])
    assert e.value.code == 0 and '5% of max_steps' in capsys.readouterr().out


def test_learning_rate():
    """A line up to lr in the warm-up, half-way between lr and its minimum half-way, near the minimum at the end."""
    cfg = train.TrainConfig(max_steps=1000, lr=1.0)
    rates = [train.learning_rate(step, cfg) for step in range(1000)]
    assert cfg.warmup == 50 and rates[0] == 1 / 50 and rates[49] == rates[50] == max(rates) == 1
    assert rates[50 + 475] == pytest.approx(0.55) and min(rates[50:]) == rates[-1] == pytest.approx(0.1, abs=1e-4)


def test_resume_is_exact(tmp_path):
    """20 steps equal 10, stop, 10 bit for bit; what was logged after the last save is dropped."""
    whole = run_train(tmp_path, out='whole')
    run_train(tmp_path, '--stop_after=10', out='parts')
    with open(tmp_path / 'parts' / 'log.jsonl', 'a') as f:      # steps of a process killed before its next save
        f.write('{"step": 11, "loss": 9.0, "elapsed": 1.0}\n{"step": 12, "lo')
    parts = run_train(tmp_path, '--resume', out='parts')
    assert whole[1] == parts[1] and whole[0]['step'] == parts[0]['step'] == 20
    for key in 'model', 'optimizer', 'best_val', 'rng':
        assert equal(whole[0][key], parts[0][key]), key


def test_resume_refuses_other_data_of_equal_length(tmp_path, prepare, capsys):
    prepare('--input', write(tmp_path / 'in', a='ab' * 600), name='d')
    run_train(tmp_path, '--stop_after=2')
    prepare('--input', write(tmp_path / 'in', a='ba' * 600), name='d')
    with pytest.raises(SystemExit, match='prepared anew'):
        run_train(tmp_path, '--resume')
    prepare('--input', write(tmp_path / 'in', a='ab' * 600), name='d')
    assert run_train(tmp_path, '--resume')[0]['step'] == 20


def test_resume_refuses_another_run(tmp_path):
    run_train(tmp_path, '--stop_after=2')
    for flag in ('--n_layer=3', '--n_route_head=2', '--block_size=8', '--lr=1', '--max_steps=30', '--batch_size=8'):
        with pytest.raises(SystemExit, match='global batch' if 'batch' in flag else flag[2:].split('=')[0]):
            run_train(tmp_path, '--resume', flag)
    with pytest.raises(SystemExit, match='--resume'):           # nor is a run overwritten by accident
        run_train(tmp_path)
    # A flag that repeats what the run has is fine, also if the preset's own shape would refuse it.
    run_train(tmp_path, '--n_embd=24', '--n_route_head=6', '--stop_after=2', out='six')
    train.main(['--resume', f'--data_dir={tmp_path}', f'--out_dir={tmp_path / "six"}', '--n_route_head=6', '--stop_after=1'])
    (tmp_path / 'out' / 'ckpt.pt').write_bytes((tmp_path / 'out' / 'ckpt.pt').read_bytes()[:1000])
    with pytest.raises(SystemExit, match='damaged'):
        run_train(tmp_path, '--resume')


@pytest.fixture
def trained(tmp_path):
    """The path of a standard model's checkpoint."""
    run_train(tmp_path, '--residual=standard', '--lr=1e-2', out='standard')
    return tmp_path / 'standard' / 'ckpt.pt'


def convert(root, trained, residual, *flags, out):
    """A run from that checkpoint, of which nothing but the device is repeated."""
    train.main([f'--init_from={trained}', f'--residual={residual}', f'--out_dir={root / out}', '--device=cpu',
                '--no-sample', *flags])
    return read_run(root / out)


def test_conversion_starts_where_the_standard_model_ended(tmp_path, trained, capsys):
    """The same loss before the first step and in it; then the routed run follows the plain one on the same data."""
    ended, evaluations = read_run(trained.parent)
    (delta, a), (plain, b) = (convert(tmp_path, trained, mode, out=mode + '2') for mode in ('delta', 'standard'))
    assert a[0]['step'] == 0 and a[0] == b[0] and a[0]['val_loss'] == evaluations[-1]['val_loss']
    assert 'largest difference of the logits 0\n' in capsys.readouterr().out
    assert a[1]['loss'] == b[1]['loss']
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x.get('loss', 0) == pytest.approx(y.get('loss', 0), abs=0.02)
    assert delta['model']['stream.alpha'].abs().min() > 0 and delta['config']['n_route_head'] == 8
    assert (delta['train']['lr'], delta['train']['warmup'], delta['train']['n_embd']) == (1e-2, 5, 32)
    assert delta['optimizer']['state'][0]['step'] == 20              # its own, not the old one's 40


def test_a_converted_run_resumes_without_its_origin(tmp_path, trained):
    whole = convert(tmp_path, trained, 'delta', out='whole')
    convert(tmp_path, trained, 'delta', '--stop_after=10', out='parts')
    os.rename(trained, tmp_path / 'moved')
    with pytest.raises(SystemExit, match='cannot resume: init_from is .*standard.ckpt.pt in the run, not'):
        convert(tmp_path, tmp_path / 'moved', 'delta', '--resume', out='parts')
    parts = convert(tmp_path, trained, 'delta', '--resume', out='parts')        # the same flags, whose file is gone
    assert whole[1] == parts[1] and equal(whole[0]['model'], parts[0]['model'])


@pytest.mark.parametrize('flags, message', [
    ([], r'standard.ckpt.pt would be overwritten'), (['--overwrite'], r'standard.ckpt.pt would be overwritten'),
    (['--n_layer=3', '--out_dir=new'], 'n_layer is 2 in .*, not 3'),
    (['--preset=tiny', '--dataset=d', '--out_dir=new'], 'n_layer is 2 in .*, not 4'),
    (['--dataset=other', '--out_dir=new'], 'vocab_size is 100 in .*, but 80 in .*other'),
    (['--init_from=nowhere'], 'nothing to start from, there is no nowhere'), (['--init_from=.'], 'not a checkpoint'),
    (['--n_depth_group=0', '--out_dir=new'], 'n_depth_group=0')])
def test_a_wrong_origin_is_one_sentence(tmp_path, trained, flags, message, capsys, monkeypatch):
    before = trained.read_bytes()
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / 'other', vocab_size=80)
    os.rename('other/d', 'other/other')
    data_dir = 'other' if '--dataset=other' in flags else '.'
    with pytest.raises(SystemExit) as e:
        train.main([f'--data_dir={data_dir}', f'--init_from={trained}', f'--out_dir={trained.parent}', '--device=cpu',
                    *flags])
    text = str(e.value.code) + capsys.readouterr().err
    assert e.value.code not in (0, None) and re.search(message, text) and trained.read_bytes() == before


@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop('head.linear.gain'), 'has no head.linear.gain'),
    (lambda w: w.update({'extra': w['head.linear.gain']}), 'has extra, for which a delta model'),
    (lambda w: w.update({'head.linear.gain': torch.ones(3)}), r'head.linear.gain has shape \(3,\) in .*, not \(32,\)'),
    (lambda w: w.update({'stream.query': torch.ones(5, 32)}), r'stream.query has shape \(5, 32\)')])
def test_weights_that_do_not_fit_are_named(tmp_path, trained, change, message):
    checkpoint = torch.load(trained, weights_only=True)
    change(checkpoint['model'])
    torch.save(checkpoint, trained)
    with pytest.raises(SystemExit, match=message):
        convert(tmp_path, trained, 'delta', out='new')
    assert not (tmp_path / 'new').exists()


def test_order_is_a_pure_function_and_covers_the_data():
    """Every epoch reads each sequence once; how a step is split into micro-steps and processes does not matter."""
    T, n = 4, 10
    tokens, cfg = np.arange(n * T + 1), train.TrainConfig(block_size=T, batch_size=4)
    steps = torch.cat([b for s in range(5) for b in train.micro_batches(tokens, cfg, s)])
    first = steps[:, 0] // T
    one, two = first[:n].tolist(), first[n:2 * n].tolist()
    assert sorted(one) == sorted(two) == list(range(n)) and one != two
    assert torch.equal(steps, steps[:, :1] + torch.arange(T + 1))
    split = train.TrainConfig(block_size=T, batch_size=2, grad_accum=2)
    assert torch.equal(torch.cat([b for s in range(5) for b in train.micro_batches(tokens, split, s)]), steps)
    ranks = [list(train.micro_batches(tokens, cfg, 3, rank, 2))[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(ranks), steps[12:16])


def test_accumulation(tmp_path):
    """8 x 1 and 2 x 4 micro-steps: the same losses and gradient norms."""
    _, a = run_train(tmp_path, '--batch_size=8', '--max_steps=6', out='a')
    _, b = run_train(tmp_path, '--batch_size=2', '--grad_accum=4', '--max_steps=6', out='b')
    for x, y in zip(a, b, strict=True):
        assert x == pytest.approx(y, rel=1e-4)


def test_two_processes(tmp_path):
    """2 processes x 2 equal 1 x 4, and the site that reads one source has a zero query gradient, not a missing one."""
    one, a = run_train(tmp_path, '--max_steps=6', out='one')
    subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', train.__file__,
                    *SMALL, '--dataset=d', f'--data_dir={tmp_path}', f'--out_dir={tmp_path}/two', '--max_steps=6'],
                   check=True, env=os.environ | {'OMP_NUM_THREADS': '1'}, timeout=100)
    two, b = read_run(tmp_path / 'two')
    for x, y in zip(a, b, strict=True):
        assert x == pytest.approx(y, rel=1e-4)
    for name, w in one['model'].items():
        torch.testing.assert_close(w, two['model'][name], rtol=1e-3, atol=1e-4)
    assert two['model'].keys() == one['model'].keys()
    assert two['model']['stream.query'][0].abs().max() == 0 < two['model']['stream.query'][1:].abs().max()


def test_checkpoint_is_plain_and_always_written(tmp_path):
    """Clean keys, also of a compiled model, plain types, enough to build the model; the last step is evaluated."""
    checkpoint, records = run_train(tmp_path, '--max_steps=3', '--eval_every=500', '--save_every=500')
    GPT(GPTConfig(**checkpoint['config'])).load_state_dict(checkpoint['model'])
    assert checkpoint['step'] == records[-1]['step'] == 3 and checkpoint['seed'] == 1
    assert checkpoint['meta']['vocab_size'] == 100 and checkpoint['best_val'] == records[-1]['val_loss']
    eager, compiled = (train.Trainer(train.TrainConfig(compile=on), 100, torch.device('cpu')) for on in (False, True))
    assert eager.model.state_dict().keys() == compiled.model.state_dict().keys()


def test_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    run_train(tmp_path, '--stop_after=4')
    old = (tmp_path / 'out' / 'ckpt.pt').read_bytes()

    def full_disk(checkpoint, f):
        f.write(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full_disk)
    with pytest.raises(SystemExit, match='No space left'):
        run_train(tmp_path, '--resume')
    assert (tmp_path / 'out' / 'ckpt.pt').read_bytes() == old and not list((tmp_path / 'out').glob('*.tmp'))


def before_step(monkeypatch, number, action):
    step, calls = train.Trainer.step, []

    def counted(self, batches, lr):
        calls.append(lr)
        if len(calls) == number:
            action(self)
        return step(self, batches, lr)
    monkeypatch.setattr(train.Trainer, 'step', counted)


def test_nan_stops_and_is_not_saved(tmp_path, monkeypatch):
    before_step(monkeypatch, 7, lambda trainer: trainer.model.head.linear.gain.data.fill_(float('nan')))
    with pytest.raises(SystemExit, match='loss nan.* at step 7.*of step 5'):
        run_train(tmp_path, '--log_every=10', '--save_every=5', '--eval_every=100')
    checkpoint = torch.load(tmp_path / 'out' / 'ckpt.pt', weights_only=True)
    assert checkpoint['step'] == 5 and all(w.isfinite().all() for w in checkpoint['model'].values())


def test_an_update_that_breaks_the_weights_is_not_saved(tmp_path):
    run_train(tmp_path, '--stop_after=2')
    log = tmp_path / 'out' / 'log.jsonl'
    with open(log, 'a') as f:
        f.write('no record\n')                                  # nor does a damaged line keep a run from resuming
    with pytest.raises(SystemExit, match='weights not finite after step 1; nothing was saved'):
        run_train(tmp_path, '--lr=1e38', '--warmup=0', '--save_every=1', out='broken')
    assert not (tmp_path / 'broken' / 'ckpt.pt').exists()
    assert run_train(tmp_path, '--resume')[0]['step'] == 20


def test_a_start_that_fails_costs_nothing(tmp_path, monkeypatch):
    before, _ = run_train(tmp_path, '--stop_after=2')

    def no_memory(*args):
        raise MemoryError
    monkeypatch.setattr(train.Trainer, '__init__', no_memory)
    with pytest.raises(MemoryError):
        run_train(tmp_path, '--overwrite')
    assert read_run(tmp_path / 'out')[0]['step'] == before['step']


def test_signal_saves_and_exits(tmp_path, monkeypatch):
    before_step(monkeypatch, 4, lambda trainer: os.kill(os.getpid(), 15))
    assert run_train(tmp_path)[0]['step'] == 4
    assert run_train(tmp_path, '--resume')[0]['step'] == 20


def test_a_closed_pipe_saves_and_exits(tmp_path, monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError
    before_step(monkeypatch, 3, lambda trainer: monkeypatch.setattr(sys, 'stdout', Gone()))
    assert run_train(tmp_path)[0]['step'] == 4


@pytest.mark.parametrize('ids, named', [([1, 2, 100] * 50, 'id 100'), ([1] * 16, '16 tokens')])
def test_bad_data_is_named(tmp_path, ids, named):
    write_data(tmp_path, ids)
    with pytest.raises(SystemExit, match=named):
        run_train(tmp_path)


def test_validation_does_not_depend_on_the_batch(tmp_path):
    write_data(tmp_path)
    cfg = train.TrainConfig(block_size=16, n_layer=1, dataset='d', data_dir=str(tmp_path), eval_sequences=7)
    _, tokens, _ = train.open_data(cfg, 0, 1)
    losses = [train.Trainer(train.replace(cfg, batch_size=B), 100, torch.device('cpu')).evaluate(tokens)
              for B in (1, 3, 16)]
    assert losses == pytest.approx([losses[0]] * 3)


@pytest.mark.parametrize('residual', MODES)
def test_only_the_matrices_are_decayed(residual):
    trainer = train.Trainer(train.TrainConfig(residual=residual, n_layer=1), 100, torch.device('cpu'))
    decayed, undecayed = ({id(p) for p in group['params']} for group in trainer.optimizer.param_groups)
    assert trainer.optimizer.param_groups[1]['weight_decay'] == 0
    matrices = {'embed.weight', *(f'blocks.0.{m}.weight' for m in ('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'))}
    for name, p in trainer.model.named_parameters():
        assert (id(p) in decayed) == (name in matrices) and (id(p) in undecayed) == (name not in matrices), name


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_sixteen_bits_over_float32_weights(tmp_path, dtype):
    checkpoint, records = run_train(tmp_path, f'--dtype={dtype}', '--lr=1e-2')
    assert records[-1]['val_loss'] < records[0]['loss'] - 0.5
    assert {w.dtype for w in checkpoint['model'].values()} == {torch.float32}


def test_benchmark_times_three_modes_and_the_one_asked_for(capsys, tmp_path):
    train.main([*SMALL, '--benchmark', '--residual=delta', f'--out_dir={tmp_path}/none'])
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-5:]]
    assert rows == ['residual', 'standard', 'attnres', 'mhar', 'delta']
    assert not (tmp_path / 'none').exists()


@needs_gpu
def test_gpu_runs_repeat_bitwise(tmp_path):
    flags = '--device=cuda', '--deterministic', '--max_steps=50', '--no-compile'
    (a, records), (b, others) = (run_train(tmp_path, *flags, out=out) for out in 'ab')
    assert records == others and equal(a['model'], b['model'])


@needs_gpu
@pytest.mark.parametrize('residual', MODES)
def test_captured_step_is_the_eager_one(tmp_path, residual):
    flags = '--device=cuda', f'--residual={residual}', '--n_route_head=0', '--dtype=float32', '--grad_accum=2'
    (_, a), (_, b), (_, c) = (run_train(tmp_path, *flags, more, out=more)
                              for more in ('--compile', '--no-compile', '--no-cuda_graph'))
    for records in zip(a, b, c, strict=True):
        losses = [r.get('loss', r.get('val_loss')) for r in records]
        assert losses == pytest.approx([losses[2]] * 3, rel=1e-3)


# ---- sample.py: text

@pytest.mark.parametrize('residual', MODES)
@pytest.mark.parametrize('block_size, prompt', [(16, 3), (16, 40), (7, 7), (1, 2)])
def test_cache_gives_the_same_tokens_also_past_the_context(residual, block_size, prompt):
    model = tiny(residual, block_size=block_size)
    a, b = (sample.generate(model, tokens(2, prompt), 30, temperature=0, use_cache=cached) for cached in (True, False))
    assert a.shape == (2, prompt + 30) and torch.equal(a[:, :prompt], tokens(2, prompt))
    assert torch.equal(a, b)
    assert len(a[:, prompt:].unique()) > 5 or block_size == 1        # not one token repeated, which would prove little


@needs_gpu
@pytest.mark.parametrize('residual', MODES)
def test_gpu_gives_the_tokens_of_the_cpu(residual, monkeypatch):
    """There a decode step is a replayed CUDA graph."""
    monkeypatch.setattr(sample, 'autocast', lambda device: torch.autocast(device.type, enabled=False))
    on_gpu = sample.generate(tiny(residual).to(DEVICE), tokens(2, 3).to(DEVICE), 30, temperature=0)
    assert torch.equal(on_gpu.cpu(), sample.generate(tiny(residual), tokens(2, 3), 30, temperature=0))


def test_greedy_takes_the_likeliest_token():
    model, idx = tiny(), tokens(2, 5)
    assert torch.equal(sample.generate(model, idx, 1, temperature=0)[:, -1], model(idx)[:, -1].argmax(-1))
    assert torch.equal(sample.generate(model, idx, 9, temperature=0), sample.generate(model, idx, 9, top_k=1))


@pytest.mark.parametrize('top_k', [0, 1, 50, 321, 10**9])
def test_ids_outside_the_tokenizer_are_never_drawn(top_k):
    model = tiny(spread=0.02)                                        # nearly uniform, as at initialisation
    model.embed.weight.data[257:] *= -50                             # the padding gets the largest logits of all
    drawn = sample.generate(model, tokens(64, 1), 12, top_k=top_k, temperature=2.0, vocab_size=257)
    assert drawn.max() < 257
    assert sample.generate(model, tokens(64, 1), 12, top_k=0, temperature=2.0).max() >= 257


def test_top_k_draws_from_exactly_the_k_likeliest():
    model, idx = tiny(), tokens(1, 5)
    drawn = sample.generate(model, idx.repeat(400, 1), 1, top_k=3, temperature=100.0)[:, -1]
    assert set(drawn.tolist()) == set(model(idx)[0, -1].topk(3).indices.tolist())
    with pytest.raises(ValueError, match='top_k=-1'):
        sample.generate(model, idx, 1, top_k=-1)


# ---- sample.py: what the heads read

@pytest.mark.parametrize('residual, H', [('attnres', 1), ('mhar', 4)])
def test_weights_are_those_that_the_model_used(residual, H):
    model, idx = tiny(residual), tokens(2, 9)
    plain, reads = model(idx), []

    def look(query, sources):
        w = route_weights(query, sources, H)                         # N B T H
        reads.append((w[..., None] * torch.stack(sources).unflatten(-1, (H, -1))).sum(0).flatten(-2))
        return w

    weights = sample.at_every_read(model, idx, look)
    assert [len(w) for w in weights] == [1, 2, 3, 4, 5]              # site s reads sources 0..s
    for w in weights:
        torch.testing.assert_close(w.sum(0), torch.ones(2, 9, H))
    torch.testing.assert_close(model.head(rms_norm(reads[-1])), plain)  # the last read, so mixed, gives the logits
    assert torch.equal(model(idx), plain)                            # and looking leaves the model as it was
    for found, w in zip(next(iter(sample.depth_map(model, idx))), weights):
        torch.testing.assert_close(found, w.mean((1, 2)))


def test_what_a_delta_model_reads(tmp_path, capsys):
    """Mixing the sources that are shown with their weights, behind the gate, is what the sublayer gets."""
    model, idx, seen = tiny('delta', n_layer=3, n_depth_group=2), tokens(2, 9), []
    shown = sample.at_every_read(model, idx, lambda query, sources: (route(query, sources, 4), len(sources)))
    sites, sources = sample.site_names(model)
    assert sources == ['null', 'emb', 'group0'] and [n for _, n in shown] == [2, 2, 2, 2, 3, 3] and len(sites) == 6
    hook = model.blocks[0].attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(idx)
    hook.remove()
    x = model.embed(idx)
    assert_close(seen[0], rms_norm(x + model.stream.alpha[0] * shown[0][0]))
    torch.save({'model': model.state_dict(), 'config': asdict(model.config), 'train': {},
                'meta': {'tokenizer': 'byte'}}, tmp_path / 'ckpt.pt')
    sample.main([f'--out_dir={tmp_path}', '--device=cpu', '--routing', '--start=def f'])
    out = capsys.readouterr().out
    assert f'mlp2 {model.stream.alpha[5]:+.4f}' in out.split('head 0')[0] and ET.parse(tmp_path / 'depth_map.svg')
    with pytest.raises(SystemExit, match='probe is for attnres'):
        sample.main([f'--out_dir={tmp_path}', '--device=cpu', '--probe=start', '--start=x'])


def test_a_query_that_prefers_one_source_shows_exactly_that():
    model = tiny(spread=0.0)                                         # every sublayer outputs 0: the key of a zero is 0
    model.embed.weight.data[:] = 1.0
    for name, p in model.named_parameters():
        if p.ndim == 1 or name == 'stream.gain':
            p.data.fill_(1.0)
    model.stream.query.data[3, :8] = 100.0          # head 0 of site mlp1; the embedding's key is all ones
    maps, apart, null = sample.depth_map(model, tokens(1, 4))
    for s, w in enumerate(maps):
        expected = torch.full((s + 1, 4), 1 / (s + 1))
        if s == 3:
            expected[:, 0] = torch.tensor([1.0, 0, 0, 0])
        torch.testing.assert_close(w, expected)
    # Head 0 reads 1, 0, 0, 0, the mean of the heads is 7/16, 3/16, 3/16, 3/16: 9/16 lies elsewhere.
    torch.testing.assert_close(apart[3], torch.tensor([9 / 16, 3 / 16, 3 / 16, 3 / 16]))
    assert apart[2].abs().max() < 1e-6 and null[2].abs().max() < 1e-6      # as long as a query of zero is zero


def test_probe_is_zero_under_agreement_only_once_scaled():
    model = tiny('attnres')
    # All four quarters of the embedding, of every sublayer's output and of the queries are equal.
    model.embed.weight.data = model.embed.weight[:, :8].repeat(1, 4)
    for block in model.blocks:
        for matrix in (block.attn.proj, block.mlp.down):
            matrix.weight.data = matrix.weight[:8].repeat(4, 1)
    for p in model.stream.values():
        p.data = p[:, :8].repeat(1, 4)
    kl, scaled, _, random_scaled, cosine = sample.probe(model, tokens(2, 9))
    assert kl > 0.01 and abs(scaled) < 1e-5 and random_scaled > 0.01 and -1 < cosine < 1
    model.stream.query.data[:, :8] *= -1            # one quarter now prefers what the others avoid
    assert sample.probe(model, tokens(2, 9))[1] > 0.01
    with pytest.raises(ValueError, match='has 4'):
        sample.probe(tiny(), tokens(1, 4))


def test_cosine_of_equal_and_of_orthogonal_sources():
    model = tiny('attnres', spread=0.0, n_layer=1)
    sources = [torch.eye(32)[[i]][None] for i in (0, 0, 1)]                  # B T D, pairs: 1, 0, 0
    model.stream_class = type('Fixed', (model.stream_class,), {
        'append': lambda self, y: None, 'read': lambda self: (setattr(self, 'site', self.site + 1) or sources[0]),
        'sources': lambda self: sources[:self.site + 1]})
    assert sample.probe(model, tokens(1, 1))[-1] == pytest.approx(1 / 3)


# ---- sample.py: pictures and reports

def test_report_matches_figures_computed_by_hand(tmp_path, capsys):
    for name, losses, speed in (('a', [5.0, 4.0, 3.5, 3.0, 2.5, 2.4, 2.2, 2.0], 100),
                                ('b', [5.0, 4.0, 3.0, 2.0, 1.9, 1.8, 1.7, 1.6], 50)):
        records = [dict(step=i, val_loss=x, elapsed=10_000 * i / speed, tokens=1000 * i) for i, x in enumerate(losses)]
        records += [dict(step=i, loss=3.0, tokens_per_s=speed + i, elapsed=i, memory_gib=2.0 + i) for i in range(3)]
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text('\n'.join(map(json.dumps, records)) + '\n{"step": 9, "val_l')
    first, second = (sample.read_log(tmp_path / name) for name in 'ab')
    a, b = sample.compare(first, first), sample.compare(second, first)
    assert a == dict(final=2.0, tail=pytest.approx(2.1), n=2, difference=0.0, spread=0.0, tokens_per_s=101,
                     reached=700.0, memory=4.0)
    assert b['final'] == 1.6 and b['tail'] == pytest.approx(1.65) and b['tokens_per_s'] == 51
    assert b['difference'] == pytest.approx((-0.5 - 0.4) / 2) and b['spread'] == pytest.approx(0.1 / 2 ** 0.5)
    assert b['reached'] == 3 * 200.0         # the fourth evaluation is the first at 2.0
    sample.main(['--report', str(tmp_path / 'a'), str(tmp_path / 'b'), f'--svg={tmp_path}/x.svg'])
    assert '-0.4500 +- 0.0707' in capsys.readouterr().out
    curves = [e for e in ET.parse(tmp_path / 'x.svg').iter() if e.tag.endswith('polyline')]
    assert len(curves) == 4 and all(len(c.get('points').split()) == 8 for c in curves)


def test_report_pairs_seeds_by_name(tmp_path, capsys):
    for name, loss in {'base/1': 3.0, 'base/2': 4.0, 'base/3': 3.0, 'other/1': 2.9, 'other/2': 3.7, 'other/9': 1.0,
                       'other/3': 9.0}.items():
        (tmp_path / name).mkdir(parents=True)
        record = dict(step=4 if name == 'other/3' else 8, val_loss=loss, elapsed=1.0, tokens=10)
        (tmp_path / name / 'log.jsonl').write_text(json.dumps(record) + '\n')
    sample.main(['--report', f'{tmp_path}/base', f'{tmp_path}/other', f'--svg={tmp_path}/x.svg'])
    out = capsys.readouterr().out
    assert 'left out 3, 9' in out                                   # one is at half its way, one has no partner
    assert '2  3.3000' in out and '-0.2000 +- 0.1414' in out        # the mean of -0.1 and -0.3


def test_grid_shows_a_weight_of_one_and_svg_escapes(tmp_path):
    panels = {'mean': [[1.0], [0.25, 0.75], [0.0, 0.0, 1.0]]}
    lines = sample.grid(panels, ['attn0', 'mlp0', 'out'], ['emb', 'attn0', 'mlp0'], False, 80).split('\n')
    assert [line[8:].rstrip() for line in lines[1:5]] == ['eam', '@', '+%', '  @']
    sample.draw_map(tmp_path / 'x.svg', 'a < b & "c"', panels, ['attn0', 'mlp0', 'out'], ['emb', 'attn0', 'mlp0'])
    shapes = list(ET.parse(tmp_path / 'x.svg').iter())
    opacity = [float(e.get('fill-opacity')) for e in shapes if e.get('class') == 'weight'][6:]      # after the key
    assert opacity == [1.0, 0.5, 0.87, 0.0, 0.0, 1.0] and any(e.text == 'a < b & "c"' for e in shapes)


# ---- sample.py: the command line

@pytest.fixture
def out_dir(tmp_path):
    model = tiny()
    torch.save({'model': model.state_dict(), 'config': asdict(model.config) | {'routing': 'triton'}, 'train': {},
                'meta': {'tokenizer': 'byte'}}, tmp_path / 'ckpt.pt')
    return str(tmp_path)


def test_command_line_samples_maps_and_labels(out_dir, capsys):
    common = f'--out_dir={out_dir}', '--device=cpu', '--max_new_tokens=0', '--num_samples=2'
    with open(f'{out_dir}/prompt.txt', 'w') as f:
        f.write('a prompt from a file, longer than the context')
    sample.main([*common, f'--start=FILE:{out_dir}/prompt.txt'])
    assert capsys.readouterr().out.count('a prompt from a file, longer than the context') == 2
    sample.main([*common, '--routing', '--start=def f'])
    assert 'head 3' in capsys.readouterr().out and ET.parse(f'{out_dir}/depth_map.svg')
    sample.main([*common, '--routing=tokens', '--site=attn0', '--start=ab'])
    assert capsys.readouterr().out == '[emb]ab\n'            # the first site has nothing else to read


def test_a_checkpoint_loads_on_a_machine_without_what_trained_it(out_dir):
    model, tokenizer, _ = sample.load_checkpoint(f'{out_dir}/ckpt.pt')
    assert model.config.routing == 'auto' and tokenizer.encode('é') == [0xc3, 0xa9]
    assert torch.equal(model(tokens(1, 5)), tiny()(tokens(1, 5)))


def test_prepare_train_and_sample(tmp_path, prepare, capsys):
    """The whole way: a folder of text in, text of the same kind out."""
    prepare('--input', write(tmp_path / 'in', a='ab' * 600))
    run_train(tmp_path, '--dataset=mine', '--max_steps=60', '--lr=1e-2')
    sample.main([f'--out_dir={tmp_path}/out', '--device=cpu', '--start=a', '--max_new_tokens=7', '--num_samples=1',
                 '--temperature=0'])
    assert 'abababab' in capsys.readouterr().out


@pytest.mark.parametrize('damage, flags, message', [
    (lambda path: os.remove(path), [], 'there is no'),
    (lambda path: os.truncate(path, 1000), [], 'damaged'),
    (lambda path: torch.save({'step': 1}, path), [], 'damaged'),
    (lambda path: None, ['--temprature=1'], '--temprature'),
    (lambda path: None, ['--temp=1'], '--temp'),
    (lambda path: None, ['--temperature=-1'], 'temperature=-1'),
    (lambda path: None, ['--routing=tokens', '--site=mlp7'], '--site'),
    (lambda path: None, ['--routing'], '--start'),
    (lambda path: None, ['--probe=start', '--start=x'], 'one routing head'),
    (lambda path: None, ['--start=FILE:nowhere'], 'nowhere')])
def test_errors_are_one_sentence(out_dir, damage, flags, message, capsys):
    damage(f'{out_dir}/ckpt.pt')
    with pytest.raises(SystemExit) as e:
        sample.main([f'--out_dir={out_dir}', '--device=cpu'] + flags)
    assert e.value.code != 0 and message in str(e.value) + capsys.readouterr().err


def test_text_that_the_terminal_cannot_show_is_replaced(out_dir, monkeypatch, tmp_path):
    with open(tmp_path / 'ascii.txt', 'w', encoding='ascii') as f:
        monkeypatch.setattr(sys, 'stdout', f)
        sample.main([f'--out_dir={out_dir}', '--device=cpu', '--start=é', '--max_new_tokens=0', '--num_samples=1'])
    assert (tmp_path / 'ascii.txt').read_text() == '?\n'
