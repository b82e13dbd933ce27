"""The table of commands: imports, help, aliases, completion and the reference page."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from hodei import __version__
from hodei.cli.main import ALIASES, COMMANDS, cli
from unit.cli.reference import document, walk

HEAVY = (
    "numpy",
    "starlette",
    "uvicorn",
    "hodei.server",
    "hodei.client",
    "msgspec",
    "yaml",
    "ssl",
    "http.client",
    "rich",
)
NAMES = [*(name for section in COMMANDS.values() for name in section), *ALIASES]


def modules_after(*args: str) -> set[str]:
    program = (
        "import sys\n"
        "from hodei.cli.main import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.real
@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=["help", "version"])
def test_help_and_version_import_neither_server_nor_client(args: list[str]):
    assert modules_after(*args).isdisjoint(HEAVY)


@pytest.mark.real
def test_a_command_imports_the_client_but_never_the_server():
    loaded = modules_after("jobs")
    assert "hodei.client" in loaded
    assert loaded.isdisjoint({"numpy", "starlette", "uvicorn", "hodei.server", "hodei.engine", "rich"})


@pytest.mark.parametrize("name", NAMES)
def test_every_command_of_the_table_exists_under_its_name(name: str):
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.help


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bench", "kube", "replay", "sim", "test")])
def test_every_command_has_help_that_needs_no_server(hodei, name: str):
    result = hodei(name, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: hodei {name}")


LEAVES = {name: (command, help) for name, command, help in walk() if not isinstance(command, click.Group)}
# Files for other programs, and a server.
NO_DATA = (
    "hodei completion",
    "hodei slurm-shims",
    "hodei job init",
    "hodei job export",
    "hodei kube run",
    "hodei agent join",
)


@pytest.mark.parametrize("name", [name for name in LEAVES if name not in NO_DATA])
def test_every_command_that_prints_data_takes_the_same_option_for_its_format(name: str):
    assert "-o, --output FORMAT" in LEAVES[name][1]


# One word for one thing: a short option has the same long form everywhere.
SHORT = {
    "-a": "--all", "-d": "--detach", "-e": "--env", "-f": "--follow", "-l": "--selector", "-o": "--output",
    "-q": "--quiet", "-v": "--verbose", "-w": "--watch", "-y": "--yes",
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_options_and_arguments_mean_the_same_in_every_command(name: str):
    for param in LEAVES[name][0].params:
        for option in param.opts:
            assert option.startswith("--") or isinstance(param, click.Argument) or SHORT[option] in param.opts
        assert "--json" not in param.opts, "the format is -o json"
        assert "PATH" not in str(param.metavar), "a file is a FILE"


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_of_a_command_is_explained(name: str):
    missing = [param.opts for param in LEAVES[name][0].params if isinstance(param, click.Option)
               and not param.help and not param.hidden]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("alias", ALIASES)
def test_the_help_of_an_alias_names_its_command(hodei, alias: str):
    assert f"Alias of `hodei {ALIASES[alias]}`." in hodei(alias, "--help").stdout


@pytest.mark.parametrize("noun", ["job", "cron", "node", "backend", "reservation", "event", "audit", "share", "quota"])
def test_every_resource_can_be_listed(hodei, noun: str):
    assert hodei(noun, "list", "--help").exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_complete_hodei(hodei, shell: str):
    result = hodei("completion", shell)
    assert result.exit_code == 0
    assert "_HODEI_COMPLETE" in result.stdout
    assert "hodei" in result.stdout


def completed(hodei, monkeypatch: pytest.MonkeyPatch, line: str, index: int) -> list[str]:
    monkeypatch.setenv("_HODEI_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(index))
    return [line.partition(",")[2] for line in hodei().stdout.splitlines() if line]


def test_completion_offers_the_commands(hodei, monkeypatch: pytest.MonkeyPatch):
    assert completed(hodei, monkeypatch, "hodei ", 1) == NAMES
    assert completed(hodei, monkeypatch, "hodei node ", 2) == [
        "list",
        "show",
        "cordon",
        "uncordon",
        "revoke",
        "exec",
        "drain",
        "taint",
        "label",
        "history",
    ]


def test_completion_offers_ids_and_nodes_of_the_server(hodei, monkeypatch, stub):
    from unit.cli.stub import job, node

    stub.on("GET", "/api/v1/jobs", {"jobs": [job(12), job(7)], "next_after": 0})
    stub.on("GET", "/api/v1/nodes", {"nodes": [node("n1"), node("n2"), node("m")]})
    assert completed(hodei, monkeypatch, "hodei logs ", 2) == ["12", "7", "last", "all"]
    assert completed(hodei, monkeypatch, "hodei node show n", 3) == ["n1", "n2"]


def test_completion_prints_no_error_without_a_server(hodei, monkeypatch: pytest.MonkeyPatch):
    assert completed(hodei, monkeypatch, "hodei logs l", 2) == ["last"]
    assert completed(hodei, monkeypatch, "hodei node show ", 3) == []


def test_a_mistyped_command_gets_a_suggestion(hodei):
    result = hodei("jbos")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "error: no such command: 'jbos'; did you mean 'jobs'?"
    assert "did you mean 'hodei job cancel'?" in hodei("job", "delete", "3").stderr
    assert "did you mean 'hodei backend delete'?" in hodei("backend", "rm", "lab").stderr


def test_the_version_of_client_and_server_is_printed(hodei, stub):
    assert hodei("version").stdout == f"hodei {__version__} (no server answers)\n"
    info = {"version": "0.2.0", "api": "v1", "installation": "i", "address": "a", "epoch": 1, "started_at": ""}
    stub.on("GET", "/api/v1/info", info | {"ready": True, "profiles": [], "backends": [], "jobs": {}})
    assert hodei("version").stdout == f"hodei {__version__}, server 0.2.0 at {stub.address}\n"


def test_the_reference_page_is_generated_from_the_commands():
    """Regenerate it: python tests/unit/cli/reference.py > docs/reference/cli.md"""
    from pathlib import Path

    assert (Path(__file__).parents[3] / "docs/reference/cli.md").read_text() == document()
