"""What a release and GitHub need of this repository: one version, the Pythons, forms, description, kept promises."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from test_docs import broken, prose

import lightning_tricks

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = {f"{name}.{job}": given for name, workflow in WORKFLOWS.items() for job, given in workflow["jobs"].items()}


def load_check_package() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_package", ROOT / ".ci/check_package.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


package = load_check_package()


def test_the_citation_has_the_packages_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == lightning_tricks.__version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version():
    heads = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heads[0] in ("Unreleased", lightning_tricks.__version__)


def pythons(job: dict[str, Any]) -> list[str]:
    """Those on which the job must pass."""
    assert job["continue-on-error"] == "${{ matrix.may-fail || false }}"
    return [row["python"] for row in job["strategy"]["matrix"]["include"] if not row.get("may-fail")]


def test_the_workflows_must_pass_on_each_python_that_the_package_names_and_on_no_other():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert pythons(JOBS["ci.run"]) == named
    assert pythons(JOBS["nightly.slow"]) == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_only_and_ends(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert 0 < job["timeout-minutes"] <= 150
        used = [step for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in used)
        (checkout,) = (step for step in used if "checkout" in step["uses"])
        assert checkout["with"]["persist-credentials"] is False
        runs = "".join(step.get("run", "") for step in job["steps"])
        assert "${{" not in runs  # values come by the environment: a name in a shell line could be a command


def test_each_form_asks_for_what_one_needs_and_its_commands_exist():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    text = "".join(path.read_text(encoding="utf-8") for path in forms)
    from lightning_tricks.commands import COMMANDS

    assert set(re.findall(r"-m lightning_tricks ([a-z][\w-]*)", text)) <= COMMANDS.keys()


@pytest.mark.parametrize("page", ["SECURITY.md", "RELEASING.md"])
def test_links_of_the_other_pages_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / page))
    assert [link for link in links if "://" not in link and broken(ROOT / page, link)] == []


# ---- the package's description and files, as .ci/check_package.py finds faults in them


def description() -> str:
    """The README as the build puts it into the package."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text(encoding="utf-8") for fragment in hook["fragments"])
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_the_description_keeps_headings_and_code_of_the_readme_and_no_link_that_leads_nowhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    kept = re.findall(r"^#+ [^\n\[]+$|^```.*?^```$", readme, re.M | re.S)
    assert len(kept) > 5
    assert [part for part in kept if part not in description()] == []
    assert package.relative_links(description()) == []


def test_each_package_of_the_release_extra_is_pinned():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    needed = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["optional-dependencies"]["release"]}
    assert needed <= pinned
    assert {re.match(r"[\w-]+", line)[0] for line in PROJECT["build-system"]["requires"]} <= needed


# ---- SECURITY.md promises what a test holds


def named_tests() -> list[tuple[str, str]]:
    """(file, function) of each test in the table; a function without a file is of the file before it."""
    found, file = [], ""
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text("utf-8")):
        file = path or file
        if path or name:
            found.append((file, name))
    return found


@pytest.mark.parametrize(("file", "name"), named_tests())
def test_each_promise_names_a_test_that_is_there(file, name):
    assert f"def {name}" in (ROOT / file).read_text("utf-8")


def test_each_promise_has_a_test():
    rows = [line for line in (ROOT / "SECURITY.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    promises = rows[rows.index("| promise | test |") + 1 :]
    assert len(promises) == 11
    assert all(re.search(r"\| `tests/[^|]*\|$", row) for row in promises)
