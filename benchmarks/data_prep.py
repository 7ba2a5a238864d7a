"""Time and memory to prepare a file of chats as packed batches: Trillora against TRL, on the same file.

    python benchmarks/data_prep.py --rows 20000 200000 --peer-python /path/to/environment-with-trl/bin/python

The script generates the file: seeded chats of one to four rounds, median about 150 tokens with SmolLM2's tokenizer,
some up to 900. Each candidate prepares it for sequences of `--sequence-length` tokens, in its own process with empty
caches: Trillora, and `trl.SFTTrainer(packing=True)` with `dataset_num_proc` unset (the default) and set to 2. Both use
the same tokenizer folder. TRL runs in the environment of `--peer-python`.

The clock starts after imports and after the tokenizer (for TRL also a tiny random model) is loaded. For TRL it stops
when the trainer is constructed and its packed data set is in Arrow files. For Trillora it stops when every batch of an
epoch has been built and read, which is more work. SmolLM2's own template does not mark answers, so TRL refuses
`assistant_only_loss`; it trains on everything and computes no masks, while Trillora finds the answers.
`--template marked` gives both the same template with generation marks; TRL then computes masks too. TRL truncates rows
that are longer than the sequence length; none of these chats is.

Memory is sampled over the candidate's process tree. `peak MB` is the sum of resident memory, sampled twenty times per
second; a shared page counts once per process. `unbacked` is memory that is not backed by a file, with shared pages
counted once, sampled twice per second: the system cannot reclaim it, so it must not grow with the data. `before` is
resident memory when the clock starts. `CPU s` is the CPU time of all processes; if it is far below the time, other
programs have slowed the candidate down.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from record import add_record_option, by_name, record_if

SEED = 20261115
BATCH_SIZE = 8
SAMPLE_SECONDS = 0.05
UNBACKED_EVERY = 10  # samples: the kernel needs some milliseconds to walk all pages
SOURCES = ("benchmarks/data_prep.py", "src/trillora/data")
PACKAGES = ("trl", "datasets", "transformers", "tokenizers", "numpy")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
FUNCTION_WORDS = """the of and to a in is that it for you on with as are this be can or by not from have if your at an
which will but one all so they more has when their use also what how was there we each other its may some than any into
do time just only then these first should out over about such been no like most new would after could same between both
does while where before because through many make need every without still them good way back even under here"""
STEMS = """account adapt advance answer appear approach argue arrange attach balance benefit border bridge bright build
calculate cell change chart check circle city claim class clean clear climb cloud collect color combine comfort command
compare complete concept condition confirm connect consider construct contain context control cook copy correct count
cover create cross current custom danger data day decide deep deliver demand depend describe design detail develop
direct discover discuss distance distribute divide document door dream drive earth edit effect electric element employ
energy engine enjoy enter equal escape estimate event exact examine exist expand expect explain explore express extend
factor farm fast field figure filter final find fish flow follow forest form forward found frame friend function garden
gather general gentle ground group grow guard guide hand happen harbor harvest health heat help hold hope house human
imagine import improve include increase inform inspect instruct interest invite island join journey judge kind kitchen
know label land language laugh lead learn letter level light limit listen local look machine manage map mark market
match matter measure meet member memory mention method mind model moment morning mountain move music name nation nature
neighbor night north notice number observe offer open operate opinion order organ origin paint paper part pattern
perform period person picture plan plant play point police popular positive possible power practice prefer prepare
present press prevent print process produce project protect prove publish purpose question quick quiet raise reach read
reason receive record reduce region register relate remain remember remove repair repeat replace report request require
research respond rest result return review reward river road round route rule sample scale school search season sector
select separate serve settle shape shelter ship show sign simple sing situate sleep small soft solve sound south speak
special stand start state station stay step store story street stretch strong structure study submit success suggest
summer support suppose surface system table talk teach team test thank theory thick think thread time touch tower town
track trade train travel treat tree trust turn type understand unit update valley value vary view village visit voice
wait walk wall warm warn wash watch water weather week weigh west wild window winter wish wonder wood work world write
year young"""
ENDINGS = ("", "s", "ed", "ing", "er", "ly", "able")  # words with the first endings are more frequent
# SmolLM2's own template with generation marks added; the text is the same.
MARKED_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\\n' }}{% endif %}{% for message in messages %}{% if message['role'] == "
    "'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Prepared:
    """Result and cost of a candidate. `slots` is the number of packed sequences times the sequence length."""

    seconds: float
    cpu_seconds: float
    before_mb: float
    packed_rows: int
    slots: int
    tokens: int
    trained_tokens: int


class Clock:
    """Starts when created. CPU time counts this process and its children that have exited."""

    def __init__(self) -> None:
        import psutil

        self.before_mb = psutil.Process().memory_info().rss / 1e6
        self._cpu_start = self._cpu()
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, float, float]:
        """Elapsed seconds, CPU seconds, and resident MB at the start."""
        return time.perf_counter() - self._start, self._cpu() - self._cpu_start, self.before_mb

    def _cpu(self) -> float:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--peer-python", default=sys.executable, help="Python interpreter with TRL installed")
    parser.add_argument("--only", choices=("trillora", "trl"), help="run only this one")
    parser.add_argument("--template", choices=("own", "marked"), default="own", help="chat template for both")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--run", choices=("trillora", "trl"), help=argparse.SUPPRESS)  # in a child process
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer (default: the embedded model's)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--num-proc", type=int, help=argparse.SUPPRESS)
    add_record_option(parser)
    args = parser.parse_args()
    if args.run:
        return run_candidate(args)
    results = []
    with tempfile.TemporaryDirectory(prefix="data-prep-") as folder:
        tokenizer = make_tokenizer_folder(Path(folder) / "tokenizer", args.tokenizer, args.template)
        for num_rows in args.rows:
            file = Path(folder) / f"chats-{num_rows}.jsonl"
            write_chats(file, num_rows)
            results += compare(args, file, num_rows, tokenizer)
            file.unlink()
    if args.json:
        print(json.dumps({"template": args.template, "sequence_length": args.sequence_length, "results": results}))
    else:
        print_table(results)
    values = by_name([{**result, "num_rows": result["rows"]} for result in results], "num_rows", "engine")
    record_if(args.record, "data-prep", values, SOURCES, packages=PACKAGES)
    return 0


def compare(args: argparse.Namespace, file: Path, num_rows: int, tokenizer: Path) -> list[dict[str, Any]]:
    """Runs all candidates on one file, one after the other."""
    candidates: list[tuple[str, int | None]] = [("trillora", None), ("trl", None), ("trl", 2)]
    results = []
    for engine, num_proc in candidates:
        if args.only not in (None, engine):
            continue
        name = engine if engine == "trillora" else f"trl, num_proc {num_proc}"
        print(f"{name}: {num_rows} rows, {file.stat().st_size / 1e6:.0f} MB ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="data-prep-cold-") as work:
            command = [sys.executable if engine == "trillora" else args.peer_python, __file__, "--run", engine]
            command += ["--file", str(file), "--tokenizer", str(tokenizer), "--work", work]
            command += ["--sequence-length", str(args.sequence_length), "--template", args.template]
            command += [] if num_proc is None else ["--num-proc", str(num_proc)]
            result = watch(command, Path(work), with_peer=engine != "trillora")
        results.append({"engine": name, "rows": num_rows, **result})
    ours = next((result["seconds"] for result in results if result["engine"] == "trillora"), None)
    for result in results:
        result["rows_per_second"] = num_rows / result["seconds"]
        result["ours_over_this"] = round(ours / result["seconds"], 2) if ours else None
    return results


def watch(command: list[str], work: Path, *, with_peer: bool) -> dict[str, Any]:
    """Runs one candidate with empty caches and samples the memory of its process tree until it ends."""
    import psutil

    caches = {name: str(work / name.lower()) for name in ("HF_DATASETS_CACHE", "HF_HOME", "TRILLORA_CACHE")}
    environment = {**os.environ, **caches, "HF_HUB_OFFLINE": "1"}
    if with_peer:
        environment.pop("PYTHONPATH", None)  # the peer must not import packages of this environment
    peak = peak_unbacked = 0
    with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
        process = psutil.Popen(command, stdout=out, stderr=err, env=environment)
        for tick in itertools.count():
            if process.poll() is not None:
                break
            processes = tree(process)
            peak = max(peak, resident_bytes(processes))
            if tick % UNBACKED_EVERY == 0:
                peak_unbacked = max(peak_unbacked, unbacked_bytes(processes))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{(work / 'stderr').read_text(errors='replace')[-4000:]}")
    measured = json.loads((work / "stdout").read_text().splitlines()[-1])
    return {**measured, "peak_mb": peak / 1e6, "peak_unbacked_mb": peak_unbacked / 1e6}


def tree(process: Any) -> list[Any]:
    import psutil

    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_bytes(processes: list[Any]) -> int:
    import psutil

    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has exited since it was listed
            total += process.memory_info().rss
    return total


def unbacked_bytes(processes: list[Any]) -> int:
    """Memory that is not backed by a file. A shared page counts proportionally for each process. Linux only."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def run_candidate(args: argparse.Namespace) -> int:
    """Runs in the process of a candidate. The last line of output is the measurement."""
    if args.run == "trillora":
        prepared = prepare_trillora(args.file, args.tokenizer, args.sequence_length, args.work / "trillora_cache")
    else:
        prepared = prepare_trl(args, has_marks=args.template == "marked")
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    to_mb = 1e-6 if sys.platform == "darwin" else 1024e-6  # macOS counts bytes
    fill = prepared.tokens / prepared.slots
    peaks = {"own_peak_mb": own * to_mb, "largest_child_peak_mb": children * to_mb}
    print(json.dumps({**asdict(prepared), "fill": fill, **peaks, "versions": installed_versions()}))
    return 0


