"""
Turn text into token files: data/NAME/{train.bin, val.bin, meta.json}.

    python prepare_data.py                                      Python's own library, 12 MB, no network
    python prepare_data.py --dataset=shakespeare                1 MB download
    python prepare_data.py --dataset=fineweb_edu --shards=10    1B GPT-2 tokens, 200 MB per shard
    python prepare_data.py --input book.txt notes/ --name=mine  your own files and folders
    python prepare_data.py --bin train.bin val.bin --name=ours  ready-made uint16 GPT-2 tokens

A .bin file holds nothing but token ids: each document, then one end-of-text token (ready-made files stay as
they are). Tokens are bytes by default, which needs no download; --tokenizer=gpt2, cl100k_base and o200k_base
are tiktoken's. meta.json records tokenizer, vocabulary size, dtype, counts and checksums, by which a resumed
run knows its data; it is written last, so that a folder that has one is complete.
"""
import argparse
import hashlib
import http.client
import json
import os
import sys
import sysconfig
import time
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import tiktoken

SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
FINEWEB_EDU = 'https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/'  # as in modded-nanogpt
KNOWN = {'byte': (257, 256), 'gpt2': (50257, 50256)}  # vocabulary size and end of text, without the tokenizer
CHUNK = 1 << 22  # tokens in memory at once while copying


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokenizer `name`: 'byte' or one of tiktoken's. RuntimeError, one sentence, if it cannot be had."""
    if name == 'byte':
        # Ids 0..255 are the bytes of the UTF-8 text. The pattern cuts it into characters: without merges
        # any cut gives the same ids, and short pieces are fast (12 MB in 0.6 s).
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding('byte', pat_str=r'(?s:.)', mergeable_ranks=ranks,
                                 special_tokens={'<|endoftext|>': 256})
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise RuntimeError(f'unknown tokenizer {name!r}: use byte, {", ".join(names)}')
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # whatever the network raises
        raise RuntimeError(f'tokenizer {name!r} is not here and cannot be downloaded: connect once, or set '
                           'TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer=byte') from e


def load_tokens(data_dir: str, split: str):
    """
    Open data_dir/{split}.bin: (n,) memory map of token ids, and meta.json as a dict.
    FileNotFoundError if data_dir is not prepared, ValueError if meta.json is damaged or the file is not as
    long as it says, or empty.
    """
    folder = Path(data_dir)
    path, meta_path = folder / f'{split}.bin', folder / 'meta.json'
    if not (path.exists() and meta_path.exists()):
        flags = ('--dataset=' if folder.name in DATASETS else '--input PATH --name=') + folder.name
        flags += '' if folder.parent == Path('data') else f' --data_dir={folder.parent}'
        raise FileNotFoundError(f'{path} is not prepared: run python prepare_data.py {flags}')
    try:
        meta = json.loads(meta_path.read_text(encoding='utf-8'))
        width, expected, _ = {'uint16': 2, 'uint32': 4}[meta['dtype']], int(meta[f'{split}_tokens']), int(meta['vocab_size'])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f'{meta_path} is damaged ({type(e).__name__}): prepare it again') from e
    found = path.stat().st_size / width
    if found != expected or not found:
        raise ValueError(f'{path} holds {found:,.12g} tokens, meta.json says {expected:,}: prepare it again')
    return np.memmap(path, dtype=meta['dtype'], mode='r'), meta


def progress(label, done, total, last=[time.monotonic()]):
    """A status line on stderr: rewritten in place on a terminal, one line in 10 s otherwise."""
    tty, now = sys.stderr.isatty(), time.monotonic()
    if now - last[0] > (0.1 if tty else 10) or (tty and done == total):
        last[0] = now
        end = '\r' if tty and done != total else '\n'
        print(f'{label}: {done:,} / {total:,}', end=end, file=sys.stderr, flush=True)


