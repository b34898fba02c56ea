"""
Train a GPT of model.py.

    python train.py                                         tiny mhar on Python's own library, minutes on a CPU
    python train.py --residual=standard                     the same without routing
    python train.py --preset=100M --dataset=fineweb_edu     one 80 GB GPU; prepare_data.py gets the data
    torchrun --nproc_per_node=8 train.py --preset=1B --dataset=fineweb_edu
    python train.py --resume                                continue out/tiny-mhar exactly where it stopped
    python train.py --init_from=out/tiny-standard/ckpt.pt --residual=delta      graft routing onto a trained model
    python train.py --preset=100M --benchmark               time a step of standard, attnres and mhar

A preset sets shape and recipe, flags override it, and the result is printed. With --init_from the run of that
checkpoint takes the preset's place, and routing (model.stream) is all that may be new to its weights. out_dir receives
log.jsonl (records with loss or val_loss) and ckpt.pt (for --resume and sample.py).
"""
import argparse
import gc
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')    # read by torch: threads that spin waste a CPU shared with others

import numpy as np
import torch
import torch._dynamo            # the optimizer would import it; after init_process_group that leaks gloo's threads
import torch.distributed as dist

import prepare_data
from model import GPT, STREAMS, GPTConfig
from routing_kernel import use_triton


# ---- configuration