def prepare_trillora(path: Path, folder: Path, sequence_length: int, cache: Path) -> Prepared:
    """From the file to all packed batches of one epoch, each built and read once."""
    from transformers import AutoTokenizer

    from trillora.data.batches import Batches
    from trillora.data.prepare import DataOptions, Source, prepare

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    clock = Clock()
    dataset = prepare(DataOptions((Source(str(path)),)), tokenizer, cache, sequence_length=sequence_length)
    batches = Batches(
        dataset.fitted("train", sequence_length)[0], batch_size=BATCH_SIZE, sequence_length=sequence_length, pack=True
    )
    tokens = trained = 0
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        tokens += int((batch["segments"] > 0).sum())
        trained += int(batch["weights"].sum())
    measured = clock.stop()
    packed_rows = batches.steps_per_epoch * BATCH_SIZE
    return Prepared(*measured, packed_rows, packed_rows * sequence_length, tokens, trained)


def prepare_trl(args: argparse.Namespace, *, has_marks: bool) -> Prepared:
    """From the file to a constructed SFTTrainer with its packed data set."""
    import pyarrow.compute
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(str(args.tokenizer))
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    config = SFTConfig(
        output_dir=str(args.work / "out"),
        packing=True,
        max_length=args.sequence_length,
        assistant_only_loss=has_marks,
        dataset_num_proc=args.num_proc,
        per_device_train_batch_size=BATCH_SIZE,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    clock = Clock()
    rows = load_dataset("json", data_files=str(args.file), split="train")
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    measured = clock.stop()
    packed = trainer.train_dataset
    if "seq_lengths" not in packed.column_names:
        raise SystemExit(f"TRL did not pack the data: its columns are {packed.column_names}")
    tokens = trained = 0
    for table in packed.with_format("arrow").iter(batch_size=1000):
        labels = pyarrow.compute.list_flatten(table["labels"])
        tokens += len(labels)
        trained += pyarrow.compute.sum(pyarrow.compute.not_equal(labels, -100)).as_py()
    return Prepared(*measured, len(packed), len(packed) * args.sequence_length, tokens, trained)


def installed_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def make_tokenizer_folder(folder: Path, source: Path | None, template: str) -> Path:
    """A copy of the tokenizer without weights, so that neither side can load more than that."""
    if source is None:
        from trillora.model.loading.embedded import smollm2_folder

        source = smollm2_folder()
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)
    if template == "marked":
        (folder / "chat_template.jinja").write_text(MARKED_TEMPLATE)
    return folder