def download(url: str, path, check=None) -> None:
    """
    Fetch url to path, resuming the .part file that a killed run left behind.
    check(path) raises ValueError if a file, cached or fresh, is not what it should be; it is then fetched
    again from the start. RuntimeError, one sentence, if the file cannot be had.
    """
    path, part = Path(path), Path(f'{path}.part')
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(5):
        try:
            if path.exists():
                if check is not None:
                    check(path)
                return
            have = part.stat().st_size if part.exists() else 0
            request = urllib.request.Request(url, headers={'Range': f'bytes={have}-'} if have else {})
            with urllib.request.urlopen(request, timeout=10) as response:
                # 206: the rest follows. 200: the server ignored Range and sends everything, so start over.
                with open(part, 'ab' if response.status == 206 else 'wb') as f:
                    total = f.tell() + int(response.headers.get('Content-Length', 0))
                    while block := response.read(1 << 20):
                        f.write(block)
                        progress(path.name, f.tell(), total)
                    if f.tell() < total:
                        raise OSError(f'the connection closed after {f.tell():,} of {total:,} bytes')
            os.replace(part, path)  # and around once more, to check it
        except ValueError as e:
            error = e
            print(f'{e}; downloading it again', file=sys.stderr)
            path.unlink(missing_ok=True)
        except (OSError, http.client.HTTPException) as e:
            error = e
            if getattr(e, 'code', None) == 416:  # nothing follows .part: it is complete, or too long
                part.unlink()
    raise RuntimeError(f'cannot download {url} ({error}): run the same command again to resume, or, without '
                       'a network, use --dataset=stdlib or your own text with --input')


def list_files(paths, suffix='', skip=()):
    """
    The text files in `paths`, files or folders: [(path relative to its folder, path)]. Left out are empty
    and binary files (a NUL byte in the first KB), hidden folders, those in `skip`, and prepared data sets.
    """
    found = {}  # by real path: a file given twice counts once
    for top in map(Path, paths):
        candidates = [top]
        for root, folders, names in os.walk(top):  # yields nothing if top is a file
            folders[:] = [name for name in folders if name[0] != '.' and name not in skip]
            if not {'train.bin', 'meta.json'} <= set(names):
                candidates += [Path(root, name) for name in names if name.endswith(suffix)]
        for path in filter(Path.is_file, candidates):  # no broken links, no pipes
            with open(path, 'rb') as f:
                head = f.read(1024)
            if head and b'\0' not in head:
                rel = path.name if path == top else path.relative_to(top).as_posix()
                found.setdefault(path.resolve(), (rel, path))
    return list(found.values())


def token_file(path, vocab_size, need_header=False):
    """
    The uint16 ids in a ready-made token file: (n,) memory map. A header as in llm.c and modded-nanogpt (256
    int32: 20240520, version 1, token count, zeros) is checked and left out. ValueError if the length is wrong
    or an id is not below vocab_size.
    """
    size, header = os.path.getsize(path), np.fromfile(path, np.int32, 256)
    start = 1024 if len(header) == 256 and header[0] == 20240520 else 0
    if need_header and not start:
        raise ValueError(f'{path} is no token shard: it lacks the header')
    if start and (header[1] != 1 or size != start + 2 * int(header[2])):
        raise ValueError(f'{path} is damaged: {size:,} bytes, but the header says {header[2]:,} tokens')
    if size == start or size % 2:
        raise ValueError(f'{path} holds no uint16 tokens: {size:,} bytes')
    ids = np.memmap(path, np.uint16, 'r', offset=start)
    for i in range(0, len(ids), CHUNK):
        bad = ids[i:i + CHUNK] >= vocab_size
        if bad.any():
            i += int(bad.argmax())
            raise ValueError(f'{path}: id {ids[i]} at position {i} is not below vocabulary size {vocab_size}')
    return ids


