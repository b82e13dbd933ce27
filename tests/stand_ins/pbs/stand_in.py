#!/usr/bin/env python3
"""A stand-in for PBS: what it prints, and with which return codes, is what a real OpenPBS 23.06 printed when recorded.

Called as qsub, qstat, qdel, qsig or pbsnodes (copies of this file in a directory of the test's own, where it also keeps its
jobs). Jobs are processes of this machine, started at once. As with PBS, a script is run below a login shell that reads its name
from stdin, and a program (`qsub -- PROGRAM`) is the job's first process itself; a job is over when that one is, and what is
left of its session is killed.

Files in the directory make trouble. `closed`: jobs wait. `down`: nobody listens. `hung`: the server does not answer; what is
handed in waits in its socket, and is accepted when it goes on, whether or not qsub is still there. `cut`: what is handed in is
accepted, and the connection breaks before the answer. `enforce`: a job that goes over its memory is killed. `queues.json`:
what queues there are.

It does not prove: that a real qsub takes these options, how a real server queues, places, limits, suspends, loses or forgets
jobs, how output is written over a network, in which order a real server works off what waited while it hung, or what other
versions print. A real server has to be asked for that.
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


def say(problem, code):
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
    """All changes of jobs go one after the other."""
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


def there(name):
    return os.path.exists(os.path.join(HOME, name))


def reach_server(command):
    """Returns when it listens and answers."""
    if there("down"):
        say(f"Connection refused\n{command}: cannot connect to server {SERVER} (errno=111)", 111)
    while there("hung"):
        time.sleep(0.02)


def queues():
    queue = {"queue_type": "Execution", "total_jobs": 0, "enabled": "True", "started": "True"}
    if not there("queues.json"):
        return dict.fromkeys(QUEUES, queue)
    with open(os.path.join(HOME, "queues.json")) as file:
        return {name: {**queue, **fields} for name, fields in json.load(file).items()}


def full(number):
    return number if "." in number else f"{number}.{SERVER}"


def qsub(words):
    """The server's side is a process of its own: it goes on when qsub is killed."""
    if there("down"):
        reach_server("qsub")
    script = b"" if "--" in words else sys.stdin.buffer.read()
    answer, theirs = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(answer)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        for held in range(3, 64):  # also the lock that the backend has its commands hold
            if held != theirs:
                try:
                    os.close(held)
                except OSError:
                    pass
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        code = 0
        try:
            while there("hung"):
                time.sleep(0.02)
            accept(words, script)
            if there("cut"):
                os._exit(0)  # and nobody hears of it
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
    said = b""
    while chunk := os.read(answer, 65536):
        said += chunk
    text, end, code = said.decode().rpartition("\n")
    if not end:
        say("qsub: Protocol error", 15031 % 256)
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
            say("qsub: illegal option here", 2)
        value = words.pop(0)
        if letter == "-v":
            variables.update(pair.split("=", 1) for pair in value.split(","))
        elif letter == "-l":
            resources.update(pair.split("=", 1) for pair in [value])
        else:
            options[letter[1]] = value
    queue = options.get("q", "workq")
    if queue not in queues():
        say("qsub: Unknown queue", BAD_QUEUE)
    if queues()[queue].get("from_route_only") == "True":
        say("qsub: Access to queue is denied", 15022 % 256)
    while queues()[queue]["queue_type"] == "Route":
        queue = queues()[queue]["route_destinations"].split(",")[0]
    chunk = dict(pair.split("=", 1) for pair in resources["select"].split(":")[1:])
    for name in chunk:
        if name not in RESOURCES:
            say(f"qsub: Unknown resource: {name}", BAD_RESOURCE)
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
    """Runs one job, as the daemon on a node would."""
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
    # A home of its own: the scripts are login shells, and must not wait for what the tester's profile does.
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
        if not over and there("enforce") and memory(process.pid) > limit:
            over = True
            kill(process.pid, signal.SIGKILL)
    kill(process.pid, signal.SIGKILL)
    job = load(name)
    if over:
        change(name, job_state="F", substate=93, Exit_status=-27, obittime=ctime(),
               history_timestamp=int(time.time()), comment=job["comment"] + " and exceeded resource mem")  # fmt: skip
        return
    told = "" if job.get("deleted") else " and failed" if code else " and finished"
    change(name, job_state="F", substate=93, Exit_status=256 - code if code < 0 else code, obittime=ctime(),
           history_timestamp=int(time.time()), comment=job["comment"] + told)  # fmt: skip


def kill(leader, sign):
    for pid in session(leader):
        try:
            os.kill(pid, sign)
        except OSError:
            pass


def memory(leader):
    """What the processes of a session hold, in bytes."""
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
    asked = [full(word) for word in words if not word.startswith("-") and word != "json"]
    known = sorted(name[:-5] for name in os.listdir(JOBS) if name.endswith(".json")) if os.path.isdir(JOBS) else []
    found, code = {}, 0
    for number in asked or known:
        if number not in known:
            sys.stderr.write(f"qstat: Unknown Job Id {number}\n")
            code = UNKNOWN
            continue
        job = load(number)
        job.pop("deleted", None)
        job.pop("program", None)
        if job["job_state"] == "F" and not history:
            if asked:
                sys.stderr.write(
                    f"qstat: {number} Job has finished, use -x or -H to obtain historical job information\n"
                )
                code = FINISHED
            continue
        found[number] = job
    answer(**({"Jobs": found} if found else {}))
    sys.exit(code)


def one(command, number):
    number = full(number)
    if not os.path.exists(path_of(number)):
        say(f"{command}: Unknown Job Id {number}", UNKNOWN)
    job = load(number)
    if job["job_state"] == "F":
        say(f"{command}: Job has finished {number}", FINISHED)
    return number, job


def qdel(words):
    number, job = one("qdel", words[-1])
    if "session_id" not in job:
        change(number, job_state="F", substate=91, obittime=ctime(), comment="Not Running: terminated by root@vm")
        return
    change(number, deleted=True, comment=job["comment"] + " and terminated by root@vm")
    for sign in (signal.SIGTERM, signal.SIGKILL):
        kill(job["session_id"], sign)
        time.sleep(0.2)


def qsig(words):
    number, job = one("qsig", words[-1])
    if "session_id" not in job:
        say(f"qsig: Request invalid for state of job {number}", 156)
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
