"""`--help`, of a command and of a class, and `--trainer.callbacks-=`: what the command line itself prints and takes."""

import re
import shlex

import pytest
import yaml
from cli.parsers import one_parser  # noqa: F401, a fixture

from lightning_tricks._core.errors import UsageError
from lightning_tricks.cli import RecipeCLI, load_recipe
from lightning_tricks.cli.help import help_last

pytestmark = pytest.mark.usefixtures("one_parser")
TINY = ["--config", "recipes/tiny.yaml"]


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def printed(capsys):
    def of(*words):
        with pytest.raises(SystemExit) as end:
            RecipeCLI(args=list(words))
        assert end.value.code == 0
        return capsys.readouterr().out

    return of


def values_of(text):
    return dict(re.findall(r"^  --(\S+) +(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("recipe", [[], TINY], ids=["no recipe", "recipe"])
def test_help_begins_with_the_options_of_a_recipe_by_use(printed, recipe):
    text = printed("fit", "--help", *recipe)
    lines = text.splitlines()
    assert len(lines) <= 110
    assert not [line for line in lines if len(line) > 80]
    assert not re.search(r"\.\.\.$", text, re.MULTILINE)
    heads = ["fit", "data", "model", "model.decoder", "model.optimizer", "model.schedule", "trainer", "all options"]
    found = [line.split(":")[0] for line in lines if re.match(r"[a-z][a-z. ]*:", line)]
    assert found == ["usage", *heads, "examples"]
    assert lines[-4] == "all options: --help all, of a class: --help StepGuard"
    assert [line.partition(" fit ")[2] for line in lines[-2:]] == [
        "--config tiny.yaml --trainer.max_steps 100",
        "--config tiny.yaml --trainer.callbacks+=EMA",
    ]
    assert "micro_batch_size" in text
    assert "rows in a batch of one process" in text


def test_help_shows_the_values_of_the_recipe_and_of_the_words_and_else_the_defaults(printed):
    given = values_of(printed("fit", "--help", *TINY, "--model.optimizer.lr", "1e-3"))
    assert given["model.optimizer.lr"] == "0.001"
    assert given["model.schedule.warmup_steps"] == "40"
    assert given["model.decoder.d_model"] == "256"
    assert given["model.decoder.qk_norm"] == "true"  # not among the first options, and set by the recipe
    assert given["trainer.max_steps"] == "400"
    usual = values_of(printed("fit", "-h"))
    assert usual["model.decoder.d_model"] == "4096"
    assert usual["model.schedule.warmup_steps"] == "required"
    assert usual["trainer.max_steps"] == "-1"
    assert usual["trainer.log_every_n_steps"] == "50"  # where the parser has null, and Lightning a value
    assert usual["trainer.precision"] == "32-true"
    assert usual["trainer.gradient_clip_val"] == "null"
    assert "model.decoder.qk_norm" not in usual


def test_the_help_of_fit_says_what_lightnings_options_do(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = printed("fit", "--help")
    assert "fit: train; --resume auto resumes" in text
    assert "largest norm of the gradient, to which a larger one is scaled down\n" in text
    assert "optimizer steps between two log lines\n" in text
    assert "micro-batches of one optimizer step\n" in text
    assert "validate: validation figures: --ckpt_path FILE" in printed("validate", "--help")


def test_help_fits_other_terminals(printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    wide = printed("fit", "--help")
    assert "the checkpoint to start from: a file, a folder or last\n" in wide
    assert max(map(len, wide.splitlines())) in range(81, 121)
    monkeypatch.setenv("COLUMNS", "40")
    assert values_of(printed("fit", "--help"))["data.seq_len"] == "256"


@pytest.mark.parametrize(("command", "own"), [("plan", "gpu"), ("validate", "text"), ("schedule", "against")])
def test_a_commands_own_options_come_first(printed, command, own):
    lines = printed(command, "--help").splitlines()
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert options.index(f"--{own}") < options.index("--config")
    assert not [name for name in options if name == "--init_from" or name.startswith(("--data.", "--trainer."))]
    assert re.search(r"^recipe: .* as in\s+`fit --help`", "\n".join(lines), re.MULTILINE)
    assert len(lines) <= 30


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_a_commands_own_option_is_wrapped_and_never_cut(printed, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed("plan", "--help")
    assert max(map(len, text.splitlines())) in range(columns - 20, columns + 1)
    whole = " ".join(text.split())
    assert "a CPU where the recipe asks for one, else the GPU here, else h100 --devices" in whole
    assert "Plan a recipe: parameters, memory of a device at each instant of a step, time, cost, and what" in whole


def test_a_long_value_of_a_recipe_is_shown_whole(printed):
    assert "StepGuard, SafeCheckpoint, SampleText, CompressionBaseline] +=X" in " ".join(
        printed("fit", "-h", *TINY).split()
    )


def test_help_all_prints_every_option(printed):
    text = printed("fit", "--help", "all")
    assert "--trainer.detect_anomaly" in text
    assert "--model.help" in text
    assert len(text.splitlines()) > 400
    assert not [line for line in text.splitlines() if len(line) > 80]


@pytest.mark.parametrize("recipe", [[], TINY], ids=["no recipe", "recipe"])
@pytest.mark.parametrize(
    ("place", "name", "option"),
    [
        ("model", "LanguageModel", "weight_decay"),
        ("model.decoder", "Llama", "n_kv_heads"),
        ("model.optimizer", "AdamW", "amsgrad"),
        ("model.optimizer", "Muon", "momentum"),
        ("model.schedule", "WarmupCosine", "min_ratio"),
        ("model.mup", "", "base_width"),
        ("data", "TokenData", "train"),
        ("trainer.callbacks", "StepGuard", "sigmas"),
        ("trainer.strategy", "lightning_tricks.FSDP2Strategy", "timeout_seconds"),
    ],
)
def test_the_options_of_a_class_are_listed_with_and_without_a_recipe(printed, recipe, place, name, option):
    text = printed("fit", f"--{place}.help", *filter(None, [name]), *recipe)
    assert f"  --{place}.{option} " in text
    assert not [line for line in text.splitlines() if len(line) > 80]


@pytest.mark.parametrize("recipe", [[], TINY], ids=["no recipe", "recipe"])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("StepGuard", "trainer.callbacks"),
        ("Muon", "model.optimizer"),
        ("Llama", "model.decoder"),
        ("lightning_tricks.FSDP2Strategy", "trainer.strategy"),
        ("BF16Mixed", "trainer.plugins"),
    ],
)
def test_the_name_of_a_class_alone_leads_to_its_options(printed, recipe, name, place):
    assert printed("fit", "--help", name, *recipe) == printed("fit", f"--{place}.help", name, *recipe)


def test_without_a_class_the_recipes_is_listed_with_its_values(printed):
    text = " ".join(printed("fit", *TINY, "--model.optimizer.help").split())
    assert "--model.optimizer.lr LR learning rate" in text
    assert "default: 0.002)" in text
    assert "Tensor exit" not in text
    assert "known subclasses: torch.Tensor" not in text
    assert "--model.schedule.warmup_steps" in printed("fit", "--model.schedule.help", "--config=recipes/tiny.yaml")


@pytest.mark.parametrize(
    ("words", "head"),
    [
        (["model.schedule", "WSD"], "before its options: --model.schedule WarmupStableDecay options:"),
        (["model.schedule", "WarmupLinear", *TINY], "`min_ratio` of it at the end of the run. options:"),
        (["trainer.callbacks", "EMA"], "before its options: --trainer.callbacks+=EMA options:"),
        (["trainer.callbacks", "GoodputMonitor"], "command line: --trainer.callbacks+=GoodputMonitor takes no options"),
    ],
)
def test_a_class_comes_with_its_whole_summary_and_the_words_that_choose_it(printed, words, head):
    text = " ".join(printed("fit", f"--{words[0]}.help", *words[1:]).split())
    assert text.startswith(f"{words[1].replace('WSD', 'WarmupStableDecay')}: ")
    assert head in text


@pytest.mark.parametrize("name", ["StepGuard", "SafeCheckpoint", "SampleText"])
def test_the_words_for_a_callback_of_the_recipe_keep_its_settings(printed, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "400")
    line = printed("fit", "--trainer.callbacks.help", name, *TINY).splitlines()[1]
    words = shlex.split(line.partition(": ")[2])

    def saved(*more):
        callbacks = yaml.safe_load(printed("fit", *TINY, *more, "--print_config"))["trainer"]["callbacks"]
        return {one["class_path"].rpartition(".")[2]: one.get("init_args") for one in callbacks}

    assert saved(*words) == saved()
    if name == "SafeCheckpoint":
        changed = saved(*words, "--trainer.callbacks.keep_last", "7")
        assert changed["SafeCheckpoint"] == saved()["SafeCheckpoint"] | {"keep_last": 7}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data.help", "TexData"], "data.help=TexData: no such class; did you mean TextData?"),
        (["--model.optimizer.help", "AdmW"], "model.optimizer.help=AdmW: no such class; did you mean AdamW?"),
        (["--model.decoder.help", "torch.nn.Linear"], "model.decoder.help=torch.nn.Linear: no such class; there are"),
        (["--model.decoder.help", "no_module.X"], "model.decoder.help=no_module.X: no such class; there are"),
        (["--trainer.callbacks.help"], "trainer.callbacks.help: name a class; there are ActivationMonitor, "),
        (["--data.seed.help"], "data.seed.help: no class stands there"),
        (["--help", "StepGard"], "--help StepGard: no such class; did you mean StepGuard?"),
        (["--help", "qqqqqqq"], "--help qqqqqqq: no such class; --help has the main options"),
    ],
)
def test_an_unknown_class_is_one_line(words, line):
    with pytest.raises(UsageError) as error:
        RecipeCLI(args=["fit", *words])
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        (["fit", "--help", "--config", "a"], ["fit", "--config", "a", "--help"]),
        (["fit", "-h", "all", "--config", "a"], ["fit", "--config", "a", "--help=all"]),
        (["--help", "fit"], ["fit", "--help"]),
        (["fit", "--help", "EMA", "--config", "a"], ["fit", "--config", "a", "--help=EMA"]),
        (["fit", "--data.help=X", "--a"], ["fit", "--a", "--help=data:X"]),
        (["fit", "--model.init_args.decoder.help", "--a"], ["fit", "--a", "--help=model.decoder:"]),
        (["fit", "--help_me", "x"], ["fit", "--help_me", "x"]),
    ],
)
def test_help_is_printed_after_the_other_words_are_read(words, moved):
    assert help_last(words) == moved


