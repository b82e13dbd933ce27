"""Create requests of containers: fields, refusals, and literal values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent_host import an_order
from hodei.backends.docker.container_spec import SUPERVISION, Supervision, build_spec, read_supervision
from hodei.backends.docker.settings import Allow, Host, Settings, check
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, InvalidInput
from hodei.model.job import Checkpoint, HealthCheck
from hodei.model.node import Grant

LOCAL = Host("h1")
REMOTE = Host("remote", url="tcp://docker.example:2376", tls="/certs")
PLAIN = Settings(image="busybox:local")


def body(order: Start, settings: Settings = PLAIN, host: Host = LOCAL, **more: Any) -> dict[str, Any]:
    return build_spec(order, settings, host, installation="abc", backend="farm", log_cap=3 << 20, **more).body


def with_mounts(text: str, *allowed: str, host: Host = LOCAL) -> list[dict[str, Any]]:
    settings = Settings(image="i", allow=Allow(mounts=allowed))
    found = body(an_order(1, annotations={"docker.hodei.io/mounts": text}), settings, host)["HostConfig"]["Mounts"]
    return [{key: mount[key] for key in ("Source", "Target", "ReadOnly")} for mount in found]


def test_limits_are_hard_and_swap_is_off():
    config = body(an_order(1, limits={"cpu": 1500, "memory": 64 << 20}))["HostConfig"]
    assert (config["NanoCpus"], config["Memory"], config["MemorySwap"]) == (1_500_000_000, 64 << 20, 64 << 20)
    assert config["PidsLimit"] == 4096
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["Privileged"] is False


def test_granted_cores_and_gpus_are_given_to_the_container():
    order = an_order(1)
    order = structs.replace(order, run=structs.replace(order.run, grant=Grant(cpus=(0, 3), gpus=((2, 1000), (5, 250)))))
    config = body(order)["HostConfig"]
    assert config["CpusetCpus"] == "0,3"
    assert config["DeviceRequests"] == [{"Driver": "", "DeviceIDs": ["2", "5"], "Capabilities": [["gpu"]]}]


def test_arguments_stay_separate_and_the_entrypoint_of_the_image_is_replaced():
    found = body(an_order(1, "sh", "-c", "echo $HOME; rm -rf /", env={"A": "b c"}))
    assert (found["Entrypoint"], found["Cmd"]) == (["sh"], ["-c", "echo $HOME; rm -rf /"])
    assert "A=b c" in found["Env"]


def test_a_job_cannot_forge_the_labels_of_hodei():
    labels = body(an_order(1, labels={"hodei.io/installation": "other", "x": "y"}))["Labels"]
    assert (labels["hodei.io/installation"], labels["hodei.io/backend"], labels["hodei.io/run"]) == (
        "abc",
        "farm",
        "1.0.1",
    )
    assert labels["job.hodei.io/x"] == "y"


def test_supervision_is_restored_from_the_labels():
    hook = Checkpoint(signal="USR1", file="state/ok", every_ms=60_000)
    check = HealthCheck(http="http://node:8080/ok")
    host = Host("h1", address="10.0.0.7")
    order = an_order(1, checkpoint=hook, health=check, timeout_ms=5000, grace_ms=700, workdir="/srv")
    labels = body(order, host=host)["Labels"]
    supervision = read_supervision(labels)
    assert supervision == Supervision(
        timeout_ms=5000, grace_ms=700, checkpoint_file="/srv/state/ok", save=hook,
        health=structs.replace(check, http="http://10.0.0.7:8080/ok"),
    )  # fmt: skip
    assert read_supervision({SUPERVISION: "{not json"}) == Supervision()


def test_quality_of_service_sets_cpu_shares_and_oom_score():
    info = {"MemTotal": 16 << 30}
    full = {"cpu": 1000, "memory": 1 << 30}
    orders = [
        an_order(1, cpu=1, memory=1 << 30, limits=full),
        an_order(2, cpu=2, memory=4 << 30),
        an_order(3, cpu=0, memory=0),
    ]
    found = [body(order, info=info)["HostConfig"] for order in orders]
    assert [(config["CpuShares"], config["OomScoreAdj"]) for config in found] == [(1024, -997), (2048, 750), (2, 1000)]
    rootless = info | {"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}
    assert body(orders[0], info=rootless)["HostConfig"]["OomScoreAdj"] == 0


def test_a_health_command_is_run_by_the_daemon_and_replaces_the_check_of_the_image():
    assert body(an_order(1))["Healthcheck"] == {"Test": ["NONE"]}
    check = HealthCheck(command=("test", "-e", "/ok"), every_ms=50, timeout_ms=20, after_ms=10, failures=2)
    assert body(an_order(1, health=check))["Healthcheck"] == {
        "Test": ["CMD", "test", "-e", "/ok"], "Interval": 50_000_000, "Timeout": 20_000_000,
        "StartPeriod": 10_000_000, "Retries": 2,
    }  # fmt: skip


def test_a_mount_below_an_allowed_directory_is_read_only_by_default(tmp_path: Path):
    (tmp_path / "a/b").mkdir(parents=True)
    inside = str(tmp_path / "a/b")
    assert with_mounts(f"{inside}:/x", str(tmp_path / "a")) == [{"Source": inside, "Target": "/x", "ReadOnly": True}]
    assert with_mounts(f"{inside}:/x:rw", f"{tmp_path}/a:rw") == [{"Source": inside, "Target": "/x", "ReadOnly": False}]
    with pytest.raises(BackendRefused, match="to write to it is not allowed"):
        with_mounts(f"{inside}:/x:rw", str(tmp_path / "a"))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{allowed}/way-out", id="a link out of the directory"),
        pytest.param("{allowed}/way-out/passwd", id="below a link out of the directory"),
        pytest.param("{allowed}/../secret", id="dots"),
        pytest.param("{allowed}x", id="a directory with the same prefix"),
        pytest.param("relative", id="a relative path"),
        pytest.param("volume", id="the name of a volume"),
        pytest.param("/", id="the root"),
    ],
)
def test_a_mount_cannot_leave_an_allowed_directory(tmp_path: Path, source: str):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (tmp_path / "allowedx").mkdir()
    (allowed / "way-out").symlink_to("/etc")
    with pytest.raises(BackendRefused):
        with_mounts(f"{source.format(allowed=allowed)}:/x", str(allowed))


def test_on_a_remote_host_only_the_listed_directories_can_be_mounted():
    assert with_mounts("/srv/data:/x", "/srv/data", host=REMOTE)[0]["Source"] == "/srv/data"
    with pytest.raises(BackendRefused):
        with_mounts("/srv/data/sub:/x", "/srv/data", host=REMOTE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"annotations": {"docker.hodei.io/netwrok": "x"}}, "did you mean 'network'", id="a misspelt key"),
        pytest.param({"annotations": {"docker.hodei.io/privileged": "yes"}}, "true or false", id="not a boolean"),
        pytest.param(
            {"annotations": {"docker.hodei.io/pull": "now"}}, "always, missing or never", id="an invalid pull policy"
        ),
        pytest.param({"limits": {"memory": 1000}}, "memory limit", id="less memory than the minimum"),
        pytest.param({"workdir": "here"}, "working directory", id="a relative directory"),
        pytest.param({"env": {"A=B": "c"}}, "A=B", id="an invalid name of a variable"),
        pytest.param({"env": {"SECRET": "hidden\0"}}, "SECRET", id="an invalid value of a variable"),
    ],
)
def test_an_impossible_order_is_refused_with_a_reason(fields, message):
    with pytest.raises(BackendRefused, match=message) as refusal:
        body(an_order(1, **fields))
    assert "hidden" not in refusal.value.message


def test_a_task_without_an_image_is_refused_without_a_default_image():
    with pytest.raises(BackendRefused, match="names no image"):
        body(an_order(1), Settings())


def test_allowed_options_are_applied():
    allow = Allow(networks=("ml",), users=("*",), devices=("/dev/fuse",), host_namespaces=("ipc",), privileged=True)
    options = {"network": "ml", "user": "7:7", "devices": "/dev/fuse", "host-namespaces": "ipc", "privileged": "true"}
    order = an_order(1, annotations={f"docker.hodei.io/{key}": value for key, value in options.items()})
    found = body(order, Settings(image="i", allow=allow))
    config = found["HostConfig"]
    assert (found["User"], config["NetworkMode"], config["IpcMode"], config["Privileged"]) == (
        "7:7",
        "ml",
        "host",
        True,
    )
    assert config["Devices"][0]["PathOnHost"] == "/dev/fuse"
    assert "SecurityOpt" not in config


@pytest.mark.parametrize(
    ("host", "message"),
    [
        pytest.param({"url": "tcp://docker.example:2375"}, "set `tls`", id="an unencrypted remote port"),
        pytest.param({"url": "tcp://127.0.0.1"}, "port", id="no port"),
        pytest.param({"url": "http://x:1"}, "write unix", id="another protocol"),
        pytest.param({"url": "ssh://me:hidden@host"}, "password", id="a password in the address"),
        pytest.param({"url": "ssh://-oProxyCommand=id"}, "names no host", id="an option for a host"),
        pytest.param({"url": "ssh://-oProxyCommand=id@host"}, "names no host", id="an option for a user"),
        pytest.param({"name": "Big Host"}, "not a valid name", id="an invalid name"),
        pytest.param({"cpu": "lots"}, "not a quantity", id="an invalid amount"),
    ],
)
def test_an_invalid_or_unsafe_host_is_refused(host, message):
    with pytest.raises(InvalidInput, match=message):
        check("farm", Settings(hosts=(Host(**{"name": "h1", **host}),)))


def test_default_settings_are_valid_and_read_from_a_table():
    table = {
        "hosts": [{"name": "h1", "url": "tcp://localhost:2375", "cpu": 4, "max_containers": 10}],
        "allow": {"mounts": ["/data:rw"]},
    }
    found = msgspec.convert(table, Settings)
    check("farm", found)
    assert found.hosts[0].amounts() == {"cpu": 4000}


ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=30)
SHELL_CODE = st.sampled_from(
    ["$(touch /tmp/canary)", "`id`", "; rm -rf /", "--privileged", "-v /:/host", "' || id #", "\n", "${IFS}"]
)
STRINGS = st.lists(st.one_of(ANY_TEXT, SHELL_CODE), min_size=20, max_size=20)
EXAMPLES = 500  # of twenty strings each


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(strings=STRINGS)
def test_ten_thousand_strings_in_every_field_reach_the_daemon_unchanged(strings):
    """Each value is in its own field of the body, and no other field has changed."""
    without_strings = body(an_order(1))
    own_variables = {pair.partition("=")[0] for pair in without_strings["Env"]}
    for string in strings:
        variable = string.replace("=", "") or "x"
        variable = "x" if variable in own_variables else variable
        order = an_order(1, string, string, env={variable: string}, labels={string: string}, workdir=f"/{string}")
        read = json.loads(
            msgspec.json.encode(body(structs.replace(order, spec=structs.replace(order.spec, name=string))))
        )
        assert (read["Entrypoint"], read["Cmd"]) == ([string], [string])
        assert f"{variable}={string}" in read["Env"]
        assert len(read["Env"]) == len(without_strings["Env"]) + 1
        assert read["Labels"][f"job.hodei.io/{string}"] == string
        assert read["Labels"]["hodei.io/job-name"] == string
        assert read["WorkingDir"] == f"/{string}"
        assert read["HostConfig"] == without_strings["HostConfig"]
        assert read["Image"] == "busybox:local"
        assert set(read) - {"WorkingDir"} == without_strings.keys()
