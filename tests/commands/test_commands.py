"""The commands, each in this process, as somebody types them."""

import csv
import io
import json
import sys

import pytest

import pfeife
from pfeife.__main__ import main
from pfeife.commands import compare
from pfeife.commands.arguments import MACHINES, PLAN
from pfeife.data import plain
from pfeife.data.forecast import Forecast
from pfeife.data.machine import Machine
from pfeife.data.plan import Plan

STEP = """
import torch
from torch import nn


def example(batch: int = 8, width: int = 16, depth: int = 4):
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    net = nn.Sequential(*layers)
    step = lambda x, y: (net(x) - y).square().mean()
    return step, torch.ones(batch, width), torch.ones(batch, width)


def wrong():
    raise KeyError("of mine")
"""
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
ASKED = ("--ranks", "2", "--microbatches", "4")


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Runs a command where there is a step of one's own; its status, and what it prints."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(STEP)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    yield run
    sys.path[:] = before
    sys.modules.pop("mine", None)


def test_a_plan_is_one_that_compile_takes(said, tmp_path):
    """The figures of a plan are consistent, and its file fits the step that is then trained."""
    status, out, err = said(
        *("plan", "mine.py:example", *ASKED, "--batch", "8", "--machine", "cpu-core"),
        *("--optimizer", "AdamW", "--out", "plan.json", "--json", "figures.json"),
        *("--csv", "rows.csv", "--trace", "trace.json", "--save-program", "program.json"),
    )
    assert status == 0 and "capturing" in err
    assert all(word in out for word in ("MFU", "bubble", "limit", "rank 1 computes", "saved"))
    found = plain.load(Forecast, tmp_path / "figures.json")
    assert [one.rank for one in found.stages] == [0, 1] == [one.rank for one in found.by_rank]
    assert found.parameters == 4 * (16 * 16 + 16) == sum(one.parameters for one in found.stages)
    assert found.samples == 8 and found.flops == 3 * 2 * 8 * 4 * 16 * 16 - 2 * 8 * 16 * 16
    assert sum(one.seconds for one in found.waits) == pytest.approx(found.step_seconds)
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))) == 2
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    plan = plain.load(Plan, tmp_path / "plan.json")
    step, *batch = sys.modules["mine"].example()
    compiled = pfeife.compile(step, microbatches=4, plan=tmp_path / "plan.json", progress=False)
    compiled(*batch)
    assert compiled.backend.compiled[0].plan == plan
    for path, word in (
        *(("plan.json", "a plan"), ("figures.json", "a forecast"), ("trace.json", "ui.perfetto")),
        ("program.json", "a captured program"),
    ):
        status, out, err = said("show", path)
        assert status == 0 and word in out, (path, err)
    again = said("plan", "program.json", *ASKED, "--machine", "cpu-core", "--json", "-")
    assert again[0] == 0 and json.loads(again[1])["step_seconds"] == found.step_seconds


