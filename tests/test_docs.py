"""The documentation is correct: examples parse or run, links have targets, tables have the entries of the code.

A fenced block may have a comment on the line before it:

    <!-- run -->                 console: every `$ ` line is run by a real shell; python: run against a real server
    <!-- file: NAME -->          written to NAME in the directory in which the commands of the page run
    <!-- not a job -->           YAML that is not a job; `<!-- not a configuration -->`: TOML that is not a configuration

In a console block `…` matches any text, and alone on a line any lines; several spaces match one. `# exit code 5` after a
command is its expected exit code (default 0). The output of a command without lines after it is not checked.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
import pytest

from hodei.api.config import parse_config, read_toml
from hodei.backends.registry import KINDS
from hodei.configuration import load_config, node_offer
from hodei.jobfile.parse import parse_job
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.config import Config, imported_code
from hodei.model.job import JOB_ENDED
from hodei.plugins import registry
from hodei.runtime.metrics import Metrics
from hodei.runtime.observers import Observers
from hodei.wiring import make_controller
from real.conftest import installation as installation  # a fixture
from real.installation import Installation

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "hodei"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
TIMEOUT_S = 600
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)\s*$")
_COMMENT = re.compile(r"^ *<!-- (?P<text>.*?) -->\s*$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"[A-Z]{2,}(_[A-Z0-9]+)*_?")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    comment: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        comment = _COMMENT.match(lines[at - 1]) if at else None
        ends = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        cut = len(opened["indent"])
        text = "\n".join(line[cut:] for line in lines[at + 1 : ends]) + "\n"
        yield Block(page, at + 1, opened["language"], comment["text"] if comment else "", text)
        at = ends + 1


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(language: str, without: str = "") -> list[Any]:
    """The blocks of a language, without those that have this comment."""
    found = [block for block in BLOCKS if block.language == language and (not without or block.comment != without)]
    return [pytest.param(block, id=str(block)) for block in found]


def pages_that_run(language: str) -> list[Any]:
    pages = dict.fromkeys(b.page for b in BLOCKS if b.language == language and b.comment == "run")
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```\s*$", "", page.read_text())


@pytest.mark.parametrize("block", blocks("yaml", without="not a job"))
def test_a_job_in_the_documentation_is_valid(block: Block) -> None:
    for document in load_yaml(block.text, name=str(block)):
        assert parse_job(document, now_ms=1).tasks


@pytest.mark.parametrize("block", blocks("toml", without="not a configuration"))
def test_a_configuration_in_the_documentation_can_be_loaded(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block.text)
    config, _ = parse_config(*read_toml(path.read_bytes(), str(path)), full=True)
    assert config != Config()
    if any(not name.startswith("hodei.") for name in imported_code(config).values()):
        return  # the code of an example is not installed
    assert load_config(path) == config
    for node in config.nodes:
        assert node_offer(node).name
    make_controller(config.scheduling)


@pytest.mark.parametrize("block", [p for p in blocks("toml") if p.values[0].comment == "not a configuration"])
def test_other_toml_is_valid(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_in_the_documentation_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


def test_the_comment_of_every_block_is_known() -> None:
    known = {"", "run", "not a job", "not a configuration"}
    unknown = [str(block) for block in BLOCKS if block.comment not in known and not block.comment.startswith("file: ")]
    assert unknown == []


class Command(NamedTuple):
    line: str
    code: int
    expected: list[str]


def commands_of(block: Block) -> Iterator[Command]:
    line, expected = "", list[str]()
    for text in [*block.text.splitlines(), "$ "]:
        if text.startswith("$ "):
            if line:
                wanted = re.search(r"# exit code (\d+)\s*$", line)
                yield Command(line, int(wanted[1]) if wanted else 0, expected)
            line, expected = text[2:], []
        elif text.startswith("> ") and not expected:
            line = f"{line}\n{text[2:]}"
        elif text.strip():
            expected.append(text)


def matches(expected: list[str], output: str) -> bool:
    parts = []
    for line in expected:
        if line.strip() == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(r"[^\n]*".join(re.escape(piece) for piece in _one_space(line).split("…")) + "\n")
    lines = [_one_space(line) for line in output.splitlines() if line.strip()]
    return re.fullmatch("".join(parts), "".join(line + "\n" for line in lines)) is not None


def _one_space(line: str) -> str:
    return " ".join(line.split())


def shell_env(installation: Installation) -> dict[str, str]:
    return installation.env({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"})


@pytest.mark.real
@pytest.mark.parametrize("page", pages_that_run("console"))
def test_the_commands_of_a_page_have_the_shown_output(page: Path, installation: Installation, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    commands: list[Command] = []
    for block in blocks_of(page):
        if block.comment.startswith("file: "):
            path = work / block.comment.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "console" and block.comment == "run":
            commands += commands_of(block)
    script = "".join(f"{command.line}\nprintf '\\n@@ {number} %d\\n' $?\n" for number, command in enumerate(commands))
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1 </dev/null\n{script}"], cwd=work, env=shell_env(installation), capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    parts = re.split(r"\n@@ \d+ (\d+)\n", done.stdout)
    for command, output, code in zip(commands, parts[0::2], parts[1::2], strict=False):
        assert int(code) == command.code, f"$ {command.line}\n{output}(exit code {code})"
        if command.expected:
            assert matches(command.expected, output), f"$ {command.line}\n{output}\nis not\n" + "\n".join(
                command.expected
            )
    assert len(parts) == 2 * len(commands) + 1, done.stdout[-2000:]


@pytest.mark.real
@pytest.mark.parametrize("page", pages_that_run("python"))
def test_the_python_of_a_page_runs_against_a_real_server(
    page: Path, installation: Installation, tmp_path: Path
) -> None:
    installation.up()
    for block in blocks_of(page):
        if block.language == "python" and block.comment == "run":
            done = subprocess.run(
                [sys.executable, "-c", block.text], cwd=tmp_path, env=shell_env(installation), capture_output=True,
                text=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_targets(page: Path) -> None:
    dead = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            dead.append(link)
    assert dead == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"(?m)^#+ +(.+?)\s*$", prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_the_index() -> None:
    index = DOCS / "index.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(index))}
    assert [str(page) for page in sorted(DOCS.rglob("*.md")) if page != index and page not in linked] == []


def test_no_page_has_a_path_of_this_machine() -> None:
    home = str(Path.home())
    assert [str(page) for page in PAGES if str(ROOT) in page.read_text() or f"{home}/" in page.read_text()] == []


def first_cells(page: Path, section: str = "") -> list[tuple[str, ...]]:
    """The cells of all table rows that begin with code, on the whole page or in one section."""
    text = prose(page)
    if section:
        _, _, text = text.partition(f"\n## {section}\n")
        text = text.partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| *(`.*?) *\|$", text)
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", row)) for row in rows]


def test_the_reference_has_exactly_the_metrics_of_the_code() -> None:
    registry = Metrics().registry
    Observers(registry)
    kinds = {f.name + ("_total" if f.type == "counter" else ""): f.type for f in registry.collect()}
    documented = {row[0].strip("`"): row[1] for row in first_cells(DOCS / "reference" / "metrics.md")}
    assert documented == kinds


SECTIONS = {
    "server": ("server", "ServerConfig"),
    "server.limits": ("server", "LimitsConfig"),
    "scheduling": ("scheduling", "SchedulingConfig"),
    "scheduling.profiles.NAME": ("scheduling", "ProfileConfig"),
    "scheduling.retry": ("scheduling", "BackoffConfig"),
    "scheduling.admission": ("scheduling", "AdmissionConfig"),
    "scheduling.preemption": ("scheduling", "PreemptionConfig"),
    "scheduling.capacity": ("scheduling", "CapacityConfig"),
    "scheduling.capacity.groups.NAME": ("scheduling", "NodeGroupConfig"),
    "scheduling.data": ("scheduling", "DataConfig"),
    "scheduling.estimates": ("scheduling", "EstimatesConfig"),
    "scheduling.forecast": ("scheduling", "ForecastConfig"),
    "scheduling.routes": ("scheduling", "RouteConfig"),
    "scheduling.routes.when": ("scheduling", "RouteWhenConfig"),
    "scheduling.escalation": ("scheduling", "EscalationConfig"),
    "scheduling.breaker": ("scheduling", "BreakerConfig"),
    "scheduling.shares": ("scheduling", "SharesConfig"),
    "scheduling.shares.accounts": ("scheduling", "AccountConfig"),
    "scheduling.quotas.PROJECT": ("scheduling", "QuotaConfig"),
    "scheduling.budgets.PROJECT": ("scheduling", "BudgetConfig"),
    "scheduling.ranges.PROJECT": ("scheduling", "RangeConfig"),
    "scheduling.spill": ("scheduling", "SpillConfig"),
    "scheduling.data_rules": ("scheduling", "DataRuleConfig"),
    "health": ("health", "HealthConfig"),
    "nodes": ("nodes", "NodeConfig"),
    "nodes.sockets": ("nodes", "SocketConfig"),
}


def config_structs(of: type = Config) -> dict[str, type]:
    found = {of.__name__: of}
    for hint in get_type_hints(of).values():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                found |= config_structs(part)
    return found


def test_every_struct_of_the_configuration_has_a_section() -> None:
    assert {name for _, name in SECTIONS.values()} | {"Config"} == set(config_structs())


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_the_configuration_is_in_the_reference_with_its_default(section: str) -> None:
    struct = config_structs()[SECTIONS[section][1]]
    keys = {}
    for field in msgspec.structs.fields(struct):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if not isinstance(default, msgspec.Struct) and field.name != "profiles":
            keys[field.encode_name] = default
    documented = {
        row[0].strip("`"): row[1] for row in first_cells(DOCS / "reference" / "configuration.md", f"[{section}]")
    }
    assert documented.keys() == keys.keys()
    for key, default in keys.items():
        if default is msgspec.NODEFAULT or default is None:
            assert not documented[key].startswith("`"), key
        else:
            plain = list(default) if isinstance(default, tuple) else default
            assert tomllib.loads(f"it = {documented[key].strip('`')}")["it"] == plain, key


def codes_in_source() -> set[str]:
    """Strings in capitals in the packages that produce reasons, and every `code=` in the others."""
    found = {state.upper() for state in JOB_ENDED}
    for package in (
        "plugins",
        "engine",
        "control",
        "runtime",
        "model/audit.py",
        "model/errors.py",
        "model/outcome.py",
        "server",
        "client",
        "cli",
        "agent",
        "backends",
        "kube",
    ):
        path = SOURCE / package
        assert path.exists(), f"{package} has moved: update this list, so that its reason codes are found"
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                if package in ("server", "client", "cli", "agent", "backends"):
                    found |= _named_codes(node)
                elif package == "kube":
                    found |= _codes_of_reasons(node)
                elif package == "model/audit.py":
                    found |= _constants_named_as_their_value(node)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value):
                    found.add(node.value)
    return found


def _constants_named_as_their_value(node: ast.AST) -> set[str]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)) if name == value:
            return {name}
    return set()


def _codes_of_reasons(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Reason", "PodRefused"):
        texts = {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
        return {text for text in texts if _CODE.fullmatch(text)}
    return set()


def _name_of_call(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _named_codes(node: ast.AST) -> set[str]:
    values: list[ast.expr] = []
    if (isinstance(node, ast.keyword) and node.arg == "code") or (
        isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "code" for t in node.targets)
    ):
        values = [node.value]
    elif isinstance(node, ast.Call) and _name_of_call(node) in ("Refused", "_reply", "_refuse"):
        values = list(node.args)
    elif isinstance(node, ast.Dict):
        values = [v for k, v in zip(node.keys, node.values, strict=True) if getattr(k, "value", "") == "code"]
    texts = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return {text for text in texts if _CODE.fullmatch(text)}


def test_the_reference_has_exactly_the_reason_codes_of_the_code() -> None:
    rows = first_cells(DOCS / "reference" / "reasons.md")
    documented = {code for row in rows for code in re.findall(r"`([A-Z][A-Z_]+)`", row[0])}
    codes = codes_in_source()
    families = {code for code in codes if code.endswith("_")}
    members = {code for code in documented if any(code.startswith(family) for family in families)}
    assert {family for family in families if not any(code.startswith(family) for code in members)} == set()
    assert documented - members == codes - families


def test_the_page_on_scheduling_names_every_point_plugin_and_queue() -> None:
    page = DOCS / "explanation" / "scheduling.md"
    points = {name for row in first_cells(page, "Scheduling cycle and extension points") for name in _coded(row[0])}
    assert points >= {"queue_sort", "choose_gpu", *registry._POINTS}
    text = prose(page)
    filters = text.partition("Built-in filters:")[2].partition("\n\n")[0]
    assert set(_coded(filters.partition("Built-in layouts:")[0])) == set(registry.FILTERS)
    assert set(registry.LAYOUTS) <= set(_coded(filters))
    weights = {row[0].strip("`"): row[1] for row in first_cells(page) if len(row) == 3 and row[1].isdigit()}
    assert weights == {name: str(weight) for name, weight in registry.WEIGHTS.items()}
    assert {name for row in first_cells(page, "Plugins added by settings") for name in _coded(row[0])} == {
        "scope", "quota", "spill", "fallback_chain", "data_rules",
        "cost_optimized", "performance", "locality", "gpu_last",
    }  # fmt: skip
    assert set(registry.QUEUES) <= set(_coded(text.partition("\n## Queues\n")[2].partition("\n## ")[0]))


def test_the_glossary_names_every_point_and_kind_of_backend_in_order() -> None:
    rows = re.findall(r"(?m)^\| ([a-z][^|]*?) \| (.*) \|$", prose(DOCS / "reference" / "glossary.md"))
    documented = dict(rows[1:])  # without the header
    assert list(documented) == sorted(documented), "terms are sorted"
    assert set(_coded(documented["point"])) == {"queue_sort", "choose_gpu", *registry._POINTS}
    assert set(_coded(documented["backend"])) == set(KINDS)


def _coded(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)


# Paths in the docs that are examples, or that exist only on a user's machine.
_EXAMPLE_PATHS = {"plugins/keep_light.py", "setup.sh", "RUN.sh", "installation.py"}


def test_every_module_that_a_page_names_exists() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    named = {(page.name, path) for page in pages for path in re.findall(r"`([\w./-]+\.(?:py|sh))`", page.read_text())}
    roots = (ROOT, ROOT / "src", SOURCE, ROOT / "tests", *(ROOT / "examples").iterdir())
    missing = {(page, path) for page, path in named if not any((root / path).exists() for root in roots)}
    assert {(page, path) for page, path in missing if path not in _EXAMPLE_PATHS} == set()