def write_chats(path: Path, num_rows: int) -> None:
    """Writes `num_rows` chats in `messages` format. A smaller file is a prefix of a larger one."""
    with path.open("w", encoding="utf-8") as file:
        for messages in itertools.islice(chats(), num_rows):
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def chats() -> Iterator[list[dict[str, str]]]:
    """Infinite chats: questions of about a dozen words, answers of a few dozen, sometimes with a system turn."""
    source = random.Random(SEED)
    stems = STEMS.split()
    source.shuffle(stems)
    words = FUNCTION_WORDS.split() + [inflect(stem, ending) for ending in ENDINGS for stem in stems]
    # Zipf's law, as in real text: the n-th most frequent word has a probability proportional to 1 / n.
    cumulative = list(itertools.accumulate(1 / (rank + 4) for rank in range(len(words))))
    while True:
        messages = []
        room = 620  # words; with the template's own tokens, a chat stays below 1,000 tokens
        if source.random() < 0.2:
            messages.append({"role": "system", "content": prose(source, words, cumulative, 14)})
        for _ in range(source.choices((1, 2, 3, 4), weights=(52, 26, 14, 8))[0]):
            question = min(3 + int(source.lognormvariate(math.log(9), 0.7)), 80)
            answer = min(3 + int(source.lognormvariate(math.log(34), 0.9)), 450)
            if messages and question + answer > room:
                break
            room -= question + answer
            messages.append({"role": "user", "content": prose(source, words, cumulative, question)})
            messages.append({"role": "assistant", "content": prose(source, words, cumulative, answer)})
        if messages[-1]["role"] == "assistant":
            yield messages