@dataclass
class TrainConfig:      # every field is a flag and its comment the flag's help; the defaults are the tiny preset
    preset: str = 'tiny'            # shape and recipe
    residual: str = 'mhar'          # what connects the sublayers
    n_route_head: int = 0           # H, routing heads; 0 means 8 for mhar and delta, 1 for attnres
    route_scale: float = 1.0        # factor on the routing logits
    embed_scale: float = 1.0        # factor on the embedding where it enters the stream
    n_depth_group: int = 8          # of delta: groups of consecutive blocks that are one source each
    routing: str = 'auto'           # which code computes the routing
    dataset: str = 'stdlib'         # folder of token files in data_dir
    data_dir: str = 'data'          # where prepare_data.py puts data sets
    out_dir: str = ''               # checkpoint and log (default: out/PRESET-RESIDUAL)
    block_size: int = 256           # T, tokens per sequence
    n_layer: int = 4                # L, transformer blocks
    n_embd: int = 128               # D, model width
    n_head: int = 4                 # attention heads
    n_kv_head: int = 2              # key/value heads
    d_ff: int = 384                 # hidden width of the MLP
    max_steps: int = 400            # length of the run and of the schedule
    batch_size: int = 16            # sequences per micro-step, over all processes
    grad_accum: int = 1             # micro-steps per step
    lr: float = 3e-3                # peak learning rate
    min_lr_ratio: float = 0.1       # the cosine ends at this fraction of lr
    warmup: int = -1                # steps of linear warm-up; -1: 5% of max_steps, at most 1000 (init_from: 25%, 100)
    weight_decay: float = 0.1       # of matrices; norms and routing are not decayed
    beta1: float = 0.9              # of AdamW
    beta2: float = 0.95             # of AdamW
    grad_clip: float = 1.0          # largest norm of the gradient; 0 does not clip
    seed: int = 1                   # of the weights and the data order
    eval_every: int = 100           # steps between evaluations
    eval_sequences: int = 100       # fixed validation sequences, spread evenly over the file
    log_every: int = 10             # steps between log lines
    save_every: int = 100           # steps between checkpoints
    device: str = 'auto'            # auto, cpu, mps, cuda or cuda:N
    dtype: str = 'auto'             # of the computation; weights stay float32
    compile: bool = None            # torch.compile (default: on a GPU)
    cuda_graph: bool = None         # replay forward and backward as one CUDA graph (default: if possible)
    deterministic: bool = False     # bitwise repeatable on a GPU too, but slower
    init_from: str = ''             # a checkpoint whose weights this run starts from, with a fresh optimizer
    resume: bool = False            # continue the run in out_dir
    overwrite: bool = False         # start anew although out_dir holds a checkpoint
    stop_after: int = 0             # save and exit after this many steps of the unchanged schedule
    benchmark: bool = False         # time standard, attnres, mhar and residual on random tokens, grad_accum 1
    sample: bool = True             # print a sample at the end

    def __post_init__(self):
        """Resolves what depends on other fields; ValueError names a value that cannot be."""
        for f in fields(self):
            value, least = getattr(self, f.name), 0 if f.name == 'seed' else 1
            if f.type is int and f.default >= 1 and value < least:
                raise ValueError(f'{f.name}={value} must be at least {least}')
        for name, good in (
                ('lr', 0 < self.lr < math.inf), ('weight_decay', 0 <= self.weight_decay < math.inf),
                ('beta1', 0 <= self.beta1 < 1), ('beta2', 0 <= self.beta2 < 1), ('min_lr_ratio', 0 <= self.min_lr_ratio <= 1),
                ('grad_clip', self.grad_clip >= 0), ('stop_after', self.stop_after >= 0),
                ('route_scale', math.isfinite(self.route_scale)), ('embed_scale', 0 < self.embed_scale < math.inf)):
            if not good:
                raise ValueError(f'{name}={getattr(self, name)} makes no sense')
        if self.warmup < 0:
            self.warmup = min(100, self.max_steps // 4) if self.init_from else min(1000, self.max_steps // 20)
        self.out_dir = self.out_dir or f'out/{self.preset}-{self.residual}'
        self.n_route_head = self.gpt_config(0).n_route_head

    def gpt_config(self, vocab_size):
        shared = {f.name: getattr(self, f.name) for f in fields(GPTConfig) if hasattr(self, f.name)}
        return GPTConfig(vocab_size=-(-vocab_size // 64) * 64, **shared)    # rounded up: faster matrix products


LARGE = dict(n_head=16, n_kv_head=8, block_size=1024, max_steps=20_000, lr=5e-4, eval_every=500, save_every=1000)
PRESETS = {     # from 100M on the paper's; batch_size * grad_accum is its global batch, split to fit one 80 GB GPU
    'tiny': {},
    '13M': dict(n_layer=8, n_embd=192, d_ff=576, n_head=6, n_kv_head=3, block_size=512, batch_size=32, max_steps=800,
                lr=2e-3, eval_every=50, eval_sequences=128),       # for comparisons with seeds: seconds on a large GPU
    '100M': LARGE | dict(n_layer=12, n_embd=512, d_ff=1536, n_head=8, n_kv_head=4, block_size=2048, batch_size=8,
                         grad_accum=8),
    '350M': LARGE | dict(n_layer=24, n_embd=1024, d_ff=4096, batch_size=16, grad_accum=2),
    '1B': LARGE | dict(n_layer=36, n_embd=1280, d_ff=5120, batch_size=8, grad_accum=4),
}
CHOICES = {'preset': PRESETS, 'residual': STREAMS, 'routing': ('auto', 'triton', 'pytorch'),
           'dtype': ('auto', 'bfloat16', 'float16', 'float32')}

# What --resume may change: where and how a run is computed, not what is computed.
FREE = {'routing', 'data_dir', 'out_dir', 'batch_size', 'grad_accum', 'eval_every', 'log_every', 'save_every', 'device',
        'dtype', 'compile', 'cuda_graph', 'deterministic', 'resume', 'overwrite', 'stop_after', 'benchmark', 'sample'}


def parse_flags(argv=None):
    """The flags that were given, as a dict."""
    parser = argparse.ArgumentParser('train.py', usage='python train.py [--flag=value ...]', allow_abbrev=False,
                                     description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     argument_default=argparse.SUPPRESS)
    comments = dict(re.findall(r'^    (\w+): .*?# (.*)', inspect.getsource(TrainConfig), re.M))
    for f in fields(TrainConfig):
        text = comments[f.name].replace('%', '%%') + ('' if f.default in ('', None) else f' (default: {f.default})')
        if f.type is bool:
            parser.add_argument(f'--{f.name}', help=text, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(f'--{f.name}', help=text, type=f.type, choices=CHOICES.get(f.name),
                                metavar=None if f.name in CHOICES else f.type.__name__)
    return vars(parser.parse_args(argv))


# What a run that starts from another one's checkpoint does not inherit: where and how that one was computed.
OWN = {'out_dir', 'warmup', 'init_from', 'routing', 'device', 'dtype', 'compile', 'cuda_graph', 'deterministic',
       'resume', 'overwrite', 'stop_after', 'benchmark', 'sample'}


def origin_flags(given, run):
    """The fields of the run that a run from its checkpoint inherits; a preset, if given, replaces them all."""
    if 'preset' in given:
        return PRESETS[given['preset']]
    own = OWN | ({'n_route_head'} if given.get('residual', run.residual) != run.residual else set())
    return {k: v for k, v in asdict(run).items() if k not in own}


def check_origin(cfg, origin, meta):
    """ValueError names what keeps the weights of the checkpoint `origin` from being those of this run's model."""
    path = cfg.init_from
    try:
        had, config, _ = origin['meta'], GPTConfig(**origin['config']), origin['model'].keys()
        had['tokenizer'], had['vocab_size']
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'{path} is not a checkpoint of this train.py: {e}') from e
    for key in 'tokenizer', 'vocab_size':
        if had[key] != meta[key]:
            raise ValueError(f'{key} is {had[key]} in {path}, but {meta[key]} in {cfg.data_dir}/{cfg.dataset}')
    config = cfg.gpt_config(meta['vocab_size'])
    for key, value in asdict(config).items():
        free = 'residual', 'n_route_head', 'route_scale', 'n_depth_group', 'routing', 'block_size'
        if key not in free and origin['config'].get(key, value) != value:
            raise ValueError(f'{key} is {origin["config"][key]} in {path}, not {value}')
    with torch.device('meta'):
        model = GPT(config).state_dict()
    for name in sorted(model.keys() | origin['model'].keys()):
        if name not in origin['model'] and not name.startswith('stream.'):
            raise ValueError(f'{path} has no {name}')
        if name not in model:
            raise ValueError(f'{path} has {name}, for which a {cfg.residual} model has no place')
        shapes = [tuple(weights[name].shape) for weights in (origin['model'], model) if name in weights]
        if shapes[0] != shapes[-1]:
            raise ValueError(f'{name} has shape {shapes[0]} in {path}, not {shapes[1]}')


def resume_config(given, run):
    """The run's config with the free flags of this call; ValueError names a flag that contradicts the run."""
    def defining(c):
        return {k: v for k, v in asdict(c).items() if k not in FREE} | {'global batch': c.batch_size * c.grad_accum}

    cfg = replace(run, **{'stop_after': 0} | given)
    for key, value in defining(run).items():
        if defining(cfg)[key] != value:
            raise ValueError(f'cannot resume: {key} is {value} in the run, not {defining(cfg)[key]}')
    return cfg


# ---- data: which sequences a step reads is a pure function, so there is no loader state to save or to share

def open_data(cfg, rank, world_size):
    """(train tokens, val tokens, meta.json), checked for what would fail obscurely later."""
    folder = Path(cfg.data_dir, cfg.dataset)
    if rank == 0 and cfg.dataset == 'stdlib' and not (folder / 'meta.json').exists():
        prepare_data.prepare_stdlib(folder)
    if world_size > 1:
        dist.barrier()
    splits = []
    for split in 'train', 'val':
        tokens, meta = prepare_data.load_tokens(folder, split)
        if len(tokens) <= cfg.block_size:
            raise ValueError(f'{folder}/{split}.bin has {len(tokens)} tokens, fewer than block_size + 1, one sequence')
        largest = max(int(tokens[i:i + 2**22].max()) for i in range(0, len(tokens), 2**22))
        if largest >= meta['vocab_size']:       # on a GPU this would be an assertion in a kernel
            raise ValueError(f'{folder}/{split}.bin holds token id {largest}, its vocabulary only {meta["vocab_size"]}')
        splits.append(tokens)
    return *splits, meta


def load_sequences(tokens, index, T):
    """Sequences number `index` of the file: T inputs and one more token for the last target, int64 len(index) T+1."""
    return torch.from_numpy(np.stack([tokens[j * T:j * T + T + 1] for j in index]).astype(np.int64))


@lru_cache(2)
def permutation(seed, epoch, n):
    return np.random.default_rng((seed, epoch)).permutation(n)


def micro_batches(tokens, cfg, step, rank=0, world_size=1):
    """
    The grad_accum batches of a step, B T+1 each. With G sequences a step, its sequence i is number
    step * G + i of one shuffled epoch after the other; the processes take slices of each micro-step.
    """
    n, B = (len(tokens) - 1) // cfg.block_size, cfg.batch_size // world_size
    for micro in range(cfg.grad_accum):
        first = (step * cfg.grad_accum + micro) * cfg.batch_size + rank * B
        index = [permutation(cfg.seed, i // n, n)[i % n] for i in range(first, first + B)]
        yield load_sequences(tokens, index, cfg.block_size)


# ---- one step

def learning_rate(step, cfg):
    """Linear warm-up, then a cosine to min_lr_ratio * lr."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    progress = (step - cfg.warmup) / max(1, cfg.max_steps - cfg.warmup)
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class Trainer:
    """A model with its gradients and optimizer: step() is one update, evaluate() a validation loss."""

    def __init__(self, cfg, vocab_size, device, rank=0, world_size=1):
        self.cfg, self.device, self.rank, self.world_size = cfg, device, rank, world_size
        self.cuda = device.type == 'cuda'
        self.dtype = getattr(torch, cfg.dtype) if cfg.dtype != 'auto' else torch.float32 if not self.cuda else (
            torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16)

        torch.manual_seed(cfg.seed)     # drawn on the CPU: the same weights on every device, in every mode and process
        self.model = GPT(cfg.gpt_config(vocab_size)).to(device)
        if self.cuda if cfg.compile is None else cfg.compile:
            self.model.compile_parts()

        # All gradients are views of one buffer: zeroing, the sum over processes, the norm and clipping are
        # one operation each. The loss rides along as its last element.
        params = dict(self.model.named_parameters())
        sizes = [p.numel() for p in params.values()]
        self.flat = torch.zeros(sum(sizes) + 1, device=device)
        self.grads, self.loss = self.flat[:-1], self.flat[-1]
        for p, grad in zip(params.values(), self.grads.split(sizes)):
            p.grad = grad.view_as(p)

        # Gains and routing (model.stream) are not decayed; every matrix is, the tied embedding too.
        undecayed = {name for name, p in params.items() if p.ndim == 1 or name.startswith('stream.')}
        groups = [{'params': [p for n, p in params.items() if n not in undecayed], 'weight_decay': cfg.weight_decay},
                  {'params': [p for n, p in params.items() if n in undecayed], 'weight_decay': 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)    # idle in other dtypes

        self.graph, self.graph_bytes = None, 0
        if self.cuda and self.dtype != torch.float16 and cfg.cuda_graph is not False:
            self.capture()

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def forward(self, idx, targets):
        with self.autocast():
            return self.model(idx, targets)

    def forward_backward(self, tokens):
        """Adds the gradients and the loss of one micro-batch, B T+1, to the flat buffer."""
        loss = self.forward(tokens[:, :-1], tokens[:, 1:]) / self.cfg.grad_accum
        self.scaler.scale(loss).backward()
        self.loss += loss.detach()

    def capture(self):
        """
        Record forward_backward as a CUDA graph. Routing is hundreds of small kernels: launching them
        one by one from Python would take longer than running them.
        """
        shape = self.cfg.batch_size // self.world_size, self.cfg.block_size + 1
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)      # a replay reads its input here
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):      # compiles and tunes kernels, allocates workspaces: nothing of that can be recorded
                self.forward_backward(self.tokens)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.reset_peak_memory_stats()
        before, graph = torch.cuda.memory_allocated(), torch.cuda.CUDAGraph()
        try:                        # thread_local: NCCL's watchdog thread may query its events meanwhile
            with torch.cuda.graph(graph, stream=side, capture_error_mode='thread_local'):
                self.forward_backward(self.tokens)
            self.graph, self.graph_bytes = graph, torch.cuda.max_memory_allocated() - before
        except RuntimeError as e:
            print(f'no CUDA graph, running eagerly: {str(e).splitlines()[0]}')
        self.flat.zero_()

    def step(self, batches, lr):
        """One update from the micro-batches. Returns (loss, gradient norm) on the device, without waiting for it."""
        self.flat.zero_()
        for tokens in batches:
            if self.cuda:
                tokens = tokens.pin_memory()        # so that copies do not wait for the GPU
            if self.graph:
                self.tokens.copy_(tokens, non_blocking=True)
                self.graph.replay()
            else:
                self.forward_backward(tokens.to(self.device, non_blocking=True))
        if self.world_size > 1:
            dist.all_reduce(self.flat)
            self.flat /= self.world_size
        self.scaler.unscale_(self.optimizer)
        norm = self.grads.norm()
        if self.cfg.grad_clip > 0:
            self.grads *= (self.cfg.grad_clip / (norm + 1e-6)).clamp(max=1)
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        self.scaler.step(self.optimizer)            # under fp16 skips an update whose gradients overflowed
        self.scaler.update()
        return torch.stack((self.loss, norm))

    @torch.no_grad()
    def evaluate(self, tokens):
        """Mean loss, in nats a token, of sequences spread evenly over the file: the same in every mode and seed."""
        T, B = self.cfg.block_size, self.cfg.batch_size // self.world_size
        n = (len(tokens) - 1) // T
        count = min(self.cfg.eval_sequences, n)
        index = (np.arange(count) * n // count)[self.rank::self.world_size]
        total = torch.zeros((), device=self.device)
        for part in (index[i:i + B] for i in range(0, len(index), B)):
            batch = load_sequences(tokens, np.resize(part, B), T).to(self.device)
            targets = batch[:, 1:].clone()
            targets[len(part):] = -100      # a short last batch is filled up, for compiled shapes; that is not counted
            total += self.forward(batch[:, :-1], targets) * len(part)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.item() / count

    def load(self, checkpoint):
        try:
            self.model.load_state_dict(checkpoint['model'])
        except RuntimeError as e:
            sys.exit(f'train.py: cannot resume, the checkpoint is of another model.py: {" ".join(str(e).split())[:200]}')
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        if checkpoint['scaler']:
            self.scaler.load_state_dict(checkpoint['scaler'])
        torch.set_rng_state(checkpoint['rng'][0])       # nothing draws from it here, a fork with dropout will
        if self.cuda and len(checkpoint['rng']) > 1:
            torch.cuda.set_rng_state(checkpoint['rng'][1])

    @torch.no_grad()
    @torch.compiler.set_stance('force_eager')       # compiled, the two models would round differently
    def graft(self, origin, tokens):
        """
        Take the weights of the checkpoint `origin`; what it lacks, routing, stays as initialised. Returns the
        validation loss of its model and of this one, and the largest difference between their logits.
        """
        more = {'routing': self.cfg.routing, 'block_size': self.cfg.block_size}
        old, new = GPT(GPTConfig(**origin['config'] | more)).to(self.device), self.model
        old.load_state_dict(origin['model'])
        new.load_state_dict(new.state_dict() | origin['model'])
        idx = load_sequences(tokens, [0], self.cfg.block_size)[:, :-1].to(self.device)
        losses, logits = [], []
        for self.model in old, new:             # and new it stays
            losses.append(self.evaluate(tokens))
            with self.autocast():
                logits.append(self.model(idx).float())
        return *losses, (logits[0] - logits[1]).abs().max().item()

    def memory(self):
        """The GPU allocator's peak since the last call in GiB; it does not count what a replayed graph works in."""
        if not self.cuda:
            return None
        peak = torch.cuda.max_memory_allocated() + self.graph_bytes
        torch.cuda.reset_peak_memory_stats()
        return round(peak / 2**30, 3)


# ---- checkpoints

def save_checkpoint(path, trainer, **more):
    """Plain dicts, numbers and tensors. Killed at any moment, path is the old checkpoint or the new one."""
    rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if trainer.cuda else [])
    checkpoint = more | {'model': trainer.model.state_dict(), 'optimizer': trainer.optimizer.state_dict(),
                         'scaler': trainer.scaler.state_dict(), 'config': asdict(trainer.model.config),
                         'train': asdict(trainer.cfg), 'seed': trainer.cfg.seed, 'rng': rng}
    tmp = Path(f'{path}.tmp')
    try:
        with open(tmp, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:            # RuntimeError: what PyTorch's writer makes of a full disk
        tmp.unlink(missing_ok=True)
        left = 'the earlier one is whole' if path.exists() else 'nothing was saved'
        sys.exit(f'train.py: cannot write {path} (disk full?), {left}: {str(e).splitlines()[0]}')


def load_checkpoint(path, what='nothing to resume'):
    if not path.exists():
        raise FileNotFoundError(f'{what}, there is no {path}')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        return checkpoint | {'train': TrainConfig(**checkpoint['train'])}
    except Exception as e:                          # a torn or foreign file can fail in many ways
        raise ValueError(f'{path} is damaged or not a checkpoint of train.py ({type(e).__name__})') from e


def record_step(line):
    try:
        return json.loads(line)['step']
    except (ValueError, TypeError, KeyError):       # a crash of the machine may leave anything
        return math.inf


def prepare_out_dir(out, step):
    """Drop what a run logged after its checkpoint at `step`; step 0 is a new run and drops everything."""
    out.mkdir(parents=True, exist_ok=True)
    if step == 0:
        (out / 'ckpt.pt').unlink(missing_ok=True)
    log = out / 'log.jsonl'
    log.touch()
    good = takewhile(lambda x: x.endswith(b'\n') and record_step(x) <= step, log.read_bytes().splitlines(keepends=True))
    os.truncate(log, sum(map(len, good)))


# ---- the run

PEAK_FLOPS = {      # dense bf16, by exact device name; other GPUs get no MFU
    'NVIDIA H200': 989e12, 'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA L4': 121e12,
    'NVIDIA A100-SXM4-80GB': 312e12, 'NVIDIA A100-SXM4-40GB': 312e12, 'NVIDIA GeForce RTX 4090': 165e12}


def flops_per_token(model):
    """PaLM's count: 6 per weight of a matrix product, and attention as if it were not causal; no routing."""
    c = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith('stream.'))
    return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size


def start_processes(cfg):
    """(device, rank, world_size); torchrun starts one process per GPU and numbers them."""
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if cfg.batch_size % world_size:
        raise ValueError(f'batch_size={cfg.batch_size} must be a multiple of the {world_size} processes')
    device = torch.device(cfg.device if cfg.device != 'auto' else 'cuda' if torch.cuda.is_available() else
                          'mps' if torch.backends.mps.is_available() else 'cpu')
    if cfg.deterministic:
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')     # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise ValueError(f'device={device}, but PyTorch finds no CUDA device')
        device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)) if device.index is None else device.index)
        torch.cuda.set_device(device)
        if cfg.dtype != 'float32' and not cfg.deterministic:
            torch.set_float32_matmul_precision('high')                  # TF32 where autocast leaves fp32
    if world_size > 1:
        cuda = device.type == 'cuda'
        dist.init_process_group('nccl' if cuda else 'gloo', device_id=device if cuda else None)
    if rank > 0:
        sys.stdout = open(os.devnull, 'w')                              # one process prints
    return device, rank, world_size


def train(cfg, data, checkpoint, origin, device, rank, world_size):
    """
    From the checkpoint, or from the start if it is None, to the end of the schedule or to a stop. A start
    from origin, another run's checkpoint, has its weights.
    """
    train_tokens, val_tokens, meta = data
    state = checkpoint or {'step': 0, 'best_val': math.inf, 'elapsed': 0.0}
    start, best_val, elapsed, out = state['step'], state['best_val'], state['elapsed'], Path(cfg.out_dir)
    trainer = Trainer(cfg, meta['vocab_size'], device, rank, world_size)
    if checkpoint:
        trainer.load(checkpoint)
        checkpoint.clear()      # gigabytes of the host's memory
    if rank == 0:               # only now: a run that cannot start must not cost the one that is here
        prepare_out_dir(out, start)
    step_tokens = cfg.batch_size * cfg.grad_accum * cfg.block_size
    peak_flops = trainer.cuda and trainer.dtype != torch.float32 and PEAK_FLOPS.get(torch.cuda.get_device_name(device))
    print(f'{sum(p.numel() for p in trainer.model.parameters()):,} parameters, {len(train_tokens):,} training tokens, '
          f'{step_tokens:,} a step; {device}, {trainer.dtype}, processes: {world_size}, '
          f'CUDA graph: {"yes" if trainer.graph else "no"}', flush=True)

    def log(**record):
        if rank == 0:
            with open(out / 'log.jsonl', 'a') as f:
                f.write(json.dumps(record) + '\n')

    if origin:
        before, after, difference = trainer.graft(origin, val_tokens)
        origin.clear()
        log(step=0, val_loss=after, tokens=0, elapsed=0.0)
        print(f'step     0/{cfg.max_steps}  val_loss {after:.4f}, {before:.4f} as {cfg.init_from}; '
              f'largest difference of the logits {difference:.3g}', flush=True)

    stop_signals = []           # the first SIGINT or SIGTERM asks to save and exit, the second one kills
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda number, _: stop_signals.append(signal.signal(number, signal.SIG_DFL)))

    def say(text):
        try:
            print(text, flush=True)
        except BrokenPipeError:     # train.py | head: the reader is gone, so save and exit as well
            sys.stdout = open(os.devnull, 'w')
            stop_signals.append(None)

    # elapsed and tokens/s are wall-clock with data and logging, but without capture, evaluation and saving.
    began = time.perf_counter() - elapsed
    saved, logged, logged_elapsed, pending = start, start, elapsed, []
    trainer.memory()
    for step in range(start, cfg.max_steps):
        lr = learning_rate(step, cfg)
        pending.append(trainer.step(micro_batches(train_tokens, cfg, step, rank, world_size), lr))

        done = step + 1         # steps finished
        stopping = bool(stop_signals) or done - start == cfg.stop_after
        if world_size > 1:      # a signal reaches processes at different steps, but they must stop at the same one
            flag = torch.tensor(float(stopping), device=device)
            dist.all_reduce(flag)
            stopping = flag.item() > 0
        ending = done == cfg.max_steps
        logging = ending or done % cfg.log_every == 0
        evaluating = ending or done % cfg.eval_every == 0
        saving = ending or stopping or done % cfg.save_every == 0
        if not (logging or evaluating or saving):
            continue            # do not wait for the GPU

        # Look at every step since the last look, so that a broken one is never saved.
        results = torch.stack(pending).tolist()
        for at, (loss, norm) in enumerate(results, done - len(results) + 1):
            # Normal in fp16, the update was skipped; not if the scale shrinks for ever.
            overflow = trainer.scaler.is_enabled() and math.isfinite(loss) and trainer.scaler.get_scale() > 1e-3
            if not math.isfinite(loss + norm) and not overflow:
                sys.exit(f'train.py: loss {loss}, gradient norm {norm} at step {at}; ' +
                         (f'the last checkpoint, of step {saved}, is good' if saved else 'nothing was saved'))
        elapsed, pending = time.perf_counter() - began, []

        if logging:
            seconds, memory = (elapsed - logged_elapsed) / (done - logged), trainer.memory()
            speed, logged, logged_elapsed = step_tokens / seconds, done, elapsed
            log(step=done, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=speed, elapsed=elapsed, memory_gib=memory)
            mfu = speed / world_size * flops_per_token(trainer.model) / peak_flops if peak_flops else 0
            say(f'step {done:>5}/{cfg.max_steps}  loss {loss:.4f}  lr {lr:.2e}  {speed:,.0f} tok/s' +
                (f'  {memory:.2f} GiB' if memory else '') + (f'  MFU {mfu:.1%}' if mfu else '') +
                f'  {seconds * (cfg.max_steps - done) / 60:.1f} min left')
        if evaluating:
            val_loss = trainer.evaluate(val_tokens)
            best_val = min(best_val, val_loss)
            log(step=done, val_loss=val_loss, tokens=done * step_tokens, elapsed=elapsed)
            say(f'step {done:>5}/{cfg.max_steps}  val_loss {val_loss:.4f}')
        if saving:
            if not all(p.isfinite().all() for p in trainer.model.parameters()):     # the last update can break them yet
                sys.exit(f'train.py: weights not finite after step {done}; ' +
                         (f'the last checkpoint, of step {saved}, is good' if saved else 'nothing was saved'))
            saved = done
            if rank == 0:
                save_checkpoint(out / 'ckpt.pt', trainer, step=done, meta=meta, best_val=best_val, elapsed=elapsed)
        if evaluating or saving:
            began = time.perf_counter() - elapsed
        if stopping and not ending:
            return say(f'stopped after step {done}: --resume continues')

    if rank == 0 and cfg.sample:
        print_sample(cfg, trainer.model, meta, device)


