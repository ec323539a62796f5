"""AdamWBF16State: averages in bf16 from the start and after a load; one line where torch has no kernel for them."""

import pytest
import torch
from torch import bfloat16, nn

from lightning_tricks import LanguageModel, Llama
from lightning_tricks._core.errors import UsageError
from lightning_tricks.optim import ComposedOptimizer, adamw_bf16_state, build_optimizer, skips_on_device
from lightning_tricks.optim.adamw_bf16_state import AdamWBF16State
from lightning_tricks.optim.build_optimizer import check_settings
from lightning_tricks.optim.mup import rule_of


@pytest.fixture
def kernel(monkeypatch):
    """As if torch had the kernel on a CPU: everything but the step itself can be tried."""
    monkeypatch.setattr(adamw_bf16_state, "_has_kernel", lambda device: True)


def averages(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_on_a_cpu_it_is_refused_in_one_line_when_it_is_built():
    with pytest.raises(UsageError) as error:
        build_optimizer(nn.Linear(2, 2), AdamWBF16State)
    line = str(error.value)
    assert line.startswith(f"AdamWBF16State: torch {torch.__version__} has no kernel for averages in bf16 on cpu")
    assert line.endswith("take AdamW")
    assert "\n" not in line


def test_the_settings_of_a_recipe_are_checked_on_a_machine_without_a_gpu():
    assert check_settings(AdamWBF16State) is None  # the small module is on a CPU, the run may be on a GPU
    model = LanguageModel(Llama(vocab_size=32, d_model=16, n_layers=1, n_heads=2), optimizer=AdamWBF16State)
    assert model.optimizer is AdamWBF16State


def test_state_takes_four_bytes_a_parameter_and_is_there_before_the_first_step(kernel):
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    optimizer = build_optimizer(model, AdamWBF16State)
    assert {average.dtype for average in averages(optimizer)} == {bfloat16}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(average.nbytes for average in averages(optimizer)) == 4 * parameters
    assert all(average.shape == parameter.shape for parameter in model.parameters() for average in
               (optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]))  # fmt: skip
    assert skips_on_device(optimizer)
    assert rule_of(optimizer) == "adam"
    assert all(group["fused"] for group in optimizer.param_groups)
    optimizer = AdamWBF16State(model.parameters())
    optimizer.add_param_group({"params": [extra := nn.Parameter(torch.zeros(3))]})
    assert optimizer.state[extra]["exp_avg"].dtype == bfloat16


def test_a_load_keeps_bf16_to_the_bit(kernel):
    weight = nn.Parameter(torch.ones(5))
    first, second = AdamWBF16State([weight]), AdamWBF16State([weight])
    first.state[weight]["exp_avg"].copy_(torch.randn(5))
    first.state[weight]["step"].fill_(7)
    second.load_state_dict(first.state_dict())
    assert second.state[weight]["exp_avg"].dtype == bfloat16
    assert torch.equal(second.state[weight]["exp_avg"], first.state[weight]["exp_avg"])
    assert second.state[weight]["step"].item() == 7
    assert second.state[weight]["step"].dtype == torch.float32


def test_in_a_composed_optimizer_a_load_leaves_the_averages_of_the_others_in_fp32(kernel):
    weight, bias = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    groups = [{"params": [weight], "optimizer": "a"}, {"params": [bias], "optimizer": "b"}]
    optimizer = ComposedOptimizer(groups, {"a": AdamWBF16State, "b": torch.optim.AdamW})
    bias.grad = torch.full((5,), 1.001)  # no bf16 value
    optimizer.step()
    before = optimizer.state[bias]["exp_avg"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[weight]["exp_avg"].dtype == bfloat16
    assert torch.equal(optimizer.state[bias]["exp_avg"], before)


def test_weights_in_bf16_are_refused(kernel):
    with pytest.raises(UsageError, match="a parameter is bfloat16: it is for fp32 weights"):
        AdamWBF16State([nn.Parameter(torch.ones(2, dtype=bfloat16))])