def write_dataset(out, train, val, encode, *, tokenizer, vocab_size, eot, dtype, source):
    """Write the items of the lists `train` and `val`, encode(item) giving the ids of one, and meta.json."""
    out, begin, counts = Path(out), time.time(), {}
    out.mkdir(parents=True, exist_ok=True)
    for split, items in ('train', train), ('val', val):
        tokens = documents = crc32 = 0
        with open(out / f'{split}.bin.part', 'wb') as f:
            for done, item in enumerate(items, 1):
                ids = encode(item)
                for i in range(0, len(ids), CHUNK):  # a ready-made file may be larger than the memory
                    chunk = np.asarray(ids[i:i + CHUNK], dtype=dtype)
                    f.write(chunk.tobytes())
                    crc32 = zlib.crc32(chunk.tobytes(), crc32)
                    documents += 0 if eot is None else int(np.count_nonzero(chunk == eot))
                tokens += len(ids)
                progress(f'{out / split}.bin', done, len(items))
        if not tokens:
            raise ValueError(f'too little text for {split}.bin in {source}')
        counts |= {f'{split}_tokens': tokens, f'{split}_documents': documents, f'{split}_crc32': crc32}
    meta = dict(tokenizer=tokenizer, vocab_size=vocab_size, eot=eot, dtype=dtype, **counts, source=source)
    (out / 'meta.json.part').write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
    (out / 'meta.json').unlink(missing_ok=True)  # an older set is whole until here, and not one from here on
    for name in 'train.bin', 'val.bin', 'meta.json':
        os.replace(out / f'{name}.part', out / name)
    print(f'{out}: {counts["train_tokens"]:,} + {counts["val_tokens"]:,} tokens (train + val) in '
          f'{counts["train_documents"]:,} + {counts["val_documents"]:,} documents, vocabulary {vocab_size:,} '
          f'({tokenizer}, {dtype}), {time.time() - begin:.1f} s')


def prepare_files(out, files, tokenizer, source):
    """
    Tokenize files = [(relative path, path)], one document each. The hash of the relative path decides split
    and order, so that they are the same on every machine: about 2% of the files are validation, at least one.
    A single file is cut in two instead, the last 10% of its characters being validation.
    """
    enc = get_tokenizer(tokenizer)

    def read(path):
        return path.read_text(encoding='utf-8', errors='replace')

    def encode(document):
        text = read(document) if isinstance(document, Path) else document
        # encode_ordinary: a text that contains '<|endoftext|>' must not end there
        return enc.encode_ordinary(text) + [enc.eot_token]

    if len(files) == 1:
        text = read(files[0][1])
        cut = int(0.9 * len(text))
        train, val = [text[:cut]], [text[cut:]]
    else:
        hashed = sorted((hashlib.sha1(os.fsencode(rel)).hexdigest(), rel, path) for rel, path in files)
        n_val = sum(int(digest[:8], 16) < 0.02 * 2**32 for digest, _, _ in hashed)
        n_val = min(max(n_val, 1), len(hashed) - 1)
        train, val = ([path for _, _, path in part] for part in (hashed[n_val:], hashed[:n_val]))
    write_dataset(out, train, val, encode, tokenizer=tokenizer, vocab_size=enc.n_vocab, eot=enc.eot_token,
                  dtype='uint16' if enc.n_vocab <= 65536 else 'uint32', source=source)


def prepare_stdlib(out='data/stdlib', tokenizer='byte'):
    """The sources of this Python's standard library, without its tests and without installed packages."""
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages'}
    files = list_files([sysconfig.get_paths()['stdlib']], '.py', skip)
    if not files:
        raise RuntimeError('this Python has no library sources: use your own text with --input')
    prepare_files(out, files, tokenizer, f'standard library of Python {sys.version.split()[0]}')


def prepare_shakespeare(out='data/shakespeare', tokenizer='byte'):
    """Tiny Shakespeare: the first 90% of 1.1 MB is for training."""
    def check(path):
        if os.path.getsize(path) != 1115394:
            raise ValueError(f'{path} has {os.path.getsize(path):,} bytes instead of 1,115,394')

    path = Path(out, 'download', 'input.txt')
    download(SHAKESPEARE, path, check)
    prepare_files(out, [(path.name, path)], tokenizer, SHAKESPEARE)


