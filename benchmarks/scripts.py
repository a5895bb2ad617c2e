"""Scripts that people paste, on pipeline ranks beside one device: what each had to change, and both
curves.

    python benchmarks/scripts.py --nanogpt FOLDER --run-clm FILE --lightning --ranks 2,4

FOLDER is a checkout of karpathy/nanoGPT, FILE is examples/pytorch/language-modeling/run_clm.py of
huggingface/transformers (with `pip install datasets evaluate`); of Lightning it takes the
Transformer that is in the package. None of them is part of this repository. The data are the files
of this one; what is adapted on both sides are paths, and where a script would download something.
"""

import argparse
import difflib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from differences import largest

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@attrs.frozen
class Script:
    """A script in a folder: what is said to it, more on one device, what Pfeife needs in it ({what
    stood there: what stands there}), and how a curve is found in what it says and its folder."""

    name: str
    file: Path
    arguments: Sequence[str]
    needs: Mapping[str, str]
    curve: Callable[[str, Path], list[float]]
    alone: Sequence[str] = ()
    out: str = "--out_dir={}"


def nanogpt(source: Path, folder: Path) -> Script:
    """train.py on characters, as config/train_shakespeare_char.py has it, but smaller."""
    import numpy

    folder.mkdir()
    for name in ("train.py", "model.py", "configurator.py"):
        (folder / name).write_text((source / name).read_text())
    data = folder / "data" / "own"
    data.mkdir(parents=True)
    letters = sorted(set(text()))
    codes = numpy.array([letters.index(one) for one in text()], dtype=numpy.uint16)
    codes[: len(codes) * 9 // 10].tofile(data / "train.bin")
    codes[len(codes) * 9 // 10 :].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))
    said = {
        **{"dataset": "own", "device": "cpu", "dtype": "float32", "block_size": 64},
        **{"batch_size": 16, "gradient_accumulation_steps": 2, "n_layer": 4, "n_head": 4},
        **{"n_embd": 64, "max_iters": 40, "lr_decay_iters": 40, "warmup_iters": 5},
        **{"learning_rate": 1e-3, "min_lr": 1e-4, "eval_interval": 20, "eval_iters": 4},
    }
    compiled = 'torch.compile(model, backend="pfeife", options={"microbatches": 4}, dynamic=True)'
    return Script(
        "nanoGPT's train.py",
        folder / "train.py",
        [f"--{name}={value}" for name, value in said.items()],
        {
            "int(os.environ.get('RANK', -1)) != -1": "False",
            "torch.compile(model)": compiled,
            "if iter_num > 0:": 'if iter_num > 0 and os.environ.get("RANK", "0") == "0":',
        },
        # Every rank says it.
        lambda said, _: list(
            map(float, dict(re.findall(r"iter (\d+): loss ([\d.]+)", said)).values())
        ),
        alone=["--compile=False"],
    )


def run_clm(source: Path, folder: Path) -> Script:
    """GPT-2 from scratch, with evaluations and checkpoints. The metric that the script loads from
    the hub is read from a file."""
    folder.mkdir()
    metric = folder / "accuracy.py"
    metric.write_text(METRIC)
    file = folder / "run_clm.py"
    file.write_text(replaced(source.read_text(), {'load("accuracy"': f'load("{metric}"'}))
    (folder / "text.txt").write_text(text())
    tokenizer(folder / "tokenizer")
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64, "vocab_size": 512}
    sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    said = {
        **{"model_type": "gpt2", "tokenizer_name": folder / "tokenizer", "block_size": 64},
        **{"config_overrides": ",".join(f"{name}={value}" for name, value in sizes.items())},
        **{"train_file": folder / "text.txt", "max_eval_samples": 64, "learning_rate": 1e-3},
        **{"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16, "max_steps": 20},
        **{"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 10, "save_steps": 10},
        **{"report_to": "none"},
    }
    return Script(
        "run_clm.py of transformers",
        file,
        ["--do_train", "--do_eval", "--use_cpu", *(f"--{k}={v}" for k, v in said.items())],
        {
            "import transformers\n": "import transformers\n"
            "from pfeife.integrations.transformers import pipelined\n",
            "trainer = Trainer(": "trainer = pipelined(Trainer, microbatches=4)(",
        },
        lambda _, out: [
            float(line[name])
            for line in json.loads((out / "trainer_state.json").read_text())["log_history"]
            for name in ("loss", "eval_loss")
            if name in line
        ],
        out="--output_dir={}",
    )


METRIC = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        kinds = {name: datasets.Value("int32") for name in ("predictions", "references")}
        return evaluate.MetricInfo("", "", datasets.Features(kinds))

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


def tokenizer(folder: Path) -> None:
    """Pairs of bytes, of this repository's own text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel()
    made.pre_tokenizer = level
    kinds = {"special_tokens": ["<end>"], "initial_alphabet": level.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=512, show_progress=False, **kinds)
    made.train_from_iterator(text().splitlines(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


def lightning(folder: Path) -> Script:
    """The Transformer of Lightning's demos."""
    folder.mkdir()
    (folder / "wikitext-2.txt").write_text(text()[:60_000])
    file = folder / "demo.py"
    file.write_text((ROOT / "benchmarks" / "lightning_demo.py").read_text())
    return Script(
        "Lightning's Transformer",
        file,
        [str(folder)],
        {
            "import torch\n": "import torch\n"
            "from pfeife.integrations.lightning import PipelineStrategy\n",
            "logger=False": "logger=False, strategy=PipelineStrategy(microbatches=4)",
        },
        lambda said, _: [float(one) for one in re.findall(r"loss ([\d.]+)", said)],
        out="{}",
    )


def text() -> str:
    """Something to train on: this repository's own."""
    files = [ROOT / "README.md", *sorted((ROOT / "pfeife" / "sched").rglob("*.py"))]
    return "\n".join(file.read_text() for file in files)


def replaced(source: str, needs: Mapping[str, str]) -> str:
    """Raises ValueError unless each stands there once: then it is another version."""
    for before, after in needs.items():
        if source.count(before) != 1:
            raise ValueError(f"{before!r} stands there {source.count(before)} times, not once")
        source = source.replace(before, after)
    return source


def run(script: Script, ranks: int) -> list[float]:
    """The curve on so many ranks; 0 for the script as it is."""
    out, source = script.file.parent / f"out{ranks}", script.file.read_text()
    file = script.file.with_name(f"on_{ranks}.py")
    file.write_text(replaced(source, script.needs) if ranks else source)
    start = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    said = [*script.arguments, *([] if ranks else script.alone), script.out.format(out)]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    home = {"HF_HOME": str(script.file.parent / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *start, str(file), *said],
        cwd=file.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **home},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} on {ranks} ranks: {done.stdout[-500:]}{done.stderr}")
    return script.curve(done.stdout, out)


def compare(script: Script, ranks: Sequence[int]) -> None:
    """Prints the diff, and the curves beside that of one device."""
    before = script.file.read_text()
    lines = difflib.unified_diff(
        before.splitlines(), replaced(before, script.needs).splitlines(), n=0, lineterm=""
    )
    changes = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    count = sum(line[0] == "+" for line in changes)
    print(f"\n{script.name}: {count} lines\n", *changes, sep="\n    ")
    alone = run(script, 0)
    shown = [0, len(alone) // 2, len(alone) - 1]
    heads = "".join(f"{f'loss {at}':>12}" for at in shown)
    print(f"\n{'':<16}{heads}{'largest relative difference':>30}")
    for number in (0, *ranks):
        curve = run(script, number) if number else alone
        far = largest([abs(a - b) / abs(a) for a, b in zip(alone, curve, strict=True)])
        losses = "".join(f"{curve[at]:>12.6f}" for at in shown)
        print(
            f"{f'{number} ranks' if number else 'one device':<16}{losses}{far:>30.1e}", flush=True
        )


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told.add_argument("--nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    told.add_argument("--run-clm", type=Path, help="the file of huggingface/transformers")
    told.add_argument("--lightning", action="store_true")
    told.add_argument("--ranks", default="1,2,4")
    options = told.parse_args()
    if not (options.nanogpt or options.run_clm or options.lightning):
        told.error("no script is named: --nanogpt FOLDER, --run-clm FILE or --lightning")
    torch.set_num_threads(1)
    ranks = [int(one) for one in options.ranks.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.nanogpt:
            compare(nanogpt(options.nanogpt, folder / "nanogpt"), ranks)
        if options.run_clm:
            compare(run_clm(options.run_clm, folder / "run_clm"), ranks)
        if options.lightning:
            compare(lightning(folder / "lightning"), ranks)


if __name__ == "__main__":
    main()