def test_a_configuration_is_planned_by_its_class_or_its_file(said, tmp_path):
    """Both are the same model; its second question is answered from the cache."""
    options = [f"{name}={value}" for name, value in LLAMA.items()]
    shape = ("--batch", "4", "--sequence", "32", "--precision", "bf16-mixed", "--json", "-")
    settings = [word for one in options for word in ("--set", one)]
    status, out, err = said("plan", "transformers:LlamaConfig", *settings, *ASKED, *shape)
    assert status == 0, err
    found = json.loads(out)
    assert found["tokens"] == 4 * 32 and found["machine"] == "h100-sxm"
    (tmp_path / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    kept = list((tmp_path / "cache").rglob("*.json"))
    again = said("plan", "config.json", *ASKED, *shape)
    told = found["asked"].pop("command"), json.loads(again[1])["asked"]["command"]
    assert [one.split()[2] for one in told] == ["transformers:LlamaConfig", "config.json"]
    assert found["asked"] == {
        **{"precision": "bf16-mixed", "optimizer": "none", "batch": "4", "sequence": "32"},
        **{"microbatches": "4", "machine": "h100-sxm"},
    }
    assert json.loads(again[1]) == found | {"asked": found["asked"] | {"command": told[1]}}
    third = said("plan", "config.json", *ASKED, *shape)
    assert third[:2] == again[:2] and kept and "from the cache" in third[2]


def test_a_saved_program_keeps_what_was_asked(said):
    """Its precision too, which says how large master weights and gradients are."""
    options = [word for name, value in LLAMA.items() for word in ("--set", f"{name}={value}")]
    shape = ("--batch", "4", "--sequence", "32", "--precision", "bf16-mixed", "--json", "-")
    saving = ("--save-program", "saved.json")
    first = said("plan", "transformers:LlamaConfig", *options, *ASKED, *shape, *saving)
    again = said("plan", "saved.json", *ASKED, "--json", "-")
    found, other = (json.loads(out) for _, out, _ in (first, again))
    commands = [one["asked"].pop("command") for one in (found, other)]
    assert found == other and commands[0] != commands[1]
    text = said("plan", "saved.json", *ASKED)[1]
    assert "pfeife plan saved.json --ranks 2" in text and "precision bf16-mixed" in text


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_mixture_of_experts_is_planned(said, precision):
    """Its products are those of the experts that each token goes to, whichever these are."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    options = [f"{name}={value}" for name, value in (LLAMA | experts).items()]
    shape = ("--batch", "4", "--sequence", "32", "--precision", precision, "--json", "-")
    settings = [word for one in options for word in ("--set", one)]
    status, out, err = said("plan", "transformers:MixtralConfig", *settings, *ASKED, *shape)
    assert status == 0, err
    attention = 2 * 32 * (2 * 32 + 2 * 16)  # q and o, k and v; and its scores with the values
    scores = 2 * 32 * 32 * 2
    expert = 2 * 3 * 32 * 64
    layer = attention + scores + 2 * expert + 2 * 32 * 4
    forward = 4 * 32 * (4 * layer + 2 * 32 * 128)
    assert json.loads(out)["flops"] == pytest.approx(3 * forward, rel=0.05)


ROUTED = """
import torch

def example():
    experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def step(x):
        total = x * 0
        for expert in torch.nn.functional.one_hot(x.argmax(1), 2).sum(0).nonzero():
            total = total + experts[int(expert)](x)
        return total.square().mean()

    return step, torch.ones(8, 4)
"""


def test_a_loop_over_the_experts_that_tokens_go_to_is_refused_by_its_line(said, tmp_path):
    """It is another program for other data, of which a plan has none. (Switch has such a loop.)"""
    (tmp_path / "routed.py").write_text(ROUTED)
    status, _, err = said("plan", "routed.py:example", *ASKED)
    assert status == 2 and "it asks for the value of a tensor" in err
    assert 'routed.py", line 9, in step' in err


def test_what_is_compared_is_captured_once(said, tmp_path):
    """The fastest first; what does not fit has a reason; memory decides between the rest."""
    small = tmp_path / "small.json"
    machine = pfeife.cost.machine("cpu-core")
    plain.save(plain.from_json(Machine, plain.to_json(machine)), small)
    small.write_text(small.read_text().replace(str(machine.memory), "4000").replace("sha256", "x"))
    text = json.loads(small.read_text())
    text.pop("x")
    small.write_text(json.dumps(text))
    status, out, err = said(
        *("compare", "mine.py:example", "--batch", "8", "--ranks", "2,4", "--microbatches", "4,8"),
        *("--schedule", "1f1b,zb-h1", "--machine", "cpu-core,small.json", "--no-cache"),
    )
    assert status == 0, err
    rows = [line for line in out.splitlines() if line.startswith("cpu-core")]
    assert len(rows) == 8 and "step" in rows[0] and sum("rate" in row for row in rows) == 1
    assert " of 3.9 KiB on rank" in out and "use more stages" not in out
    machine = said("compare", "mine.py:example", *ASKED, "--machine", "cpu-core", "--json", "-")
    assert json.loads(machine[1])[0]["refused"] == ""


def test_lists_of_all_that_a_plan_is_asked_for(said):
    """Links by figures, too; what cannot be is known before a capture, and nothing is twice."""
    asked = ("--ranks", "4", "--microbatches", "4", "--batch", "8,16", "--machine", "cpu-core")
    links = ("--nodes", "1,2,3", "--inside", "nvlink4", "--between", "ib-ndr,25GB/s,20us")
    more = ("--recompute", "never,always", "--cut-at", "anywhere,blocks")
    status, out, err = said("compare", "mine.py:example", *asked, *links, *more, "--no-cache")
    assert status == 0, err
    rows = [line for line in out.splitlines() if line.startswith("cpu-core")]
    assert len(rows) == 8 * (1 + 2 + 2)
    assert sum("25GB/s,20us" in row for row in rows) == 16
    assert sum("nodes are of equal size" in row for row in rows) == 16
    assert err.count("capturing") == 2 and "40 of 40: " in err
    assert "asked   pfeife compare mine.py:example --ranks 4" in out
    alone = said("plan", "mine.py:example", "--ranks", "4", "--microbatches", "4", *links[4:])
    assert alone[0] == 2 and "there is one node; say --nodes, or --ranks-per-node" in alone[2]
    with pytest.raises(SystemExit):  # argparse has said that it is none of those
        said("compare", "mine.py:example", *asked, "--cut-at", "nowhere")


def test_all_that_may_be_a_list_is_compared():
    lists = {flag.name.replace("-", "_") for flag in (*MACHINES, *PLAN) if flag.several}
    assert lists <= {*compare._AXES, *compare._MORE}


def test_how_many_ranks_share_a_stage(said):
    """Members of the stages of as many ranks; and the fewest ranks are so many at a time."""
    question = ("mine.py:example", "--machine", "cpu-core", "--microbatches", "4", "--batch", "8")
    status, out, _ = said("compare", *question, "--ranks", "4", "--members", "1,2,4")
    assert status == 0 and "members" in out.splitlines()[0]
    assert sorted(line.split()[5] for line in out.splitlines()[2:5]) == ["1", "2", "4"]
    ways = ("--members", "2", "--parallel", "auto,gathered", "--attention", "gather,ring")
    status, out, _ = said("compare", *question, "--ranks", "4", *ways)
    assert status == 0 and out.splitlines()[0].split()[5:7] == ["parallel", "attention"]
    assert sum(line.split()[5] == "gathered" for line in out.splitlines()[2:6]) == 2
    for way in ("cut", "auto"):  # all is gathered by itself, so that none waits in a microbatch
        asked = ("--ranks", "4", "--members", "2", "--parallel", way)
        status, out, _ = said("plan", *question, *asked)
        assert status == 0 and "2 x 2 ranks" in out and ("members wait" in out) == (way == "cut")
    status, _, err = said("plan", *question, "--ranks", "3", "--members", "2")
    assert status == 2 and "--ranks 3 and --members 2" in err
    status, out, _ = said("fit", *question[:3], "--members", "2")
    assert status == 0 and "2 ranks, the fewest" in out


def test_what_fits(said):
    """The fewest ranks hold it, one less does not; nor do twice as many rows."""
    asked = ("mine.py:example", "--set", "width=64", "--memory", "80KB", "--microbatches", "4")
    status, out, err = said("fit", *asked, "--price", "2")
    assert status == 0, err
    ranks, rows = (int(line.split()[0]) for line in out.splitlines()[2:4])
    assert f"{ranks} ranks, the fewest" in out and ranks > 1 and "cost a billion" in out
    for count, batch, fits in ((ranks, 4 * rows, True), (ranks - 1, 8, False)):
        sizes = ("--ranks", str(count), "--batch", str(batch), "--recompute", "auto")
        status, _, err = said("plan", *asked, *sizes)
        assert (status == 0) == fits and (fits or "--memory 80000: " in err)
    status, _, err = said("plan", *asked, "--ranks", str(ranks), "--batch", str(8 * rows))
    assert status == 2 and "--memory 80000" in err
    status, _, err = said("fit", *asked, "--ranks", "1")
    assert status == 2 and "does not fit on 1 ranks" in err
    status, _, err = said("fit", "mine.py:example", "--memory", "1KB", "--microbatches", "8")
    assert status == 2 and "cannot be cut for more: " in err and "only" in err
    status, out, err = said("fit", "mine.py:example", "--ranks", "8", "--microbatches", "8")
    assert status == 0 and "8 ranks in 2 pipelines" in out and "planning" in err


def test_files_that_are_called_as_others_or_raise(said, tmp_path):
    """A person's random.py is none of Python's, and an error of theirs is told with its line."""
    import random

    (tmp_path / "random.py").write_text("from mine import example  # of the same folder\n")
    status, _, err = said("plan", "random.py:example", *ASKED, "--machine", "cpu-core")
    assert status == 0 and sys.modules["random"] is random, err
    (tmp_path / "raising.py").write_text("\nraise ValueError('of mine')\n")
    status, _, err = said("plan", "raising.py:example", *ASKED)
    assert status == 2 and "'raising.py' does not import" in err and "of mine" in err
    assert "raising.py:2)" in err


def test_schedules_are_simulated_and_go_to_torch_and_back(said):
    status, drawn, err = said("simulate", "1f1b", "--stages", "2", "--microbatches", "4")
    assert status == 0 and "20.0% of the ranks' time is bubble" in drawn, err  # (p-1)/(m+p-1)
    said("simulate", "1f1b", "--stages", "2", "--microbatches", "4", "--csv", "s.csv")
    assert said("simulate", "s.csv")[1] == drawn
    assert said("show", "s.csv")[1].startswith("a schedule of 2 stages on 2 ranks")


def test_a_step_is_profiled(said):
    """What each kind of action takes, predicted and measured."""
    status, out, err = said("profile", "mine.py:example", "--costs", "estimate")
    assert status == 0, err
    assert all(word in out for word in ("0F x 4", "1B x 4", "predicted: ", "measured: ", "ratio"))


def test_explain_says_how_a_step_is_captured(said):
    status, out, err = said("explain", "mine.py:example", "--set", "depth=2")
    assert status == 0 and "100 % of it is pipelined" in out, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "mine.py:exampel", *ASKED), "nearest is 'example'"),
        (("plan", "nothing", *ASKED), "is no step"),
        (("plan", "no_such_module:f", *ASKED), "no module"),
        (("plan", "mine.py:wrong", *ASKED), "raised KeyError: 'of mine'"),
        (("plan", "mine.py:example", *ASKED, "--set", "depht=2"), "depht"),
        (("plan", "mine.py:example", *ASKED, "--sequence", "8"), "no argument 'sequence'"),
        (("plan", "mine.py:example", *ASKED, "--machine", "h100"), "nearest is 'h100-sxm'"),
        (("plan", "mine.py:example", *ASKED, "--schedule", "1f2b"), "1f1b"),
        (("plan", "mine.py:example", *ASKED, "--memory", "1KB"), "of 1000 B on rank"),
        (("plan", "mine.py:example", *ASKED, "--out", "no/such/x.json"), "no such folder"),
        (("plan", "mine.py:example", *ASKED, "--nodes", "2"), "--inside"),
        (("plan", "transformers:LlamaConfig", *ASKED, "--set", "hidden_siez=2"), "hidden_size"),
        (
            ("plan", "transformers:GPT2Config", *ASKED, "--set", "n_layer=1", "--sequence", "1025"),
            "has 1024 positions",
        ),
        (("show", "mine.py"), "is not an action"),
        (("show", "nothing.json"), "No such file"),
        (("simulate", "2f2b"), "1f1b"),
    ],
)
def test_a_mistake_is_told_in_a_line(said, arguments, words):
    status, out, err = said(*arguments)
    assert (status, out) == (2, "") and words in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("wrong", [("--machine", "h100"), ("--schedule", "1f2b")])
def test_what_is_cheap_to_know_is_said_before_a_capture(said, wrong):
    err = said("plan", "mine.py:example", *ASKED, *wrong)[2]
    assert err.count("\n") == 1 and "capturing" not in err


def test_the_demo_shows_a_timeline_and_the_same_losses(said, tmp_path):
    """And leaves a page, which says what was asked for."""
    status, out, err = said("demo", "--html", str(tmp_path / "demo.html"))
    assert status == 0 and "20 of 20 losses are those of one device" in out, err
    assert "rank 1  " in out
    page = (tmp_path / "demo.html").read_text()
    assert "<code>pfeife.compile(loss_fn, microbatches=4, stages=2" in page
    assert "<dt>batch</dt><dd>64</dd>" in page and "measured " in page