def prepare_fineweb_edu(out='data/fineweb_edu', shards=1):
    """FineWeb-Edu in GPT-2 tokens: `shards` files of 100M tokens for training, one for validation."""
    names = [f'finewebedu_train_{i:06d}.bin' for i in range(1, shards + 1)] + ['finewebedu_val_000000.bin']
    vocab_size, arrays = KNOWN['gpt2'][0], []
    for name in names:
        path = Path(out, 'download', name)
        download(FINEWEB_EDU + name, path, lambda p: token_file(p, vocab_size, need_header=True))
        arrays.append(token_file(path, vocab_size))
    prepare_bin(out, arrays, 'gpt2', *KNOWN['gpt2'], f'{FINEWEB_EDU} ({shards} shards)')


def prepare_bin(out, arrays, tokenizer, vocab_size, eot, source):
    """Join ready-made uint16 ids: the last array is validation; a single one gives its last 1%."""
    if len(arrays) == 1:
        cut = min(int(0.99 * len(arrays[0])), len(arrays[0]) - 1)
        arrays = [arrays[0][:cut], arrays[0][cut:]]
    write_dataset(out, arrays[:-1], arrays[-1:], lambda ids: ids, tokenizer=tokenizer, vocab_size=vocab_size,
                  eot=eot, dtype='uint16', source=source)


DATASETS = {'stdlib': prepare_stdlib, 'shakespeare': prepare_shakespeare, 'fineweb_edu': prepare_fineweb_edu}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--dataset', choices=list(DATASETS), help='default: stdlib')
    what.add_argument('--input', nargs='+', metavar='PATH', help='text files and folders')
    what.add_argument('--bin', nargs='+', metavar='FILE',
                      help='uint16 token files: the last one is validation, a single one is split 99/1')
    parser.add_argument('--tokenizer', help='default: byte; for --bin and fineweb_edu gpt2')
    parser.add_argument('--vocab_size', type=int, help='for --bin with neither byte nor gpt2')
    parser.add_argument('--shards', type=int, help='for fineweb_edu: 1 (default) to 99')
    parser.add_argument('--name', help='folder under data_dir; default: the dataset, else mine')
    parser.add_argument('--data_dir', default='data', help='default: data')
    args = parser.parse_args(argv)

    def require(condition, flag, message):
        if not condition:
            parser.error(f'argument --{flag}: {message}')

    dataset = None if args.input or args.bin else args.dataset or 'stdlib'
    tokenizer = args.tokenizer or ('gpt2' if args.bin or dataset == 'fineweb_edu' else 'byte')
    vocab_size, eot = KNOWN.get(tokenizer, (None, None))
    vocab_size = vocab_size if args.vocab_size is None else args.vocab_size
    out = Path(args.data_dir, args.name or dataset or 'mine')
    require(args.shards is None or (dataset == 'fineweb_edu' and 1 <= args.shards <= 99),
            'shards', 'goes with --dataset=fineweb_edu, 1 to 99')
    require(dataset != 'fineweb_edu' or tokenizer == 'gpt2', 'tokenizer', 'fineweb_edu comes in gpt2 tokens')
    require(args.vocab_size is None or args.bin, 'vocab_size', 'goes with --bin')
    require(not args.bin or (vocab_size or 0) > 0, 'vocab_size', f'say how many tokens {tokenizer} has')
    for path in (args.input or []) + (args.bin or []):
        require(os.path.exists(path), 'input' if args.input else 'bin', f'there is no {path}')
    try:
        if args.input:
            files = list_files(args.input)
            require(files, 'input', f'no text files in {" ".join(args.input)}')
            prepare_files(out, files, tokenizer, ' '.join(args.input))
        elif args.bin:
            arrays = [token_file(path, vocab_size) for path in args.bin]
            prepare_bin(out, arrays, tokenizer, vocab_size, eot, ' '.join(args.bin))
        elif dataset == 'fineweb_edu':
            prepare_fineweb_edu(out, args.shards or 1)
        else:
            DATASETS[dataset](out, tokenizer)
    except (RuntimeError, ValueError, OSError) as e:
        sys.exit(f'{parser.prog}: error: {e}')


if __name__ == '__main__':
    main()
