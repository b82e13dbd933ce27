"""Aliases of settings, and the YAML form with `scheduler.backends[]`; mistakes are reported with their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hodei.api.config import parse_config, read_yaml
from hodei.api.config_aliases import ALWAYS
from hodei.backends.registry import settings_of
from hodei.configuration import load_config
from hodei.model.config import Config
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import FILTERS, LAYOUTS
from hodei.wiring import make_controller

BACKENDS = """\
scheduler:
  backends:
    - type: kubernetes
      kubeconfig: "~/.kube/config"
      namespace: "default"

    - type: docker_standalone
      socket_path: "/var/run/docker.sock"

  policies:
    backend_preference: "cost_optimized"  # or "performance", "locality"
    fallback_enabled: true
    health_check_interval: 30s
"""
SCHEDULERS = """\
schedulers:
  - name: general
    queue_strategy:
      Priority: {with_preemption: false, max_queue_time: 2h}
    worker_selection: BinPacking
    filter_plugins: [resource, affinity, taint]
    score_plugins: [resource_scorer, load_scorer, affinity_scorer]
    preemption_policy: {enabled: false, max_preemptions: 7, grace_period: 45s}
    scheduling_timeout: 300
    parallel_scheduling: true
  - name: gpu
    queue_strategy: {type: fair, tenant_key: user, weights: {ann: 3}, quantum: 30}
    worker_selection: {Custom: "gpu_hodei"}
    scoring_weights: {resource_utilization: 0.4, load_balancing: 0.3, affinity_bonus: 0.2, network_proximity: 0.1}
    timeout_seconds: 60
    namespace: lab
"""


def test_the_filters_that_are_always_active_are_those_of_the_registry() -> None:
    assert (*FILTERS, *LAYOUTS) == ALWAYS
    profile = read("scheduler: {filter_plugins: [taint_filter, 'a.b:C']}").scheduling.profiles["default"]
    assert profile.plugins == ("a.b:C",)


def read(text: str) -> Config:
    return parse_config(*read_yaml(text.encode(), "hodei.yaml"))[0]


def test_the_yaml_form_with_backends_and_policies_is_read() -> None:
    config = read(BACKENDS)
    assert config.backends == {
        "kubernetes": {"kind": "kubernetes", "kubeconfig": "~/.kube/config", "namespace": "default"},
        "docker-standalone": {
            "kind": "docker",
            "hosts": [{"name": "docker", "url": "unix:///var/run/docker.sock"}],
        },
    }
    for name, table in config.backends.items():
        settings_of(name, table)
    assert config.scheduling.profiles["default"].backend_policy == "cost_optimized"
    assert (config.scheduling.fallback_enabled, config.scheduling.fallback) == (
        True, ("kubernetes", "docker-standalone"),
    )  # fmt: skip
    assert config.health.interval == "30s"
    make_controller(config.scheduling)


def test_a_fallback_chain_has_names_or_types_of_backends() -> None:
    listed = """\
scheduler:
  backends:
    - {type: docker_standalone, socket_path: /a.sock, name: my_docker}
    - {type: docker_standalone, socket_path: /b.sock}
    - {type: docker_standalone, socket_path: /c.sock}
  policies: {fallback_chain: [local, docker_standalone]}
