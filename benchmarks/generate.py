"""Speed of text generation against transformers and vLLM, in one run.

    python benchmarks/generate.py                              # SmolLM2-135M (embedded), batches of 1 and 32
    python benchmarks/generate.py --model random:llama-1b      # random weights of a 1.2B Llama shape, for GPUs

Greedy, without stop tokens, the same prompts, dtype and number of new tokens for all: float32 on CPU, bfloat16 on GPUs.
Prompts of a batch have different lengths, from half the longest up. Each engine is first run once (it compiles, or
fills its caches), then the engines take turns, three times, and the best time of each counts. `prefill` ends when the
first tokens are known on the host, `decode` is the rest. Each engine has a process of its own, because torch.compile
does not work where torchax is loaded, and waits while another one runs. The peers are

    dynamic   transformers' generate as it is
    static    with cache_implementation="static", whose decoding transformers compiles with torch.compile
    vllm      where it can be imported, on a GPU; its prefill is the time of a request for one token

Prints a table with ratios to the best of transformers, and writes one JSON file with `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from random_model import SHAPES, write_model
from record import add_record_option, by_name, record_if

SOURCES = ("benchmarks/generate.py", "src/trillora/generation", "src/trillora/model")

Prompts = list[list[int]]


Run = tuple[float, float, list[list[int]]]  # seconds to the first tokens, seconds for the rest, the new tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"folder, smollm2 or random:{'|'.join(SHAPES)}")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=80, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="*", default=["ours", "dynamic", "static", "vllm"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch on CPU")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    add_record_option(parser)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as work:
        args.model = str(find_model(args.model, Path(work)))
        rows, facts = measure(args)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, **facts}, indent=1) + "\n")
    record_if(args.record, "generate-gpu" if on_gpu() else "generate", by_name(rows, "batch", "engine"), SOURCES)


def find_model(name: str, work: Path) -> Path:
    if name == "smollm2":
        from trillora.model.loading.embedded import smollm2_folder

        return smollm2_folder()
    kind, _, shape = name.partition(":")
    if kind != "random":
        return Path(name)
    write_model(work / shape, shape)
    return work / shape


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    has_vllm = on_gpu() and importlib.util.find_spec("vllm") is not None
    engines = [Engine(name, args) for name in args.engines if name != "vllm" or has_vllm]
    vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        prompts = make_prompts(batch, args.prompt, vocabulary)
        ready = [engine for engine in engines if warm(engine, prompts, args.new)]
        found: dict[str, list[Run]] = {engine.name: [] for engine in ready}
        for _ in range(args.repeats):
            for engine in ready:
                found[engine.name].append(engine.run(prompts, args.new))
        rows += summarize(batch, args, prompts, found)
        for row in rows[-len(ready) :]:
            print(json.dumps(row), flush=True)
    for engine in engines:
        engine.close()
    facts = {
        "model": args.model,
        "dtype": dtype(),
        "threads": args.threads,
        "versions": {n: version(n) for n in ("jax", "torch", "torchax", "transformers", *["vllm"] * has_vllm)},
    }
    return rows, facts


@functools.cache
def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def dtype() -> str:
    return "bfloat16" if on_gpu() else "float32"


class Engine:
    """A process that generates on request: prompts as a line of JSON on its input, a `Run` on its output."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, __file__, "--serve", name, "--model", args.model, "--threads", str(args.threads)]
        command += ["--prompt", str(args.prompt), "--new", str(args.new), "--batches", str(max(args.batches))]
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", **os.environ}  # the others need room on the same GPU
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def run(self, prompts: Prompts, num_new: int) -> Run:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        stdin.write(json.dumps([prompts, num_new]) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline() or '"ended"')
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer[0], answer[1], answer[2]

    def close(self) -> None:
        self._process.communicate()


