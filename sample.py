"""
Look at a trained model or at finished runs: text, depth maps, reports.

    python sample.py --out_dir=out/x --start="def " --num_samples=3     text; also --start=FILE:path, --start=- (stdin)
    python sample.py --out_dir=out/x --routing=val                      which sources does each site read?
    python sample.py --out_dir=out/x --routing=tokens --site=mlp2       does that change from token to token?
    python sample.py --out_dir=out/x --probe                            would parts of one query rather read apart?
    python sample.py --report out/a out/b out/c                         losses compared, in a table and a picture

--routing without a value looks at the text of --start. Pictures are SVG files. For --report, out/a is a run, or holds
one run per seed: out/a/1, out/a/2.
"""
import argparse
import copy
import json
import math
import os
import shutil
import statistics
import sys
from functools import partial
from html import escape
from itertools import groupby

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig, KVCache
from prepare_data import get_tokenizer, load_tokens
from routing_kernel import route_weights


def load_checkpoint(path, device='cpu'):
    """(model, tokenizer, the checkpoint's dict) from train.py's ckpt.pt. OSError or ValueError if it is unusable."""
    if not os.path.exists(path):
        raise FileNotFoundError(f'there is no {path}: train a model there first (python train.py --out_dir=...)')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        # Which code computes the reads is a matter of this machine, not of the one that trained.
        model = GPT(GPTConfig(**checkpoint['config'] | {'routing': 'auto'}))
        model.load_state_dict(checkpoint['model'])
    except Exception as e:                                          # torch.load raises whatever the damage leads to
        raise ValueError(f'{path} is damaged or not a checkpoint of this train.py') from e
    return model.to(device), get_tokenizer(checkpoint['meta']['tokenizer']), checkpoint


# ---- text

def autocast(device):
    """bf16 on a GPU that has it, else the weights' own dtype."""
    bf16 = device.type == 'cuda' and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def decode_step(model, cache):
    """
    A function from the newest tokens, B 1, to their logits, B 1 V. On a GPU it replays a CUDA graph: one
    launch where Python would launch hundreds of small kernels. To be called while the cache is empty.
    """
    eager = partial(model, cache=cache)
    if cache.device.type != 'cuda':
        return eager
    token = torch.zeros(cache.shape[0], 1, dtype=torch.long, device=cache.device)
    graph, side, main = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    try:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(3):                                      # kernels compile and libraries allocate out here
                eager(token)
                cache.start.zero_()                                 # the prefill overwrites what this left behind
        main.wait_stream(side)
        with torch.cuda.graph(graph):
            logits = eager(token)                                   # cache.start += 1 is part of every replay
    except RuntimeError as e:
        print(f'sampling without a CUDA graph: {e}', file=sys.stderr)
        cache.start.zero_()
        return eager

    def replay(new):
        token.copy_(new)
        graph.replay()
        return logits

    return replay