def inflect(stem: str, ending: str) -> str:
    return (stem[:-1] if stem.endswith("e") and ending[:1] in ("e", "i", "a") else stem) + ending


def prose(source: random.Random, words: list[str], cumulative: list[float], num_words: int) -> str:
    """Sentences of about twelve words, with punctuation, numbers and paragraphs."""
    drawn = source.choices(words, cum_weights=cumulative, k=num_words)
    pieces = []
    begin = 0
    while begin < num_words:
        sentence = drawn[begin : begin + source.randint(6, 18)]
        begin += len(sentence)
        sentence[0] = sentence[0].capitalize()
        chance = source.random()
        if chance < 0.3 and len(sentence) > 5:
            sentence[len(sentence) // 2] += ","
        elif chance < 0.4:
            sentence[-1] = str(source.randint(2, 2999))
        elif chance < 0.45:
            sentence[-1] = f"“{sentence[-1]}”"
        pieces.append(" ".join(sentence) + source.choices((".", "?", ":", ".\n\n"), weights=(80, 8, 3, 9))[0])
    return " ".join(pieces).replace("\n ", "\n").rstrip()


def print_table(results: list[dict[str, Any]]) -> None:
    columns = {
        "engine": "{engine}",
        "rows": "{rows:,}",
        "seconds": "{seconds:.1f}",
        "CPU s": "{cpu_seconds:.1f}",
        "rows/s": "{rows_per_second:,.0f}",
        "ours / this": "{ours_over_this}",
        "peak MB": "{peak_mb:,.0f}",
        "unbacked": "{peak_unbacked_mb:,.0f}",
        "before": "{before_mb:,.0f}",
        "tokens": "{tokens:,}",
        "trained": "{trained_tokens:,}",
        "fill": "{fill:.1%}",
    }
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for result in results:
        print(f"| {' | '.join(cell.format(**result) for cell in columns.values())} |")
    for engine, versions in {result["engine"]: result["versions"] for result in results}.items():
        print(f"{engine}: " + ", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    sys.exit(main())
