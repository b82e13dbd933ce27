#!/usr/bin/env python3
"""A stand-in for PBS. Its output and exit codes are recorded from OpenPBS 23.06.

It is called as qsub, qstat, qdel, qsig or pbsnodes: copies of this file in a directory that also has the jobs. Jobs are
local processes and start at once. As with PBS, a script runs below a login shell that reads its name from stdin, and a
program (`qsub -- PROGRAM`) is the first process of the job. When that process ends, the job ends and the rest of its
session is killed.

Files in the directory inject faults. `closed`: jobs stay queued. `down`: connections are refused. `hung`: the server does
not respond; submitted jobs are accepted when the file is removed, even if qsub was killed. `cut`: jobs are accepted, and
the connection breaks before the response. `enforce`: a job over its memory limit is killed. `queues.json`: the queues.

It does not show whether a real qsub accepts these options, how a real server queues, places, limits, suspends or loses
jobs, how output is copied over a network, in which order a real server processes requests after a hang, or what other
versions print. These need a real server.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

HOME = os.path.dirname(os.path.abspath(sys.argv[0]))
JOBS = os.path.join(HOME, "jobs")
SERVER = "vm"
QUEUES = ("workq", "express")
VNODES = {"vm[0]": (4, "4gb", 2), "vm[1]": (4, "4gb", 0), "vm[2]": (8, "8gb", 0)}
RESOURCES = ("ncpus", "mem", "ngpus", "vnode", "host")
UNKNOWN, FINISHED, BAD_QUEUE, BAD_RESOURCE = 153, 35, 170, 187


def fail(problem, code):
    sys.stderr.write(problem + "\n")
    sys.exit(code)


def ctime():
    return time.strftime("%a %b %d %H:%M:%S %Y")


def path_of(number):
    return os.path.join(JOBS, number + ".json")


def load(number):
    with open(path_of(number)) as file:
        return json.load(file)


def save(number, job):
    with open(path_of(number) + ".new", "w") as file:
        json.dump(job, file)
    os.replace(path_of(number) + ".new", path_of(number))


def change(number, **fields):
    """Change a job under the lock."""
    with open(os.path.join(HOME, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = load(number)
        job.update(fields, mtime=ctime())
        save(number, job)
        return job


def answer(**fields):
    print(
        json.dumps({"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER, **fields}, indent=4)
    )


def exists(name):
    return os.path.exists(os.path.join(HOME, name))


def reach_server(command):
    """Return when the server responds."""
    if exists("down"):
        fail(f"Connection refused\n{command}: cannot connect to server {SERVER} (errno=111)", 111)
    while exists("hung"):
        time.sleep(0.02)


def queues():
    queue = {"queue_type": "Execution", "total_jobs": 0, "enabled": "True", "started": "True"}
    if not exists("queues.json"):
        return dict.fromkeys(QUEUES, queue)
    with open(os.path.join(HOME, "queues.json")) as file:
        return {name: {**queue, **fields} for name, fields in json.load(file).items()}


def full(number):
    return number if "." in number else f"{number}.{SERVER}"


def qsub(words):
    """The server runs in another process, which continues when qsub is killed."""
    if exists("down"):
        reach_server("qsub")
    script = b"" if "--" in words else sys.stdin.buffer.read()
    answer, theirs = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(answer)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        for fd in range(3, 64):  # also the lock that the backend's commands inherit
            if fd != theirs:
                try:
                    os.close(fd)
                except OSError:
                    pass
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        code = 0
        try:
            while exists("hung"):
                time.sleep(0.02)
            accept(words, script)
            if exists("cut"):
                os._exit(0)  # without a response
        except SystemExit as error:
            code = error.code or 0
        except BaseException as error:
            sys.stderr.write(f"qsub: {error!r}")
            code = 15010 % 256
        try:
            sys.stdout.flush()
            os.write(theirs, f"\n{code}".encode())
        except OSError:
            pass
        os._exit(0)
    os.close(theirs)
    response = b""
    while chunk := os.read(answer, 65536):
        response += chunk
    text, end, code = response.decode().rpartition("\n")
    if not end:
        fail("qsub: Protocol error", 15031 % 256)
    (sys.stdout if code == "0" else sys.stderr).write(text)
    sys.exit(int(code))


def accept(words, script):
    options, variables, resources = {}, {}, {}
    program = []
    if "--" in words:
        program, words = words[words.index("--") + 1 :], words[: words.index("--")]
    while words:
        letter = words.pop(0)
        if letter == "-V" or not letter.startswith("-"):
            fail("qsub: illegal option here", 2)
        value = words.pop(0)
        if letter == "-v":
            variables.update(pair.split("=", 1) for pair in value.split(","))
        elif letter == "-l":
            resources.update(pair.split("=", 1) for pair in [value])
        else:
            options[letter[1]] = value
    queue = options.get("q", "workq")
    if queue not in queues():
        fail("qsub: Unknown queue", BAD_QUEUE)
    if queues()[queue].get("from_route_only") == "True":
        fail("qsub: Access to queue is denied", 15022 % 256)
    while queues()[queue]["queue_type"] == "Route":
        queue = queues()[queue]["route_destinations"].split(",")[0]
    chunk = dict(pair.split("=", 1) for pair in resources["select"].split(":")[1:])
    for name in chunk:
        if name not in RESOURCES:
            fail(f"qsub: Unknown resource: {name}", BAD_RESOURCE)
    os.makedirs(JOBS, exist_ok=True)
    with open(os.path.join(HOME, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        number = len([entry for entry in os.listdir(JOBS) if entry.endswith(".SC")])
        name = f"{number}.{SERVER}"
        held = "h" in options
        save(name, {
            "Job_Name": options.get("N", "STDIN"), "Job_Owner": f"sjob@{SERVER}", "job_state": "H" if held else "Q",
            "queue": queue, "server": SERVER, "ctime": ctime(), "mtime": ctime(), "qtime": ctime(), "Priority": 0,
            "Error_Path": f"{SERVER}:{options['e']}", "Output_Path": f"{SERVER}:{options['o']}",
            "Rerunable": "True" if options.get("r") == "y" else "False", "Resource_List": {"ncpus": int(chunk["ncpus"]), **resources},
            "schedselect": resources["select"], "substate": 10,
            "Variable_List": {"PBS_O_HOME": "/home/sjob", "PBS_O_QUEUE": queue, "PBS_O_HOST": SERVER, **variables},
            "comment": "", "project": "_pbs_project_default", "program": program,
        })  # fmt: skip
        with open(os.path.join(JOBS, name + ".SC"), "wb") as file:
            file.write(script)
    os.chmod(os.path.join(JOBS, name + ".SC"), 0o700)
    subprocess.Popen(
        [sys.executable, "-IS", os.path.abspath(__file__), "mom", HOME, name], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, close_fds=True,
    )  # fmt: skip
    print(name)


def mom(home, name):
    """Run one job, as the daemon on a node does."""
    global HOME, JOBS
    HOME, JOBS = home, os.path.join(home, "jobs")
    wanted = dict(pair.split("=", 1) for pair in load(name)["schedselect"].split(":")[1:])
    if int(wanted["ncpus"]) > max(cpus for cpus, _, _ in VNODES.values()):
        comment = f"Can Never Run: Insufficient amount of resource: ncpus (R: {wanted['ncpus']} A: 16 T: 16)"
        change(name, comment=comment)
    while os.path.exists(os.path.join(HOME, "closed")) or load(name)["comment"].startswith("Can Never"):
        if load(name)["job_state"] == "F":
            return
        time.sleep(0.05)
    job = load(name)
    if job["job_state"] == "F":
        return
    vnode = wanted.get("vnode", "vm[0]")
    where = f"({vnode}:ncpus={wanted['ncpus']})"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [os.open(job[key].split(":", 1)[1], flags, 0o600) for key in ("Output_Path", "Error_Path")]
    # Another HOME, because scripts run in login shells, and must not run the user's profile.
    env = {**os.environ, "HOME": HOME, "PBS_JOBID": name, "PBS_QUEUE": job["queue"], "HOSTNAME": vnode}
    own = {"stdout": streams[0], "stderr": streams[1], "env": env, "cwd": "/", "start_new_session": True}
    if job["program"]:
        process = subprocess.Popen(job["program"], stdin=subprocess.DEVNULL, **own)
    else:
        process = subprocess.Popen(["-bash"], executable="/bin/bash", stdin=subprocess.PIPE, **own)
        process.stdin.write(os.path.join(JOBS, name + ".SC\n").encode())
        process.stdin.close()
    change(name, job_state="R", substate=42, stime=ctime(), session_id=process.pid, exec_vnode=where, exec_host=f"{SERVER}/0",
           run_count=1, comment=f"Job run at {ctime()} on {where}")  # fmt: skip
    limit, over = int(wanted["mem"].removesuffix("mb")) << 20, False
    while (code := process.poll()) is None:
        time.sleep(0.05)
        if not over and exists("enforce") and memory(process.pid) > limit:
            over = True
            kill(process.pid, signal.SIGKILL)
    kill(process.pid, signal.SIGKILL)
    job = load(name)
    if over:
        change(name, job_state="F", substate=93, Exit_status=-27, obittime=ctime(),
               history_timestamp=int(time.time()), comment=job["comment"] + " and exceeded resource mem")  # fmt: skip
        return
    suffix = "" if job.get("deleted") else " and failed" if code else " and finished"
    change(name, job_state="F", substate=93, Exit_status=256 - code if code < 0 else code, obittime=ctime(),
           history_timestamp=int(time.time()), comment=job["comment"] + suffix)  # fmt: skip


def kill(leader, sign):
    for pid in session(leader):
        try:
            os.kill(pid, sign)
        except OSError:
            pass


def memory(leader):
    """The resident memory of a session's processes in bytes."""
    total = 0
    for pid in session(leader):
        try:
            with open(f"/proc/{pid}/statm") as file:
                total += int(file.read().split()[1]) * 4096
        except (OSError, IndexError):
            pass
    return total