"""
    config = read(listed)
    assert list(config.backends) == ["my_docker", "docker-standalone", "docker-standalone-3"]
    assert config.scheduling.fallback == ("local", "my_docker", "docker-standalone", "docker-standalone-3")
    hosts = [table["hosts"][0]["name"] for table in config.backends.values()]
    assert hosts == ["my-docker", "docker", "docker-standalone-3"], "host names must be distinct"
    for name, table in config.backends.items():
        settings_of(name, table)
    assert read(listed.replace("docker_standalone]", "my_docker]")).scheduling.fallback == ("local", "my_docker")


def test_every_alias_of_a_scheduler_is_translated() -> None:
    scheduling = read(SCHEDULERS).scheduling
    general, gpu = scheduling.profiles["default"], scheduling.profiles["gpu"]
    assert (general.queue, general.preemption, general.max_queue_time) == ("priority", False, "2h")
    assert general.worker_selection == "bin_packing"
    assert general.plugins == (), "every profile has these filters"
    assert general.score_plugins == ("resource", "load", "affinity")
    assert (general.grace, scheduling.preemption.max_per_job) == ("45s", 7)
    assert general.scheduling_timeout == "300s"
    assert scheduling.parallel_scheduling is True
    assert (gpu.queue, gpu.tenant_key, gpu.weights, gpu.quantum) == ("fair", "user", {"ann": 3}, "30s")
    assert gpu.worker_selection == "gpu_hodei"
    assert gpu.scores == {"resource": 40, "load": 30, "affinity": 20, "proximity": 10}
    assert (gpu.scheduling_timeout, gpu.projects) == ("60s", ("lab",))
    profiles = make_controller(scheduling).engine.profiles
    assert profiles["default"].queue.preempts is False
    assert {score.plugin.name for score in profiles["default"].scores} == {"resource", "load", "affinity"}


def test_the_aliases_work_in_a_toml_profile_too(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[scheduling.profiles.x]\nqueue_strategy = "Fifo"\nsecondary_policy = "shortest"\ntimeout_seconds = 5\n'
    )
    profile = load_config(file).scheduling.profiles["x"]
    assert (profile.queue, profile.secondary, profile.scheduling_timeout) == ("fifo", "shortest", "5s")


def test_primary_and_secondary_accept_camel_case() -> None:
    profile = read("scheduler: {primary_policy: Fifo, secondary_policy: Shortest}").scheduling.profiles["default"]
    assert (profile.queue, profile.secondary) == ("fifo", "shortest")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("profiles: {x: {queue: fair, weights: {a: 2, b: 0}}}", "scheduling.profiles.x.weights.b"),
        ("preemption: {max_per_job: -1}", "scheduling.preemption.max_per_job"),
        ("preemption: {budget: -3}", "scheduling.preemption.budget"),
    ],
)
def test_an_invalid_number_is_refused(text: str, path: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read(f"scheduling: {{{text}}}")
    assert [where for where, _ in error.value.problems] == [f"line 1: {path}"]


def test_a_configuration_in_the_own_form_may_be_yaml(tmp_path: Path) -> None:
    file = tmp_path / "hodei.yaml"
    file.write_text(
        "server: {port: 1234}\nscheduling:\n  profiles:\n    x: {queue: fair}\nnodes:\n  - {name: a, cpu: 2}\n"
    )
    config = load_config(file)
    assert (config.server.port, config.scheduling.profiles["x"].queue, config.nodes[0].name) == (1234, "fair", "a")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SCHEDULERS + "    wroker_selection: x\n", "line 17: schedulers[1].wroker_selection: unknown key 'wroker_selection'"
         "; did you mean 'worker_selection'?"),
        (BACKENDS.replace("fallback_enabled", "fallback_enable"), "line 12: scheduler.policies.fallback_enable: unknown key"),
        (BACKENDS.replace("cost_optimized", "cheap"), "line 11: scheduler.policies.backend_preference"),
        (BACKENDS + "    x: 1\n", "line 14: scheduler.policies.x: unknown key 'x'"),
        ("scheduler:\n  queue_strategy: {fifo: {quantum: 3}}\n", "line 2: scheduler.queue_strategy.quantum: the queue fifo"),
        ("scheduler:\n  preemption_policy:\n    grace: 3s\n", "line 3: scheduler.preemption_policy.grace: unknown key"),
        ("scheduler:\n  backends:\n    - type: cloud_vm\n      provider: aws\n",
         "line 3: scheduler.backends[0].type: there is no backend of type 'cloud_vm' in this version"),
        ("scheduler:\n  backends:\n    - type: dokcer\n", "line 3: scheduler.backends[0].type: there is no backend of type"),
        ("scheduler:\n  backends: [{type: local}]\n  policies:\n    fallback_chain: [locl]\n",
         "line 4: scheduler.policies.fallback_chain: there is no backend 'locl'; did you mean 'local'?"),
        ("scheduler:\n  backends:\n    - {type: slurm, name: a}\n    - {type: pbs, name: a}\n",
         "line 4: scheduler.backends[1].name: there is a backend 'a' already"),
        ("scheduler:\n  scoring_weights: {load: -1}\n", "line 2: scheduler.scoring_weights: the weight of load"),
        ("scheduler:\n  queue: fair\n  queue_strategy: fifo\n", "line 3: scheduler.queue_strategy: queue is given twice, under two names"),
        ("schedulers:\n  - name: a\n  - name: a\n", "line 3: schedulers[1].name: there is a scheduler 'a' already"),
        ("schedulers:\n  - {name: a, parallel_scheduling: 4}\n  - {name: b, parallel_scheduling: 5}\n",
         "line 3: schedulers[1].parallel_scheduling: parallel_scheduling is a setting of the whole server"),
        ("scheduling:\n  profiles:\n    x:\n      queu: fair\n", "line 4: scheduling.profiles.x.queu: unknown key 'queu'"),
        ("nodes:\n  - name: a\n    cpus: 3\n", "line 3: nodes[0].cpus: unknown key"),
        ("a: [1\n", "hodei.yaml:2:1"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_their_line(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read(text)
    messages = [f"{path}: {text}" for path, text in error.value.problems]
    assert any(each.startswith(problem) for each in messages), messages


@pytest.mark.parametrize(("value", "batch"), [("true", 1000), ("false", 1), ("10", 10)])
def test_parallel_scheduling_is_how_many_jobs_are_placed_in_one_step(value: str, batch: int) -> None:
    from builders import NOW_MS, a_job, a_node
    from hodei.model.facts import JobSubmitted, NodeJoined

    controller = make_controller(read(f"scheduler: {{parallel_scheduling: {value}}}\n").scheduling)
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 64, "640Gi"))])
    step = controller.step(NOW_MS, [JobSubmitted(a_job(id, cpu=1)) for id in range(1, 31)])
    assert len(step.plan.binds) == min(batch, 30)
    placed = len(step.plan.binds)
    for _ in range(31):
        if placed == 30:
            break
        assert controller.next_wakeup_ms(NOW_MS) == NOW_MS, "the next step is not due"
        placed += len(controller.step(NOW_MS).plan.binds)
    assert placed == 30


@pytest.mark.parametrize("value", [0, -3, 1_000_000])
def test_an_invalid_number_of_parallel_jobs_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"line 1: scheduler\.parallel_scheduling: out of range"):
        read(f"scheduler: {{parallel_scheduling: {value}}}\n")
