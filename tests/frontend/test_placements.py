"""Plans of other people, as the dimensions of parameters."""

import pytest
import torch
from sent import bytes_sent
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import pfeife
from pfeife.testing import check_pass


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])


LAYER = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
EACH = {f"layers.{at}.{name}": dim for at in range(2) for name, dim in LAYER.items()}


def test_a_plan_in_torchs_words():
    plan = {
        "words": RowwiseParallel(),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }
    assert pfeife.placements(Model(), plan) == {"words.weight": 0} | EACH
    assert pfeife.placements(Model(), {"words": ColwiseParallel()}) == {"words.weight": 1}


def test_a_plan_in_hugging_faces_words():
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.norm": "replicate"}
    assert pfeife.placements(Model(), plan) == EACH
    outer = nn.ModuleDict({"model": Model()})
    expected = {f"model.{name}": dim for name, dim in EACH.items()}
    assert pfeife.placements(outer, plan) == expected, "the plan of the model inside"


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"no module is called .layers\.\*\.gate."):
        pfeife.placements(Model(), {"layers.*.gate": "colwise"})
    with pytest.raises(ValueError, match="'words' is diagonal, which is not known"):
        pfeife.placements(Model(), {"words": "diagonal"})


@pytest.mark.parametrize(("name", "sums"), [("Llama", 8), ("Qwen3", 12)])
def test_the_plan_that_a_model_ships(name, sums):
    """Two sums a layer each way, or what takes less; the norms of Qwen's heads have their gradients
    added up as well, which its plan says by a word of its own. In float64, as sums that are cut are
    rounded otherwise."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    tokens = torch.randint(64, (2, 8))
    program = pfeife.capture(lambda x: model(input_ids=x, labels=x).loss, tokens)
    state = pfeife.state_of(program, model)
    cut = pfeife.shard(pfeife.placements(model, config.base_model_tp_plan), 2)
    result = check_pass(cut, program, state, [tokens], rounding=None, within=1e-6)
    assert bytes_sent(result) <= sums * 2 * 8 * 32 * 8


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_the_plans_of_a_mixture_of_experts(kind):
    """By columns of the two matrices that are one parameter, or by experts: of each matrix a member
    has a half."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
        **{"num_local_experts": 4, "experts_implementation": "grouped_mm"},
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double()
    tokens = torch.randint(32, (2, 8))
    program = pfeife.capture(lambda x: model(input_ids=x, labels=x).loss, tokens)
    plan = getattr(config, f"base_model_{kind}_plan")
    if plan is None:
        pytest.skip("this transformers has no such plan")
    cut = pfeife.shard(pfeife.placements(model, plan), 2)
    state = pfeife.state_of(program, model)
    local = check_pass(cut, program, state, [tokens], rounding=None, within=1e-6)
    experts = {p.fqn: p.split for p in local.ports(pfeife.Role.PARAMETER) if "experts" in p.fqn}
    places = {(split.dim, split.before) for split in experts.values() if split is not None}
    assert len(experts) == 4 and None not in experts.values()
    assert places == ({(0, 1)} if kind == "ep" else {(1, 2), (2, 1)})