@pytest.fixture
def callbacks(capsys):
    def of(*words):
        with pytest.raises(SystemExit):
            RecipeCLI(args=["fit", *TINY, *words, "--print_config"])
        saved = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
        return [one["class_path"].rpartition(".")[2] for one in saved]

    return of


def test_a_callback_of_the_recipe_is_taken_out(callbacks):
    whole = callbacks()
    assert {"SampleText", "StepGuard", "SafeCheckpoint"} < set(whole)
    taken = ["--trainer.callbacks-=SampleText", "--trainer.callbacks-", "lightning_tricks.callbacks.StepGuard"]
    assert callbacks(*taken) == [name for name in whole if name not in ("SampleText", "StepGuard")]


def test_words_are_read_from_left_to_right(callbacks):
    whole = callbacks()
    out, add = "--trainer.callbacks-=StepGuard", "--trainer.callbacks+=StepGuard"
    without = [name for name in whole if name != "StepGuard"]
    assert callbacks(out, add, "--trainer.callbacks.sigmas=3") == [*without, "StepGuard"]
    assert callbacks(add, out) == without
    assert callbacks(out, *TINY) == whole


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*TINY, "--trainer.callbacks-=EMA"], r"callbacks-=EMA: not in the list of callbacks, which has .*StepG"),
        (
            [*TINY, "--trainer.callbacks-=my.StepGuard"],
            r"=my\.StepGuard: not in the list of callbacks, which has ",
        ),
        (["--trainer.callbacks-=EMA"], r"=EMA: not in the list of callbacks, which has none$"),
    ],
)
def test_a_callback_that_is_not_there_is_one_line_with_those_that_are(words, line):
    with pytest.raises(UsageError, match=line) as error:
        RecipeCLI(args=["plan", *words])
    assert "\n" not in str(error.value)


def test_a_recipe_for_python_is_without_it_too():
    _, _, trainer = load_recipe(*TINY, "--trainer.callbacks-=SampleText")
    assert "SampleText" not in [type(one).__name__ for one in trainer["callbacks"]]
