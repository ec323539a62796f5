"""The wheel and the sdist are whole, and work outside of this folder; GitHub's files here have the form that it reads.

    pip install -c constraints.txt -e '.[release]'
    python .ci/check_package.py [FOLDER]      # keeps both files in the folder, for an upload

The wheel is built twice, from this tree and from the sdist, which must give the same bytes. It is installed into a
fresh environment, where it finds its dependencies in those of this Python: nothing is downloaded. The first check that
fails ends the script with 1 and a line.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_tricks"
IN_SDIST = (  # what a distributor needs to run the tests
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt", "pyproject.toml", "docs/README.md",
    "benchmarks/README.md", "recipes/tiny.yaml", "tests/conftest.py", f"{PACKAGE}/__init__.py",
)  # fmt: skip
SCHEMAS = {  # of check-jsonschema, by the files that have them
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    ".github/dependabot.yml": "vendor.dependabot",
    "CITATION.cff": "vendor.citation-file-format",
}
TRY = f"""
import importlib.metadata, sys
import {PACKAGE}
assert {PACKAGE}.__file__.startswith(sys.prefix), {PACKAGE}.__file__
assert importlib.metadata.version("{PACKAGE.replace("_", "-")}") == {PACKAGE}.__version__
names = [getattr({PACKAGE}, name) for name in {PACKAGE}.__all__]
print(f"{PACKAGE} {{{PACKAGE}.__version__}}, {{len(names)}} public names")
"""


def wheel_files(wheel: Path) -> dict[str, bytes]:
    """Content of each file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_files(sdist: Path) -> set[str]:
    """Names of the files of an sdist, without its own folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def differences(ours: Mapping[str, bytes], others: Mapping[str, bytes]) -> list[str]:
    """Names of files that only one of two wheels has, or that are not the same."""
    return sorted(name for name in ours.keys() | others.keys() if ours.get(name) != others.get(name))


def missing_from_wheel(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """Files of the package and of the recipes, and the list for agents, that a wheel of those names has not."""
    package = [path.relative_to(root).as_posix() for path in sorted((root / PACKAGE).rglob("*")) if path.is_file()]
    recipes = [path.relative_to(root).as_posix() for path in sorted((root / "recipes").rglob("*.yaml"))]
    wanted = [name for name in package if not name.endswith(".pyc")] + [f"{PACKAGE}/{name}" for name in recipes]
    wanted += [f"{PACKAGE}/llms.txt"]
    have = set(names)
    return [name for name in wanted if name not in have]


def relative_links(description: str) -> list[str]:
    """Links and pictures of a text in Markdown or HTML that lead into the repository; its code blocks have none."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", description, flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href|srcset)=\"([^\"]+)\"", prose)
    return [link for link in map("".join, links) if not re.match(r"https?:|mailto:|#", link)]


def described(wheel: Mapping[str, bytes]) -> str:
    """The description that the package index shows."""
    (metadata,) = (content for name, content in wheel.items() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(metadata).get_payload(decode=True).decode()  # type: ignore[union-attr]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints, in an environment without paths to this checkout; it ends the script if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(done.returncode == 0, f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def check(holds: object, otherwise: str) -> None:
    """End the script with a line if something does not hold."""
    if not holds:
        sys.exit(f"check_package: {otherwise}")


def build(folder: Path) -> tuple[Path, Path]:
    """Build both files; the wheel from the tree and from the sdist."""
    python = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    run(*python, folder)  # the sdist, and the wheel from it
    with tempfile.TemporaryDirectory() as other:
        run(*python, other, "--wheel")
        (from_tree,), (from_sdist,), (sdist,) = (
            list(Path(place).glob(kind)) for place, kind in ((other, "*.whl"), (folder, "*.whl"), (folder, "*.tar.gz"))
        )
        check(from_tree.name == from_sdist.name, f"{from_tree.name} from the tree, {from_sdist.name} from the sdist")
        wheel, of_sdist = wheel_files(from_tree), wheel_files(from_sdist)
    differ = differences(wheel, of_sdist)
    check(not differ, f"the wheel of the sdist is not that of the tree: {', '.join(differ)}")
    missing = missing_from_wheel(wheel)
    check(not missing, f"missing from the wheel: {', '.join(missing)}")
    have = sdist_files(sdist)
    check(have.issuperset(IN_SDIST), f"missing from the sdist: {', '.join(sorted(set(IN_SDIST) - have))}")
    links = relative_links(described(wheel))
    check(not links, f"README.md: in the description, these lead nowhere: {', '.join(links)}")
    run(sys.executable, "-m", "twine", "check", "--strict", from_sdist, sdist)
    print(f"built     {from_sdist.name}, {len(wheel)} files; {sdist.name}, {len(have)} files; twine check --strict")
    return from_sdist, sdist


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel into a fresh environment and use it there."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A line in a .pth file adds the folder alone: not what its own .pth files add, such as an editable checkout.
    lines = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(site) / "dependencies.pth").write_text("\n".join(lines) + "\n")
    away = folder / "elsewhere"
    away.mkdir()
    print("imported ", run(python, "-c", TRY, cwd=away).strip())
    module = (python, "-m", PACKAGE)
    version = run(scripts / "lightning-tricks", "--version", cwd=away)
    check(version == run(*module, "--version", cwd=away), f"lightning-tricks --version says {version}")
    check("tiny" in run(*module, "ls", cwd=away), "ls does not list tiny")
    run(*module, "cp", "tiny", ".", cwd=away)
    checked = run(*module, "check", "--config", "tiny.yaml", cwd=away).strip().splitlines()[-1]
    print(f"used      ls; cp tiny; check --config tiny.yaml: {checked}")


def check_forms() -> None:
    """The files that GitHub and citation tools read have the form of their schemas."""
    for pattern, schema in SCHEMAS.items():
        files = sorted(ROOT.glob(pattern))
        check(files, f"no file {pattern}")
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files)
    print(f"forms     {', '.join(SCHEMAS)}")


def main() -> None:
    """Check everything."""
    check_forms()
    with tempfile.TemporaryDirectory() as folder:
        into = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(folder, "dist")
        into.mkdir(parents=True, exist_ok=True)
        check(not any(into.iterdir()), f"{into} is not empty: give another folder, or remove what is in it")
        wheel, _ = build(into)
        use(wheel, Path(folder))


if __name__ == "__main__":
    main()