def print_sample(cfg, model, meta, device):
    from sample import generate
    try:
        tokenizer = prepare_data.get_tokenizer(meta['tokenizer'])
    except RuntimeError as e:
        return print(f'no sample: {e}')
    prompt = tokenizer.encode_ordinary('def ' if cfg.dataset == 'stdlib' else '\n')
    ids = generate(model, torch.tensor([prompt], device=device), 200, vocab_size=meta['vocab_size'])[0].tolist()
    print('\n' + tokenizer.decode([i for i in ids if i != meta['eot']]))


def benchmark(cfg, device, rank, world_size):
    """Time whole steps of standard, attnres, mhar and the mode asked for on random tokens, and print a table."""
    print('\nresidual   H   ms/step   tokens/s  ratio      GiB  ratio  CUDA graph')
    first, vocab_size = None, 257 if cfg.preset == 'tiny' else 50257
    tokens = torch.randint(vocab_size, (cfg.batch_size // world_size, cfg.block_size + 1))
    for mode in dict.fromkeys(('standard', 'attnres', 'mhar', cfg.residual)):
        heads = cfg.n_route_head if mode == cfg.residual else 0
        mode_cfg = replace(cfg, residual=mode, n_route_head=heads, grad_accum=1)
        trainer, times = Trainer(mode_cfg, vocab_size, device, rank, world_size), []
        while len(times) < 8 or len(times) < 50 and times[-1] - times[0] < 30:
            trainer.step([tokens], cfg.lr).tolist()     # waits for the GPU
            times.append(time.perf_counter())
        seconds, memory = float(np.median(np.diff(times)[2:])), trainer.memory()        # the first ones warm up
        first = first or (seconds, memory)
        gib = f'{memory:8.2f} {memory / first[1]:6.2f}' if memory else f'{"-":>8} {"-":>6}'
        print(f'{mode:8} {trainer.model.config.n_route_head:3} {1e3 * seconds:9.1f} '
              f'{cfg.batch_size * cfg.block_size / seconds:10,.0f} {first[0] / seconds:6.2f} {gib}  '
              f'{"yes" if trainer.graph else "no"}', flush=True)
        del trainer
        gc.collect()
        torch._dynamo.reset()
        if device.type == 'cuda':
            torch.cuda.empty_cache()


def main(argv=None):
    given = parse_flags(argv)
    try:        # what a user can get wrong is found here, and is one sentence
        resume, init_from, checkpoint, origin = given.get('resume'), given.get('init_from'), None, None
        # A run that is resumed knows its own shape: only what names its folder counts here.
        known = {k: v for k, v in given.items() if not resume or k in ('preset', 'residual', 'out_dir')}
        base = PRESETS[given.get('preset', 'tiny')]
        if init_from and not resume:                # a run that is resumed has left its origin behind
            origin = load_checkpoint(Path(init_from), 'nothing to start from')
            base = origin_flags(given, origin['train'])
        cfg = TrainConfig(**base | known)
        path = Path(cfg.out_dir, 'ckpt.pt')
        if resume:
            checkpoint = load_checkpoint(path)
            cfg = resume_config({'out_dir': cfg.out_dir} | given, checkpoint['train'])
        elif origin and path.exists() and path.samefile(init_from) and not cfg.benchmark:
            raise ValueError(f'{path} would be overwritten by the run that starts from it: --out_dir goes elsewhere')
        elif path.exists() and not (cfg.overwrite or cfg.benchmark):
            raise ValueError(f'{path} exists: --resume continues it, --overwrite starts anew, --out_dir goes elsewhere')
        device, rank, world_size = start_processes(cfg)
        if hasattr(STREAMS[cfg.residual], 'sources'):
            use_triton(cfg.routing, device)
        data = None if cfg.benchmark else open_data(cfg, rank, world_size)
        if origin and data:
            check_origin(cfg, origin, data[-1])
        if checkpoint and data and checkpoint['meta'] != data[-1]:
            raise ValueError(f'cannot resume: {cfg.data_dir}/{cfg.dataset} was prepared anew since the run began')
    except (ValueError, OSError, RuntimeError) as e:
        sys.exit(f'train.py: {e}')
    print(textwrap.fill('  '.join(f'{k}={v}' for k, v in asdict(cfg).items()), 110), flush=True)
    try:
        if cfg.benchmark:
            benchmark(cfg, device, rank, world_size)
        else:
            train(cfg, data, checkpoint, origin, device, rank, world_size)
    except OSError as e:        # a full disk
        sys.exit(f'train.py: {e}')
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')        # a sample may hold what the terminal cannot show
    main()