@torch.no_grad()
@torch.compiler.set_stance('force_eager')                           # each prompt has another length: don't recompile
def generate(model, idx, max_new_tokens, temperature=0.8, top_k=50, vocab_size=None, generator=None, use_cache=True):
    """
    Continue idx, int64 B T with T >= 1: returns B T+max_new_tokens.

    temperature 0 is greedy. top_k keeps the k likeliest tokens, 0 keeps all. Ids at or above vocab_size, the
    tokenizer's, are never drawn: the model's vocabulary may be padded. When the context is full its last half
    is kept and read again, with and without the key/value cache, so both give the same tokens.
    """
    if temperature < 0 or top_k < 0:
        raise ValueError(f'temperature={temperature} and top_k={top_k} must not be negative')
    block_size, V = model.config.block_size, min(vocab_size or math.inf, model.config.vocab_size)
    k = 1 if temperature == 0 else min(top_k or V, V)
    with autocast(idx.device):
        if use_cache:
            cache = KVCache(model, len(idx))
            step = decode_step(model, cache)
        first = seen = 0                    # the context is idx[:, first:]; the cache holds idx[:, first:seen]
        for _ in range(max_new_tokens):
            if idx.shape[1] - first > block_size:
                first = seen = idx.shape[1] - max(block_size // 2, 1)
                if use_cache:
                    cache.start.zero_()
            if use_cache:
                new, seen = idx[:, seen:], idx.shape[1]
                logits = step(new) if new.shape[1] == 1 else model(new, cache=cache)
            else:
                logits = model(idx[:, first:])
            values, ids = logits[:, -1, :V].float().topk(k)         # B k
            values = values - values[:, :1]                         # the largest is 0: no temperature overflows
            choice = torch.multinomial((values / (temperature or 1)).softmax(-1), 1, generator=generator)
            idx = torch.cat((idx, ids.gather(1, choice)), dim=1)
    return idx


# ---- what the heads read

@torch.no_grad()
def at_every_read(model, idx, look):
    """
    Run the model on idx, B T, and return [look(query, sources) for each site]: the site's effective query,
    (D,), and the list of tensors B T D that it reads from. ValueError for a model without a depth history.
    """
    if not hasattr(model.stream_class, 'sources'):
        raise ValueError(f'a {model.config.residual} model does not attend over depth: there are no weights to look at')

    class Watched(model.stream_class):
        def read(self):
            x = super().read()
            if self.site < len(self.history.query):                 # delta's last read is no site
                found.append(look(self.history.query[self.site], list(self.sources())))
            return x

    found, watched = [], copy.copy(model)                           # the same parameters under another stream
    watched.stream_class = Watched
    with autocast(idx.device):
        watched(idx)
    return found


def site_names(model):
    """The sites, named after the sublayer that reads there, and the sources; in delta these are groups of blocks."""
    sublayers = [f'{kind}{i}' for i in range(model.config.n_layer) for kind in ('attn', 'mlp')]
    if model.config.residual != 'delta':
        return sublayers + ['out'], ['emb'] + sublayers
    size = -(-model.config.n_layer // model.config.n_depth_group)   # blocks of a group; nobody reads the last group
    return sublayers, ['null', 'emb'] + [f'group{i}' for i in range(-(-model.config.n_layer // size) - 1)]


def random_like(query):
    """A query of equal norm in a random direction: what chance would read."""
    r = torch.randn_like(query)
    return r * (query.norm() / r.norm())


def disagreement(w):
    """
    How far each head reads from what the heads read on average, (H,), given the weights of a site, N B T H:
    the share of its weight that lies elsewhere, half the L1 distance, 0 to 1 - 1/H; mean over positions.
    """
    return (w - w.mean(-1, keepdim=True)).abs().sum(0).mean((0, 1)) / 2


def depth_map(model, idx):
    """Tuples over sites: mean weights on idx, (N, H); the heads' disagreement, (H,); that of random queries, (H,)."""
    def look(query, sources):
        w, null = (route_weights(q, sources, model.config.n_route_head, model.config.norm_eps)
                   for q in (query, random_like(query)))
        return w.mean((1, 2)).cpu(), disagreement(w).cpu(), disagreement(null).cpu()

    return zip(*at_every_read(model, idx, look))


def probe(model, idx, n_slice=4):
    """
    Would slices of a shared query (H = 1) rather read apart? Returns the mean over positions, slices and the
    sites with two or more sources of KL(what a slice alone would read || what the whole query reads) in nats;
    the same with slice logits times n_slice, which is 0 when all slices agree; both under a random query; and
    the mean cosine between two different sources of the last site.
    """
    if model.config.residual == 'delta':
        raise ValueError('the probe is for attnres, or mhar with one head; of a delta model --routing shows the reads')
    if model.config.n_route_head != 1:
        raise ValueError(f'the probe is for a model with one routing head, this one has {model.config.n_route_head}')
    eps = model.config.norm_eps

    def kl(query, sources, scale):
        w, shared = route_weights(scale * query, sources, n_slice, eps), route_weights(query, sources, 1, eps)
        return (w * (w.clamp_min(1e-30).log() - shared.clamp_min(1e-30).log())).sum(0).mean().item()

    def look(query, sources):
        N, total = len(sources), F.normalize(torch.stack(sources).float(), dim=-1).sum(0)
        cosine = (total.pow(2).sum(-1).mean().item() - N) / max(N * (N - 1), 1)     # |sum|^2 = N + sum over pairs
        return [kl(q, sources, scale) for q in (query, random_like(query)) for scale in (1, n_slice)] + [cosine]

    rows = at_every_read(model, idx, look)[1:]
    return [statistics.mean(column) for column in list(zip(*rows))[:4]] + [rows[-1][-1]]


# ---- in the terminal

RAMP = ' .:-=+*#%@'
COLOURS = 234, 17, 18, 19, 25, 31, 37, 78, 148, 226                 # of the 256-colour palette, dark blue to yellow


def grid(panels, sites, sources, colour, columns):
    """The panels {name: S rows of weights} as text, side by side while they fit; one character a weight."""
    def shade(level):
        return f'\x1b[48;5;{COLOURS[level]}m \x1b[0m' if colour else RAMP[level]

    def line(row):                                                  # the square root, so that small weights show
        return ''.join(shade(min(int(10 * math.sqrt(w)), 9)) for w in row) + ' ' * (wide - len(row))

    wide, lines = max(len(sources), 6) + 2, []
    fit = max((columns - 8) // wide, 1)
    for i in range(0, len(panels), fit):
        names = list(panels)[i:i + fit]
        lines += [' ' * 8 + ''.join(name.ljust(wide) for name in names),
                  ' ' * 8 + ''.join(source[0] for source in sources).ljust(wide) * len(names)]
        lines += [f'{site:>7} ' + ''.join(line(panels[name][s]) for name in names) for s, site in enumerate(sites)]
        lines += ['']
    return '\n'.join(lines + ['row: site, column: source (e emb, a attn, m mlp, n null, g group), weight at least:',
                              '  '.join(f'{shade(level)} {level * level / 100:g}' for level in range(1, 10))])


def show_gates(model):
    """Print alpha of every site of a delta model."""
    print('gate (alpha) of each site: 0 reads the running sum alone')
    for site, alpha in zip(site_names(model)[0], model.stream.alpha.tolist()):
        print(f'{site:>7} {alpha:+.4f}')
    print()


def show_map(model, idx, path, title):
    """Print and draw the depth map, and print how far the heads disagree."""
    maps, apart, null = depth_map(model, idx)
    (sites, sources), H = site_names(model), model.config.n_route_head
    panels = {'mean': [w.mean(-1).tolist() for w in maps]}
    panels |= {f'head {h}': [w[:, h].tolist() for w in maps] for h in range(H) if H > 1}
    print(grid(panels, sites, sources, sys.stdout.isatty(), shutil.get_terminal_size().columns))
    draw_map(path, title, panels, sites, sources)
    if H > 1:
        print('\nhow far each head reads from the mean of the heads (share of its weight):')
        first = len(maps[0]) == 1                                   # that site has one source only
        for site, row in zip(sites[first:], apart[first:]):
            print(f'{site:>7} ' + ' '.join(f'{a:.2f}' for a in row.tolist()))
        for name, found in ('learned', apart), ('random queries of equal norm', null):
            found = torch.stack(found[first:])
            s, h = divmod(found.argmax().item(), H)
            print(f'{name}: mean {found.mean():.3f}, largest {found.max():.3f} (head {h} at {sites[s + first]})')


def show_probe(model, idx):
    """Print the probe's figures, with what each means and what it cannot show."""
    kl, scaled, random_kl, random_scaled, cosine = probe(model, idx)
    print(f"""quarters of the query against the whole: KL in nats (random query of equal norm, learned excess)
  as they are  {kl:.4f} ({random_kl:.4f}, {kl - random_kl:+.4f})
    How differently a quarter alone would read. A quarter of the logits is also flatter, so this is above 0 even in
    full agreement: it cannot tell sharpness from disagreement.
  logits x 4   {scaled:.4f} ({random_scaled:.4f}, {scaled - random_scaled:+.4f})
    0 if the quarters agree: this is disagreement. It cannot show that separate heads would lower the loss.
  mean cosine between two sources: {cosine:.3f}
    Near 1 the sources are alike and all weights read nearly the same. It cannot show whether the part in which
    they differ is the part that matters.""")


def show_tokens(model, idx, tokenizer, site, head):
    """Print idx, 1 T, as text, the strongest source in brackets wherever it changes."""
    (sites, sources), H = site_names(model), model.config.n_route_head
    site = site or sites[-1]
    if site not in sites or not 0 <= head < H:
        raise ValueError(f'--site is one of {", ".join(sites)}, --head is at most {H - 1}')

    def look(query, sources):
        return route_weights(query, sources, H, model.config.norm_eps)[:, 0, :, head].argmax(0).tolist()    # T

    strongest = at_every_read(model, idx, look)[sites.index(site)]
    name = '\x1b[7m{}\x1b[0m' if sys.stdout.isatty() else '[{}]'      # reverse video
    print(''.join(name.format(sources[n]) + tokenizer.decode([token for _, token in run])
                  for n, run in groupby(zip(strongest, idx[0].tolist()), key=lambda pair: pair[0])))


# ---- pictures

CURVES = '#4e79a7', '#e8762b', '#3f9b4f', '#d5495a', '#9a6bb0', '#9c755f'   # legible on white and on black
STYLE = """text{font:12px system-ui,sans-serif;fill:#222} .title{font-size:15px;font-weight:600} .small{font-size:9px}
.paper{fill:#fff} .bed{fill:#f3f3f3} .weight{fill:#083d8f} .line{stroke:#ddd}
@media(prefers-color-scheme:dark){text{fill:#ddd} .paper{fill:#0d1117} .bed{fill:#1b212a} .weight{fill:#8ecbff}
.line{stroke:#333b45}}"""


def element(tag, content='', **attributes):
    """An SVG element: fill_opacity=1 becomes fill-opacity="1", class_ becomes class."""
    pairs = ' '.join(f'{name.strip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<{tag} {pairs}>{content}</{tag}>'


def label(x, y, text, anchor='start', **attributes):
    return element('text', escape(text), x=round(x, 1), y=round(y, 1), text_anchor=anchor, **attributes)


def save_svg(path, width, height, title, subtitle, elements):
    """Write a picture that is light or dark as its reader's system is."""
    head = [element('style', STYLE), element('rect', width=width, height=height, class_='paper'),
            label(20, 28, title, class_='title'), label(20, 48, subtitle)]
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with open(path, 'w', encoding='utf-8') as f:
        f.write(element('svg', '\n'.join(head + elements), xmlns='http://www.w3.org/2000/svg', width=width,
                        height=height, viewBox=f'0 0 {width} {height}') + '\n')
    print(f'wrote {path}')


def draw_map(path, title, panels, sites, sources):
    """The panels {name: S rows of weights}: a row per site, a column per source, darker is heavier."""
    N, S, columns = len(sources), len(sites), min(len(panels), 3)
    cell = max(6, min(24, 240 // max(N, S)))
    side, pitch, skip = N * cell, max(N * cell, 60) + 54, math.ceil(10 / cell)      # label every skip-th row and column
    row_pitch = S * cell + 54

    def weight(x, y, size, w):
        return element('rect', x=x, y=y, width=size, height=size, class_='weight', fill_opacity=round(math.sqrt(w), 2))

    parts = []
    for i, w in enumerate((0.01, 0.05, 0.1, 0.25, 0.5, 1)):
        parts += [weight(430 + 48 * i, 38, 12, w), label(445 + 48 * i, 48, f'{w:g}')]
    for i, (name, rows) in enumerate(panels.items()):
        left, top = 56 + i % columns * pitch, 70 + i // columns * row_pitch
        parts += [label(left + side, top + 10, name, 'end')]        # the upper triangle is free: no site reads ahead
        for s, row in enumerate(rows):
            y = top + s * cell
            parts += [element('rect', x=left, y=y, width=len(row) * cell - 1, height=cell - 1, class_='bed')]
            parts += [weight(left + n * cell, y, cell - 1, w) for n, w in enumerate(row)]
            if s % skip == 0:
                parts += [label(left - 4, y + cell / 2 + 3, sites[s], 'end', class_='small')]
        for n in range(0, N, skip):
            x, under = left + (n + 0.5) * cell + 3, top + S * cell + 4
            parts += [label(x, under, sources[n], 'end', class_='small', transform=f'rotate(-90 {x} {under})')]
    save_svg(path, max(columns * pitch + 24, 720), 70 + row_pitch * math.ceil(len(panels) / columns), title,
             'row: the sublayer that reads; column: the source it reads; weight:', parts)


def ticks(low, high, count=5):
    """At most count + 1 round numbers between low and high."""
    power = 10 ** math.floor(math.log10((high - low) / count))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= count)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw_curves(path, title, subtitle, panels):
    """Panels {x label: {name: [(x, y), ...]}} with one y axis; the names stand at the right, at their last value."""
    W, H, left, top = 330, 300, 60, 65
    curves = [curve for panel in panels.values() for curve in panel.values()]
    low = min(y for curve in curves for _, y in curve)
    # The first evaluations are so high that they would flatten all that matters: fit what follows a tenth of the run.
    high = max(y for curve in curves for x, y in curve if x >= curve[-1][0] / 10)
    margin = 0.05 * (high - low) or 1
    low, high = low - margin, high + margin

    def height(y):
        return H * (high - y) / (high - low)

    parts = [element('clipPath', f'<rect width="{W}" height="{H}"/>', id='frame')]
    for i, (axis, panel) in enumerate(panels.items()):
        x0, longest = left + i * (W + 30), max(curve[-1][0] for curve in panel.values()) or 1
        for t in ticks(low, high):
            parts += [element('path', d=f'M{x0} {top + height(t):.1f}h{W}', class_='line')]
            parts += [label(x0 - 6, top + height(t) + 4, f'{t:g}', 'end')] if i == 0 else []
        parts += [label(x0 + W * t / longest, top + H + 18, f'{t:,g}', 'middle') for t in ticks(0, longest)]
        parts += [label(x0 + W / 2, top + H + 40, axis, 'middle')]
        for j, curve in enumerate(panel.values()):
            points = ' '.join(f'{W * x / longest:.1f},{height(y):.1f}' for x, y in curve)
            parts += [element('polyline', points=points, fill='none', stroke=CURVES[j % 6], stroke_width=2,
                              clip_path='url(#frame)', transform=f'translate({x0} {top})')]
    y = 0
    for j, (name, curve) in sorted(enumerate(panel.items()), key=lambda item: -item[1][1][-1][1]):
        y = max(y + 16, top + height(curve[-1][1]) + 4)             # labels push each other down
        parts += [label(x0 + W + 8, y, f'{name} {curve[-1][1]:.3f}', style=f'fill:{CURVES[j % 6]};font-weight:600')]
    save_svg(path, x0 + W + 60 + 8 * max(map(len, panel)), round(max(top + H + 55, y + 20)), title, subtitle, parts)


# ---- finished runs

def read_log(out_dir):
    """(training records, evaluations) of out_dir/log.jsonl."""
    if not os.path.exists(os.path.join(out_dir, 'log.jsonl')):
        raise FileNotFoundError(f'there is no {out_dir}/log.jsonl: {out_dir} is not a run of train.py')
    with open(os.path.join(out_dir, 'log.jsonl'), encoding='utf-8') as f:
        try:                                                        # a killed run may leave half a line
            records = [json.loads(line) for line in f if line.endswith('\n')]
        except ValueError as e:
            raise ValueError(f'{out_dir}/log.jsonl holds a damaged line: {e}') from e
    train, evals = [r for r in records if 'loss' in r], [r for r in records if 'val_loss' in r]
    if not evals:
        raise ValueError(f'{out_dir}/log.jsonl holds no evaluation yet')
    return train, evals


def read_runs(folder):
    """{name: read_log of the run}: folder is itself a run, then of name '', or has one run per seed in it."""
    if os.path.exists(os.path.join(folder, 'log.jsonl')) or not os.path.isdir(folder):
        return {'': read_log(folder)}
    names = sorted(name for name in os.listdir(folder) if os.path.exists(os.path.join(folder, name, 'log.jsonl')))
    return {name: read_log(os.path.join(folder, name)) for name in names} or {'': read_log(folder)}


def compare(log, base):
    """
    A run beside its baseline, both as read by read_log. tail: mean of the last n evaluations, a quarter of the
    baseline's but at most 11. difference, spread: mean and standard deviation of the loss difference over those that
    both runs have; all runs are evaluated on the same batches, so that common noise cancels. reached: seconds to
    the first evaluation at or below the baseline's final loss, None if there is none.
    """
    (train, evals), baseline = log, {r['step']: r['val_loss'] for r in base[1]}
    n, loss = min(11, max(1, len(baseline) // 4)), {r['step']: r['val_loss'] for r in evals}
    paired = [loss[step] - baseline[step] for step in list(baseline)[-n:] if step in loss] or [math.nan]
    return dict(
        final=evals[-1]['val_loss'], tail=statistics.mean(list(loss.values())[-n:]), n=n,
        difference=statistics.mean(paired), spread=statistics.stdev(paired) if len(paired) > 1 else math.nan,
        tokens_per_s=statistics.median([r['tokens_per_s'] for r in train] or [math.nan]),
        reached=next((r['elapsed'] for r in evals if r['val_loss'] <= base[1][-1]['val_loss']), None),
        memory=max((r['memory_gib'] or math.nan for r in train), default=math.nan))       # null on a CPU


def compare_seeds(runs, base):
    """compare() for {seed: run}, each with the baseline's run of the same name: means, and the spread over seeds."""
    pairs = [compare(log, base[name]) for name, log in runs.items()]
    if len(pairs) == 1:
        return pairs[0]
    mean = {key: statistics.mean(r[key] for r in pairs) for key in pairs[0] if key != 'reached'}
    reached, spread = [r['reached'] for r in pairs], statistics.stdev(r['difference'] for r in pairs)
    return mean | dict(spread=spread, reached=None if None in reached else statistics.mean(reached))


def finished_pairs(folder, runs, base):
    """
    Those of {seed: run} that the baseline has too and that went as far. A lone run is shown as far as it is.
    ValueError if none is left.
    """
    def last(log):
        return log[1][-1]['step']

    good = {name: log for name, log in runs.items()
            if name in base and (len(runs) == 1 or last(log) == last(base[name]))}
    if not good:
        raise ValueError(f'{folder} has no run that the first has by that name and to that step: '
                         f'{", ".join(runs)} against {", ".join(base)}')
    if len(good) < len(runs):
        out = ', '.join(sorted(runs.keys() - good.keys()))
        print(f'{folder}: left out {out}, unfinished or not among the first\'s')
    return good


def report(folders, path):
    """Print the table of compare_seeds() and draw the loss curves, of several seeds their mean."""
    above = os.path.commonpath([os.path.dirname(os.path.abspath(folder)) for folder in folders])
    groups = {os.path.relpath(folder, above): read_runs(folder) for folder in folders}
    first, wide = next(iter(groups.values())), max(8, *map(len, groups))
    groups = {name: finished_pairs(name, runs, first) for name, runs in groups.items()}
    rows = [compare_seeds(runs, first) for runs in groups.values()]
    print(f'{"val loss":{wide}}  runs   final    tail   paired difference  tokens/s  time to first\'s final  peak GiB')
    for (name, runs), r in zip(groups.items(), rows):
        reached = 'never' if r['reached'] is None else f'{r["reached"] / 60:,.1f} min'
        print(f'{name:{wide}} {len(runs):5}  {r["final"]:6.4f}  {r["tail"]:6.4f}  {r["difference"]:+.4f} +- '
              f'{r["spread"]:6.4f} {r["tokens_per_s"]:9,.0f}  {reached:>21}  {r["memory"]:8.2f}')
    print(f'tail: the last {rows[0]["n"]:.0f} evaluations; difference: to the first over those, '
          '+- standard deviation over evaluations, over seeds if there are several')

    def curve(runs, key, unit):
        by_step = [{r['step']: r for r in evals} for _, evals in runs.values()]
        return [tuple(statistics.mean(log[step][k] for log in by_step) / u for k, u in ((key, unit), ('val_loss', 1)))
                for step in by_step[0] if all(step in log for log in by_step)]

    hours = max(evals[-1]['elapsed'] for runs in groups.values() for _, evals in runs.values()) > 7200
    axes = ('tokens', 1e6, 'million tokens'), ('elapsed', 3600 if hours else 60, 'hours' if hours else 'minutes')
    draw_curves(path, 'Loss by tokens and by wall-clock', 'validation loss, nats per token', {
        axis: {name: curve(runs, key, unit) for name, runs in groups.items()} for key, unit, axis in axes})


# ---- the command line

def run(args):
    if args.report:
        return report(args.report, args.svg or os.path.join(args.report[0], 'loss.svg'))
    auto = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    device = torch.device(auto if args.device == 'auto' else args.device)
    if device.type == 'cuda' and not torch.cuda.is_available():
        raise ValueError(f'device={device}, but PyTorch finds no CUDA device')
    if args.num_samples < 1 or args.max_new_tokens < 0:
        raise ValueError('--num_samples must be at least 1 and --max_new_tokens at least 0')
    model, tokenizer, checkpoint = load_checkpoint(os.path.join(args.out_dir, 'ckpt.pt'), device)
    T, start = model.config.block_size, args.start
    torch.manual_seed(args.seed)

    if start == '-' or start.startswith('FILE:'):
        with open(0 if start == '-' else start[5:], encoding='utf-8', errors='replace') as f:
            start = f.read()
    idx = torch.tensor([tokenizer.encode_ordinary(start) or [tokenizer.eot_token]])
    if 'val' in (args.routing, args.probe):                         # about 2,048 tokens, spread over the file
        folder = os.path.join(checkpoint['train']['data_dir'], checkpoint['train']['dataset'])
        tokens, meta = load_tokens(folder, 'val')
        if meta != checkpoint['meta']:
            raise ValueError(f'{folder} was prepared anew since this model was trained: --start=TEXT still works')
        rows, last = max(2048 // T, 1), max(len(tokens) - T, 0)
        idx = torch.stack([torch.from_numpy(tokens[last * i // rows:][:T].astype('int64')) for i in range(rows)])
    elif not start and 'start' in (args.routing, args.probe):
        raise ValueError('there is no text to look at: give --start=TEXT, --routing=val or --probe=val')
    idx = idx.to(device)

    if args.routing and model.config.residual == 'delta':
        show_gates(model)
    if args.probe:
        show_probe(model, idx[:, :T])
    elif args.routing in ('start', 'val'):
        path = args.svg or os.path.join(args.out_dir, 'depth_map.svg')
        show_map(model, idx[:, :T], path, f'{args.out_dir}: mean depth weights')
    else:
        idx = idx.repeat(1 if args.routing else args.num_samples, 1)
        out = generate(model, idx, args.max_new_tokens, args.temperature, args.top_k, tokenizer.n_vocab)
        if args.routing:
            show_tokens(model, out[:, -T:], tokenizer, args.site, args.head)
        else:
            print('\n---------------\n'.join(tokenizer.decode(row[not start:]) for row in out.tolist()))


def main(argv=None):
    parser = argparse.ArgumentParser('sample.py', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag('--out_dir', default='out/tiny-mhar', help='folder of the checkpoint (default: %(default)s)')
    flag('--start', default='', help='prompt, FILE:path or - for standard input; empty: the end-of-text token')
    flag('--num_samples', type=int, default=3, help='default: %(default)s')
    flag('--max_new_tokens', type=int, default=200, help='default: %(default)s')
    flag('--temperature', type=float, default=0.8, help='0 takes the likeliest token (default: %(default)s)')
    flag('--top_k', type=int, default=50, help='draw from the k likeliest tokens, 0: from all (default: %(default)s)')
    flag('--seed', type=int, default=1, help='default: %(default)s')
    flag('--device', default='auto', help='auto, cpu, mps, cuda or cuda:N')
    flag('--routing', nargs='?', const='start', choices=('start', 'val', 'tokens'),
         help='depth map over the text of --start or the validation set; tokens: strongest source of each new token')
    flag('--site', help='for --routing=tokens: attn0, mlp0, ..., out (default: the last)')
    flag('--head', type=int, default=0, help='for --routing=tokens: a routing head (default: %(default)s)')
    flag('--probe', nargs='?', const='val', choices=('start', 'val'), help='for a model with one routing head')
    flag('--report', nargs='+', metavar='DIR', help='compare finished runs with the first')
    flag('--svg', metavar='PATH', help='where the picture goes (default: depth_map.svg or loss.svg in out_dir)')
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors='replace')                        # what the terminal cannot show is no reason to stop
    try:
        run(args)
        sys.stdout.flush()
    except BrokenPipeError:                                         # the reader, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, RuntimeError, ValueError) as e:
        sys.exit(f'{parser.prog}: error: {e}')


if __name__ == '__main__':
    main()