def session(leader):
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if int(file.read().rsplit(")", 1)[1].split()[3]) == leader:
                    out.append(int(pid))
        except (OSError, ValueError):
            pass
    return out


def qstat(words):
    if "-B" in words:
        return answer(Server={SERVER: {"server_state": "Active", "server_host": SERVER, "scheduling": "True",
                                       "default_queue": "workq", "pbs_version": "23.06.06"}})  # fmt: skip
    if "-Q" in words:
        return answer(Queue=queues())
    history = "-x" in words
    requested = [full(word) for word in words if not word.startswith("-") and word != "json"]
    known = sorted(name[:-5] for name in os.listdir(JOBS) if name.endswith(".json")) if os.path.isdir(JOBS) else []
    found, code = {}, 0
    for number in requested or known:
        if number not in known:
            sys.stderr.write(f"qstat: Unknown Job Id {number}\n")
            code = UNKNOWN
            continue
        job = load(number)
        job.pop("deleted", None)
        job.pop("program", None)
        if job["job_state"] == "F" and not history:
            if requested:
                sys.stderr.write(
                    f"qstat: {number} Job has finished, use -x or -H to obtain historical job information\n"
                )
                code = FINISHED
            continue
        found[number] = job
    answer(**({"Jobs": found} if found else {}))
    sys.exit(code)