def serve(args: argparse.Namespace) -> None:
    """The process of an engine. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    makers: dict[str, Callable[[], Any]] = {
        "ours": lambda: Ours(args.model, args.batches[0]),
        "dynamic": lambda: Transformers(args.model, args.threads, None),
        "static": lambda: Transformers(args.model, args.threads, "static"),
        "vllm": lambda: Vllm(args.model, args.prompt + args.new),
    }
    engine = None
    for line in sys.stdin:
        prompts, num_new = json.loads(line)
        try:
            engine = engine or makers[args.serve]()
            answer: Any = engine.run(prompts, num_new)
        except Exception as error:  # whatever a compiler raises: the others still count
            answer = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(answer), file=answers, flush=True)


def make_prompts(batch: int, longest: int, vocabulary: int) -> Prompts:
    """Token ids that repeat nothing. The longest comes first, the shortest has half its length."""
    import numpy as np

    random = np.random.default_rng(0)
    lengths = np.linspace(longest, longest / 2, batch).astype(int)
    return [random.integers(10, min(vocabulary, 20_000) - 1, n).tolist() for n in lengths]


def warm(engine: Engine, prompts: Prompts, num_new: int) -> bool:
    started = time.perf_counter()
    try:
        engine.run(prompts, num_new)
    except RuntimeError as error:
        print(f"{engine.name}: {error}", flush=True)
        return False
    print(f"{engine.name}: first run of batch {len(prompts)} {time.perf_counter() - started:.1f} s", flush=True)
    return True


def summarize(batch: int, args: argparse.Namespace, prompts: Prompts, found: dict[str, Any]) -> list[dict[str, Any]]:
    num_read = sum(map(len, prompts))
    first = next(iter(found.values()))[-1][2]
    rows = []
    for name, runs in found.items():
        prefill, decode = min(run[0] for run in runs), min(run[1] for run in runs)
        tokens = runs[-1][2]
        same = sum(
            a == b for ours, theirs in zip(first, tokens, strict=True) for a, b in zip(ours, theirs, strict=True)
        )
        rows.append(
            {
                "engine": name,
                "batch": batch,
                "prefill_tokens_per_second": num_read / prefill,
                "decode_tokens_per_second": batch * (args.new - 1) / decode,
                "tokens_per_second": batch * args.new / min(run[0] + run[1] for run in runs),
                "median_seconds": statistics.median(run[0] + run[1] for run in runs),
                "equal_tokens": same / (batch * args.new),  # to the first engine's
            }
        )
    best = {
        key: max((row[key] for row in rows if row["engine"] in ("dynamic", "static")), default=None)
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second", "tokens_per_second")
    }
    for row in rows:
        row["ratios"] = {key: row[key] / value for key, value in best.items() if value}
    return rows


class Ours:
    def __init__(self, folder: str, batch_size: int) -> None:
        from trillora.generation.generator import Generator

        self.generator = Generator.open(folder, batch_size=batch_size)
        self.generator.prompts.stops = ()

    def run(self, prompts: Prompts, num_new: int) -> Run:
        import numpy as np

        started = time.perf_counter()
        parts = self.generator.write(prompts, max_tokens=num_new)
        written = [next(parts)]
        first = time.perf_counter()
        written += list(parts)
        done = time.perf_counter()
        return first - started, done - first, np.concatenate(written, axis=1)[: len(prompts), :num_new].tolist()


class Transformers:
    def __init__(self, folder: str, threads: int, cache: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, CompileConfig

        torch.set_num_threads(threads)
        self.device = "cuda" if on_gpu() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype())).to(self.device).eval()
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False
        settings.temperature = settings.top_p = settings.top_k = None
        self.options: dict[str, Any] = {}
        if cache:
            compiling = CompileConfig()
            compiling._compile_all_devices = True  # transformers compiles on CPU only on request
            self.options = {"cache_implementation": cache, "compile_config": compiling}

    def run(self, prompts: Prompts, num_new: int) -> Run:
        import torch
        from transformers import StoppingCriteriaList

        longest = max(map(len, prompts))
        first: list[float] = []

        def after_token(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            """Called after every token: notes the time of the first, and never stops."""
            if not first:
                ids[0, -1].item()  # waits for the device
                first.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        started = time.perf_counter()
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        with torch.inference_mode() if not self.options else contextlib.nullcontext():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_new,
                stopping_criteria=StoppingCriteriaList([after_token]),
                **self.options,
            )
        tokens = out[:, longest:].tolist()
        done = time.perf_counter()
        return first[0] - started, done - first[0], tokens


class Vllm:
    def __init__(self, folder: str, longest: int) -> None:
        from vllm import LLM

        self.model = LLM(
            folder,
            dtype=dtype(),
            max_model_len=longest + 16,
            gpu_memory_utilization=0.3,
            enable_prefix_caching=False,
        )

    def run(self, prompts: Prompts, num_new: int) -> Run:
        from vllm import SamplingParams

        def seconds(n: int) -> tuple[float, list[list[int]]]:
            rule = SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            started = time.perf_counter()
            out = self.model.generate([{"prompt_token_ids": p} for p in prompts], rule, use_tqdm=False)
            return time.perf_counter() - started, [list(o.outputs[0].token_ids) for o in out]

        first, _ = seconds(1)
        whole, tokens = seconds(num_new)
        return first, whole - first, tokens


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| batch | engine | prefill tokens/s | / transformers | decode tokens/s | / transformers | whole tokens/s "
        "| / transformers | equal tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = []
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second", "tokens_per_second"):
            ratio = row["ratios"].get(key)
            cells += [f"{row[key]:,.1f}", f"{ratio:.2f}" if ratio else ""]
        lines.append(f"| {row['batch']} | {row['engine']} | {' | '.join(cells)} | {row['equal_tokens']:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
