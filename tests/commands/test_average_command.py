"""`average`: the mean of the weights of checkpoints, in a file that everything opens; of other models, one line."""

import re

import pytest
import torch
from commands.exported import SIZES, checkpoint, save, tokenizer

from lightning_tricks import __main__ as door
from lightning_tricks._core.errors import UsageError
from lightning_tricks.checkpoints import load_weights, open_checkpoint
from lightning_tricks.commands.generate import decoder_from_checkpoint
from lightning_tricks.models import GPT2, Decoder, Llama

CONFIG = Llama(**SIZES, n_kv_heads=2)


def average(output, *paths, weights=None):
    door.run(["average", *map(str, paths), "--output", str(output), *(["--weights", weights] if weights else [])])
    return torch.load(output, weights_only=True)


def constants(*values, **changed):
    """A checkpoint whose every float is one number, and of whole numbers another."""
    content = checkpoint(CONFIG, **changed)
    number, counter = values
    content["state_dict"] = {name: torch.full_like(value, number) for name, value in content["state_dict"].items()}
    content["state_dict"]["counter"] = torch.tensor(counter)
    return content


def narrow():
    return checkpoint(CONFIG)["state_dict"] | {"decoder.norm.weight": torch.ones(5)}


def test_a_file_and_a_folder_give_the_weighted_mean_and_no_optimizer_state(tmp_path, capsys):
    first = save(constants(1.0, 7, global_step=2, optimizer_states=[{}], lr_schedulers=[{}]), tmp_path / "a.ckpt")
    second = save(constants(2.0, 8, callbacks={"x": {}}, loops={}), tmp_path / "b.ckpt", "folder")
    content = average(tmp_path / "mean.ckpt", first, second, weights="1,3")
    assert {value.unique().item() for name, value in content["state_dict"].items() if name != "counter"} == {1.75}
    assert content["state_dict"]["counter"] == 8
    assert not {"optimizer_states", "lr_schedulers", "callbacks", "loops"} & content.keys()
    assert content["lightning_tricks"]["average_of"] == [[str(first), 0.25], [str(second), 0.75]]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{first}: step 2, share 0.25"
    assert printed[2] == f"counter: whole numbers that differ: those of {second}"
    assert printed[3] == f"{tmp_path / 'mean.ckpt'}: the average of 2 checkpoints, {len(content['state_dict'])} tensors"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_averages_inside_the_checkpoints_are_left_out_and_a_line_says_so(kind, tmp_path, capsys):
    def averages(number):
        content = constants(number, 7)
        means = {name: value + 100 for name, value in content["state_dict"].items() if name != "counter"}
        return {**content, "averages": {"ema": {"weights": {"mean": means}}}}

    paths = [save(averages(number), tmp_path / f"{number}.ckpt", kind) for number in (1.0, 2.0)]
    content = average(tmp_path / "mean.ckpt", *paths)
    assert {value.unique().item() for name, value in content["state_dict"].items() if name != "counter"} == {1.5}
    assert "averages" not in content
    said = "ema: an average inside the checkpoints, left out: the weights that were trained are averaged"
    assert capsys.readouterr().out.splitlines().count(said) == 1


def test_sums_are_in_fp64_and_equal_weights_stay_what_they_are_to_the_bit(tmp_path):
    content = checkpoint(CONFIG)
    paths = [save(content, tmp_path / f"{number}.ckpt") for number in range(3)]
    mean = average(tmp_path / "mean.ckpt", *paths)["state_dict"]
    assert all(torch.equal(value, mean[name]) for name, value in content["state_dict"].items())
    # in bf16 or fp32, 1 + 2**-12 + 2**-24 would lose its last terms
    near = [save(constants(1.0 + shift, 0), tmp_path / f"n{number}.ckpt") for number, shift in enumerate((0, 2**-22))]
    found = average(tmp_path / "near.ckpt", *near, weights="1,1")["state_dict"]["decoder.norm.weight"]
    assert found[0].item() == 1.0 + 2**-23


def test_the_file_opens_in_generate_and_load_weights_and_keeps_a_tied_matrix_once(tmp_path, capsys):
    tied = GPT2(**SIZES)
    paths = [save(checkpoint(tied, seed=seed), tmp_path / f"{seed}.ckpt") for seed in (0, 1)]
    content = average(tmp_path / "mean.ckpt", *paths)
    opened = open_checkpoint(tmp_path / "mean.ckpt")  # checked by its checksums
    assert opened["global_step"] == 3
    head, embedding = (opened["state_dict"][f"decoder.{name}.weight"] for name in ("head", "embed"))
    assert head.data_ptr() == embedding.data_ptr()
    expected = {
        name: (value.double() + checkpoint(tied, seed=1)["state_dict"][name]).div(2).float()
        for name, value in checkpoint(tied)["state_dict"].items()
    }
    decoder = decoder_from_checkpoint(content)
    assert all(torch.equal(expected[f"decoder.{name}"], value) for name, value in decoder.state_dict().items())
    module = torch.nn.ModuleDict({"decoder": Decoder(tied)})
    assert "37 of its 37 weights loaded" in load_weights(module, tmp_path / "mean.ckpt")
    door.run(["generate", "--ckpt_path", str(tmp_path / "mean.ckpt"), "--prompt", "def", "--max_new_tokens", "3"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("def")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (checkpoint(Llama(**SIZES, n_kv_heads=1)), "decoder.n_kv_heads is 2 in"),
        (checkpoint(GPT2(**SIZES)), "decoder."),
        (checkpoint(CONFIG, mup={"class_path": "MuP", "init_args": {"base_width": 16}}), "mup is None in"),
        (checkpoint(CONFIG, TextData={"tokenizer": tokenizer() | {"sha256": "12345678"}}), "tokenizer is "),
        (constants(1.0, 3), "has no 'counter', which the others have"),
        (checkpoint(CONFIG, state_dict=narrow()), "the shape of 'decoder.norm.weight' is (32,) in"),
    ],
)
def test_checkpoints_of_two_models_are_one_line(other, says, tmp_path):
    paths = save(checkpoint(CONFIG), tmp_path / "a.ckpt"), save(other, tmp_path / "b.ckpt")
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        average(tmp_path / "mean.ckpt", *paths)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "mean.ckpt").exists()


@pytest.mark.parametrize("weights", ["1,2,3", "1,-1", "0,0", "a,b", "1,inf"])
def test_wrong_numbers_are_one_line(weights, tmp_path):
    path = save(checkpoint(CONFIG), tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match=f"weights={weights}: give 2 numbers of at least 0, as 1,1"):
        average(tmp_path / "mean.ckpt", path, path, weights=weights)


def test_a_name_that_exists_is_one_line(tmp_path):
    path = save(checkpoint(CONFIG), tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match=r"output=.*a\.ckpt exists: name another file"):
        average(path, path, path)