def load_active(command, number):
    number = full(number)
    if not os.path.exists(path_of(number)):
        fail(f"{command}: Unknown Job Id {number}", UNKNOWN)
    job = load(number)
    if job["job_state"] == "F":
        fail(f"{command}: Job has finished {number}", FINISHED)
    return number, job


def qdel(words):
    number, job = load_active("qdel", words[-1])
    if "session_id" not in job:
        change(number, job_state="F", substate=91, obittime=ctime(), comment="Not Running: terminated by root@vm")
        return
    change(number, deleted=True, comment=job["comment"] + " and terminated by root@vm")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        kill(job["session_id"], sign)
        time.sleep(0.2)


def qsig(words):
    number, job = load_active("qsig", words[-1])
    if "session_id" not in job:
        fail(f"qsig: Request invalid for state of job {number}", 156)
    kill(job["session_id"], signal.Signals[words[words.index("-s") + 1]])


def pbsnodes(words):
    nodes = {"vm": {"Mom": "vm", "Port": 15002, "ntype": "PBS", "state": "free", "resources_assigned": {},
                    "resources_available": {"arch": "linux", "host": "vm", "mem": "0b", "ncpus": 0, "vnode": "vm"}}}  # fmt: skip
    for name, (cpus, memory, gpus) in VNODES.items():
        has = {"arch": "linux", "host": "vm", "mem": memory, "ncpus": cpus, "vnode": name}
        if gpus:
            has["ngpus"] = gpus
        nodes[name] = {"Mom": "vm", "Port": 15002, "ntype": "PBS", "state": "free", "resources_available": has,
                       "resources_assigned": {}, "sharing": "default_shared"}  # fmt: skip
    answer(nodes=nodes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["mom"]:
        mom(*sys.argv[2:])
    else:
        called = os.path.basename(sys.argv[0])
        if called != "qsub":
            reach_server(called)
        {"qsub": qsub, "qstat": qstat, "qdel": qdel, "qsig": qsig, "pbsnodes": pbsnodes}[called](sys.argv[1:])
